"""What the tests of frameworks share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pmstore.testing import ForkServer


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """One for all: to import a framework takes seconds."""
    with ForkServer([str(Path(__file__).parent)]) as server:
        yield server
