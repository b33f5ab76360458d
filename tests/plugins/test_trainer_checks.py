"""Hugging Face's Trainer: what its callback refuses, and what it exports."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from pmstore.testing import ForkServer

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="not installed")

CHECKS = (
    *("without_the_folder", "changed_settings", "given_wrongly", "streams_that_draw", "exports"),
    *("an_exception", "two_ranks", "the_example", "goes_on_after_its_end", "ended_by_an_error"),
    *("losses", "an_exception_of_one_that_is_gone", "told_to_stop", "log_changed_in_place"),
    *("a_model_that_is_made_anew", "callbacks_that_change_the_log", "logs_that_are_cut"),
    *("a_log_that_is_replaced", "metrics_that_are_arrays"),
)


@pytest.mark.parametrize("check", CHECKS)
def test_check(server: ForkServer, shm: Path, check: str) -> None:
    folder = shm / "check"
    folder.mkdir()
    run = server.run(f"trainer_checks:{check}", [str(folder)], timeout_seconds=300.0)
    assert run.exit_code == 0, "the child failed: see its stderr"
    assert not run.killed
