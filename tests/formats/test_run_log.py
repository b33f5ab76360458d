"""What a run logged as CSV: the numbers of `run.history`, bit for bit."""

from __future__ import annotations

import csv
import math
import os
import stat
import tracemalloc
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


def test_names_are_told_apart_and_break_no_line(shm: Path) -> None:
    """Names that are equal in their first letters, or twice; with letters that no line may have."""
    long = "x" * 100
    given = [long + "a", long + "b", "a\rb", "a\nb", 'c,"d', "\x1b[31m", "e\x00", "step", ""]
    with pmstore.open(shm / "run.pm") as store:
        logged(store, 1)
        store["run/log/names"] = [*given, "same", "same"]
        values = [[1, 1 + at, at / 8] for at in range(len(given) + 2)]
        store["run/log/0"][: len(values)] = values
        store["run/log/0"][len(values) :] = 0
        assert export_log(store, shm / "log.csv") == 1
    head, rows = read(shm / "log.csv")
    told = ["a\\rb", "a\\nb", 'c,"d', "\\x1b[31m", "e\\x00", "step", ""]
    assert head == ["step", long + "a", long + "b", *told, "same", "same"]
    assert rows == [["1", *(repr(at / 8) for at in range(len(given) + 2))]]
    assert len((shm / "log.csv").read_bytes().splitlines()) == 2


def test_a_name_of_each_step_takes_no_memory_for_each_pair(shm: Path) -> None:
    """3,000 steps with a name of their own: 9 million cells, and 3,000 numbers."""
    count = 3000
    with pmstore.open(shm / "run.pm") as store:
        logged(store, 1)
        store["run/log/names"] = [f"n{at}" for at in range(count)]
        for part in range(3):
            steps = np.arange(1000 * part, 1000 * part + 1000)
            rows = np.stack([steps + 1.0, steps + 1.0, steps / 7], 1)
            store.pop(f"run/log/{part}", None)
            store[f"run/log/{part}"] = rows
        tracemalloc.start()
        try:
            assert export_log(store, shm / "log.csv") == count
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 20 * count * 64
    _, rows = read(shm / "log.csv")
    for at in (0, 1, 1500, count - 1):
        assert float(rows[at][1 + at]) == at / 7
        assert sum(map(bool, rows[at])) == 2


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
