"""The end of an epoch is a step: also one that run.commit() has ended, or that a `break` leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import pmstore  # noqa: E402
import pmstore.torch  # noqa: E402


def train(
    path: Path, epochs: int, *, leave: int | None = None, how: str = "commit", loop: bool = False
) -> list[int]:
    """Epochs that were handed out. leave: the epoch whose tail is left: by an error behind its
    commit, or by a `break` behind `end_step` or `stop`. loop: there is another one behind it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    with pmstore.open(path, size="4MiB") as store:
        run = pmstore.torch.attach(
            store, model=model, optimizer=optimizer, loader=[torch.ones(2, 4)] * 3
        )
        for epoch in run.epochs(epochs):
            seen.append(int(epoch))
            assert len(seen) <= epochs
            for batch in epoch:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            run.log(tail=epoch)
            if epoch == leave and how != "commit":
                getattr(run, how)()
                break
            run.commit()
            if epoch == leave:
                raise ValueError("the tail is committed")
            if epoch == 0:
                run.rollback()  # of nothing: the epoch is over
        if loop:
            for _ in run.steps(2):
                pass
        if leave is None:
            assert run.history("tail")[1].tolist() == [*range(epochs)]
    return seen


def test_a_commit_in_a_tail_ends_the_epoch(shm: Path) -> None:
    assert train(shm / "run.pm", 3) == [0, 1, 2]


def test_a_tail_that_was_committed_is_not_done_again(shm: Path) -> None:
    with pytest.raises(ValueError, match="the tail is committed"):
        train(shm / "run.pm", 3, leave=1)
    assert train(shm / "run.pm", 3) == [2]


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("how", ["end_step", "stop"])
def test_a_tail_that_was_left_complete_is_not_done_again(shm: Path, how: str, loop: bool) -> None:
    """The loop is over then, and goes on if it is asked for more."""
    path = shm / "run.pm"
    assert train(path, 3, leave=1, how=how, loop=loop) == [0, 1]
    if how == "stop" or loop:
        assert train(path, 3, leave=1, loop=loop) == []
    assert train(path, 4, loop=loop) == [2, 3]
