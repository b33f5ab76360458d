"""What the tests of pmstore.torch and pmstore.dcp share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import pythons

import pmstore
from pmstore.testing import ForkServer

try:
    import torch
except ModuleNotFoundError:
    torch = None  # type: ignore[assignment]


class NeedsTorch(pytest.Module):
    def collect(self) -> list[pytest.Item]:
        pytest.skip("needs torch: pip install 'pmstore[torch]'", allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Without torch the tests of this folder cannot be imported: each file is one skip."""
    return None if torch else NeedsTorch.from_parent(parent, path=module_path)  # type: ignore[no-any-return]


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


@pytest.fixture(scope="session")
def server() -> ForkServer:
    """For workloads of the modules in this folder, too: `test_kills:work`."""
    return pythons.server()
