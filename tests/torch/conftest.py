"""What the tests of pmstore.torch share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pmstore


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The bits of a sum depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.pm"


@pytest.fixture
def store(path: Path) -> Iterator[pmstore.Store]:
    with pmstore.open(path) as store:
        yield store
        assert store.check().problems == ()
