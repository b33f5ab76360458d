"""Saves under power failure, with a small budget: `python -m crashtests --kind saves` has more."""

from __future__ import annotations

import random
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from crashtests import disk, tiers
from tests.dcp import dcp_power

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]


@pytest.fixture
def place(shm: Path) -> Path:
    if not dcp_power.takes_direct(shm):
        pytest.skip("tmpfs has no O_DIRECT here: nothing goes straight home")
    return shm


def test_saves_survive_power_failures_and_need_each_sync(place: Path) -> None:
    """What the images show: without the syncs of a store, or of the folder, they are not right."""
    record = dcp_power.recorded(tiers.build(), place, "saves beside readers")
    folder = dcp_power.Folder(place / "saves")
    assert [*dcp_power.failures_of(record, folder, 15, random.Random(1))] == []
    for of in (r"/rank-00000\.pm", r"/index\.pm", ""):
        pattern = re.compile(re.escape(str(folder.root)) + of)
        left = [one for one in record if one.kind != disk.SYNC or not pattern.fullmatch(one.path)]
        assert next(dcp_power.failures_of(left, folder, 10, random.Random(1)), None), of
