"""torchdata's StatefulDataLoader as `loader=`, with and without workers; what cannot be kept is
refused."""

from __future__ import annotations

import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs_torch import one_thread  # noqa: F401

torch = pytest.importorskip("torch")
stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

pmstore = pytest.importorskip("pmstore")
pt = pytest.importorskip("pmstore.torch")

EPOCHS = 2


class Pairs(torch.utils.data.Dataset):
    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), index / 19)

    def __len__(self) -> int:
        return 19


class Stream(torch.utils.data.IterableDataset):
    """With a state of its own: the place, and a generator."""

    def __init__(self) -> None:
        self.at = 0
        self.chance = random.Random(5)

    def __iter__(self) -> Iterator[Any]:
        while self.at < 20:
            self.at += 1
            yield torch.full((3,), self.at / 20 + self.chance.random())
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        version, numbers, gauss = self.chance.getstate()
        return {"at": self.at, "chance": [version, list(numbers), gauss]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        version, numbers, gauss = state["chance"]
        self.chance.setstate((version, tuple(numbers), gauss))


class Silent(torch.utils.data.IterableDataset):
    """Without: torchdata would read again, from a new one, and count wrongly."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(20):
            yield torch.full((3,), index / 20)


def loader(data: Any, **given: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates what torchdata calls
        return stateful_dataloader.StatefulDataLoader(data, batch_size=4, **given)


MADE: dict[str, Callable[[int], Any]] = {
    "shuffled": lambda workers: loader(Pairs(), shuffle=True, num_workers=workers),
    "stream": lambda workers: loader(Stream(), num_workers=workers),
}


def train(path: Path, make: Callable[[], Any], most: int | None) -> bytes:
    """Until so many steps are done, and then it is killed."""
    torch.manual_seed(1)
    made, net = make(), torch.nn.Linear(3, 1)
    model = torch.nn.Sequential(torch.nn.Dropout(0.3), net)
    optimizer = torch.optim.AdamW(model.parameters())
    with pmstore.open(path) as store:
        run = pt.attach(store, model=model, optimizer=optimizer, loader=made)
        seen = store.list("seen")
        for number, batch in enumerate(run.batches(epochs=EPOCHS), 1):
            seen.append(batch.tolist())
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
            if number == most:
                os.kill(os.getpid(), signal.SIGKILL)
        return repr(list(seen)).encode() + net.weight.detach().numpy().tobytes()


def in_child(path: Path, make: Callable[[], Any], most: int) -> bool:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(path, make, most)
            code = 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status == 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.filterwarnings("ignore")
def test_killed_in_mid_epoch(shm: Path, kind: str, workers: int) -> None:
    def make() -> Any:
        return MADE[kind](workers)

    expected = train(shm / "whole.pm", make, None)
    for most in (3, 4, 1):  # the third life dies in its first step
        assert not in_child(shm / "killed.pm", make, most)
    assert train(shm / "killed.pm", make, None) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_data_without_a_state_are_refused(shm: Path, workers: int) -> None:
    def plain() -> Any:
        return torch.utils.data.DataLoader(Silent(), batch_size=4, num_workers=workers)

    with pytest.raises(pt.AttachError, match=r"Silent has no state_dict\(\).*a plain"):
        train(shm / "refused.pm", lambda: loader(Silent(), num_workers=workers), None)
    train(shm / "plain.pm", plain, None)


def test_a_loader_is_no_stateful(shm: Path) -> None:
    with (
        pmstore.open(shm / "run.pm") as store,
        pytest.raises(pt.AttachError, match=r"'data'.* StatefulDataLoader.*give it as loader="),
    ):
        pt.attach(store, model=torch.nn.Linear(3, 1), stateful={"data": loader(Pairs())})
