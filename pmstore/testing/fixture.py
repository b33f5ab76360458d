"""The pytest fixture `crashtest`: see `pmstore.testing`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pmstore.testing.outcomes import CrashTestResult
from pmstore.testing.runner import Program
from pmstore.testing.trials import crash_test


@pytest.fixture
def crashtest(request: pytest.FixtureRequest) -> Callable[..., CrashTestResult]:
    """Returns a function that takes the arguments of `crash_test`. It fails the test unless every
    trial was a clean resume.

    folder: by default that of the test's file. Returns the result.
    """

    def run(program: Program | Sequence[str], **options: Any) -> CrashTestResult:
        options.setdefault("folder", request.path.parent)
        result = crash_test(program, **options)
        if not result.ok:
            pytest.fail(str(result), pytrace=False)
        return result

    return run
