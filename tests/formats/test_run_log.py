"""What a run logged as CSV: the numbers of `run.history`, bit for bit."""

from __future__ import annotations

import csv
import math
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.exchange import export_log

torch = pytest.importorskip("torch")
attach = pytest.importorskip("pmstore.torch").attach


def logged(store: pmstore.Store, steps: int, name: str = "run") -> Any:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = attach(store, model=model, optimizer=optimizer, name=name)
    for _ in range(steps):
        with run.next_step():
            run.log(loss=math.pi / (run.step + 1))
            if run.step % 3 == 0:
                run.log(**{"a, b": -1e-300, "loss": 1 / (run.step + 7)})  # loss: once more
            if run.step == 4:
                run.log(rare=math.nan, high=math.inf)
    run.commit()
    return run


def read(path: Path) -> tuple[list[str], list[list[str]]]:
    with path.open(newline="") as file:
        head, *rows = csv.reader(file)
    return head, rows


@pytest.mark.parametrize("steps", [0, 1, 5, 2500])
def test_a_column_is_the_history(shm: Path, steps: int) -> None:
    with pmstore.open(shm / "run.pm") as store:
        run = logged(store, steps)
        histories = {name: run.history(name) for name in run._steps.log.names()}
    with pmstore.open(shm / "run.pm", "r") as store:
        assert export_log(store, shm / "log.csv") == steps
    head, rows = read(shm / "log.csv")
    assert head == ["step", *histories]
    assert [int(row[0]) for row in rows] == list(range(1, steps + 1))
    for column, (name, (at, values)) in enumerate(histories.items(), 1):
        found = [(int(row[0]), float(row[column])) for row in rows if row[column]]
        assert [step for step, _ in found] == at.tolist(), name
        assert np.array([value for _, value in found]).tobytes() == values.tobytes(), name
    assert stat.S_IMODE(os.stat(shm / "log.csv").st_mode) == 0o600


def test_what_is_there_stays(shm: Path) -> None:
    with pmstore.open(shm / "run.pm") as store:
        logged(store, 2)
        (shm / "log.csv").write_text("mine")
        with pytest.raises(FileExistsError):
            export_log(store, shm / "log.csv")
        with pytest.raises(KeyError, match="no run 'other'"):
            export_log(store, shm / "other.csv", run="other")
    assert (shm / "log.csv").read_text() == "mine"
    assert not (shm / "other.csv").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("names", 3),
        ("names", ["loss", {"x": 1}]),
        ("0", np.full((9, 3), math.nan)),
        ("0", np.array([[1.0, 1.0, 2.0], [math.inf, 1.0, 2.0], [-4.0, 1.0, 2.0], [1e300, 9.0, 0]])),
        ("0", np.zeros((2, 2))),
        ("99999999999", np.zeros((2, 3))),
        ("x", 1),
    ],
)
def test_what_is_damaged_is_left_out(shm: Path, name: str, value: Any) -> None:
    with pmstore.open(shm / "run.pm") as store:
        logged(store, 2)
        store.pop(f"run/log/{name}", None)
        store[f"run/log/{name}"] = value
        store.commit()
        export_log(store, shm / "log.csv")
    head, rows = read(shm / "log.csv")
    assert head[0] == "step"
    assert all(len(row) == len(head) for row in rows)
    assert all(0 <= int(row[0]) < 1 << 53 for row in rows)
