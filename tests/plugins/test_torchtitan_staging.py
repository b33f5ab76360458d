"""TorchTitan's checkpoint manager stages by torch's StateDictStager, which keeps a copy for each
storage that it has seen. Parameters in slots change theirs at each commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from needs_torch import one_thread  # noqa: F401

import pmstore

torch = pytest.importorskip("torch")
stager_module = pytest.importorskip("torch.distributed.checkpoint._state_dict_stager")
pt = pytest.importorskip("pmstore.torch")


def bits(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().numpy().tobytes()
    if isinstance(state, dict):
        return {key: bits(part) for key, part in state.items()}
    return [bits(part) for part in state] if isinstance(state, (list, tuple)) else state


KINDS = {
    "in place": (torch.optim.AdamW, {}),
    "slots": (pt.optim.AdamW, {}),
    "slots of SGD": (pt.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "mirrored": (torch.optim.AdamW, {"mirror": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_taken_anew_is_staged_as_it_is(path: Path, kind: str) -> None:
    make, given = KINDS[kind]
    mirror = given.get("mirror")
    settings = {key: value for key, value in given.items() if key != "mirror"}
    stager = stager_module.StateDictStager()
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    with pmstore.open(path) as store:
        optimizer = make(model.parameters(), **settings)
        run = pt.attach(store, model=model, optimizer=optimizer, mirror=mirror)
        held = model.state_dict()  # a program that keeps one
        stale, staged, expected = 0, None, None
        for step in range(6):
            with run.next_step():
                model(torch.full((2, 3), float(step)) + torch.eye(2, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            run.commit()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            assert bits(staged) == expected  # of the step before, while this one was done
            staged, expected = stager.stage(state), bits(state)
            assert bits(staged) == expected
            stale += bits(held) != expected["model"]
    stager.close()
    # in slots every other version is another memory
    assert stale == (0 if not kind.startswith("slots") else pytest.approx(3, abs=1))
