"""What a run logged, as a data frame, CSV, Parquet and TensorBoard's events: the numbers of
`run.history`."""

from __future__ import annotations

import csv
import math
import os
import stat
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._base import newfile
from pmstore.course.reader import read as read_course
from pmstore.exchange import export_log, export_tensorboard, read_log

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


def test_a_frame_has_what_is_logged_and_not_committed_too(shm: Path) -> None:
    pandas = pytest.importorskip("pandas")
    with pmstore.open(shm / "run.pm", size="2MiB") as store:
        run = logged(store, 5)
        committed = read_log(store)
        run.log(step=3.5, late=1)
        frame = run.history()
        for name, label in (("loss", "loss"), ("step", "step.1"), ("late", "late")):
            at, values = run.history(name)
            given = frame[label].dropna()
            assert (given.index.tolist(), given.tolist()) == (at.tolist(), values.tolist()), name
        pandas.testing.assert_frame_equal(frame.iloc[:, :4], committed, check_exact=True)
    assert (frame.index.name, str(frame.index.dtype)) == ("step", "int64")
    assert frame.columns.tolist() == ["loss", "a, b", "rare", "high", "step.1", "late"]
    assert set(map(str, frame.dtypes)) == {"float64"}
    with pmstore.open(shm / "run.pm", "r") as store, pytest.raises(KeyError, match="no run 'x'"):
        read_log(store, run="x")


def test_a_frame_of_nothing(shm: Path) -> None:
    pytest.importorskip("pandas")
    with pmstore.open(shm / "run.pm", size="2MiB") as store:
        frame = logged(store, 0).history()
    assert (frame.shape, frame.index.name, str(frame.index.dtype)) == ((0, 0), "step", "int64")


def test_csv_asks_for_nothing_that_is_not_there(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = "pandas", "pyarrow", "tensorboard"
    for name in (*absent, *sys.modules):
        if name.partition(".")[0] in absent:
            monkeypatch.setitem(sys.modules, name, None)
    with pmstore.open(shm / "run.pm", size="2MiB") as store:
        run = logged(store, 3)
        assert export_log(store, shm / "log.csv") == 3
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'pmstore\[pandas\]'"):
            run.history()
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'pmstore\[parquet\]'"):
            export_log(store, shm / "log.parquet")
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'pmstore\[tensorboard\]'"):
            export_tensorboard(store, shm / "events")
    assert not (shm / "log.parquet").exists()
    assert not (shm / "events").exists()


def test_parquet_is_the_history_and_knows_nan_from_nothing(shm: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    with pmstore.open(shm / "run.pm", size="2MiB") as store:
        run = logged(store, 7)
        assert export_log(store, shm / "log.Parquet", mode=0o640) == 7
        histories = {name: run.history(name) for name in run._steps.log.names()}
    assert stat.S_IMODE(os.stat(shm / "log.Parquet").st_mode) == 0o640
    table = parquet.read_table(shm / "log.Parquet").to_pydict()
    assert list(table) == ["step", *histories]
    assert table["step"] == [1, 2, 3, 4, 5, 6, 7]
    for name, (at, values) in histories.items():
        given = [pair for pair in zip(table["step"], table[name], strict=True) if None not in pair]
        assert [step for step, _ in given] == at.tolist(), name
        assert np.array([value for _, value in given]).tobytes() == values.tobytes(), name


def test_tensorboard_reads_it_with_the_times_of_the_steps(shm: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    began = time.time()
    with pmstore.open(shm / "run.pm", size="2MiB") as store:
        run = logged(store, 5)
        times = {int(step): moment for step, moment, *_ in read_course(store, "run").steps}
        assert export_tensorboard(store, shm / "logs" / "one") == 5
        (file,) = (shm / "logs" / "one").iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        read = accumulator.EventAccumulator(str(shm / "logs" / "one")).Reload()
        assert sorted(read.Tags()["scalars"]) == sorted(run._steps.log.names())
        for name in run._steps.log.names():
            events = read.Scalars(name)
            at, values = run.history(name)
            assert [event.step for event in events] == at.tolist()
            found = np.array([event.value for event in events], np.float32)
            assert found.tobytes() == values.astype(np.float32).tobytes()
            assert [event.wall_time for event in events] == [times[step] for step in at.tolist()]
            assert all(began <= event.wall_time <= time.time() for event in events)
        with pytest.raises(FileExistsError, match="give another folder"):
            export_tensorboard(store, shm / "logs" / "one")
    assert list((shm / "logs" / "one").iterdir()) == [file]


def test_tensorboard_sees_no_part_of_an_event_file(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that watches the folder would read the curve twice."""
    pytest.importorskip("tensorboard")
    seen: list[str] = []

    def rename(part: Path, target: Path) -> None:
        seen.extend(path.name for path in target.parent.iterdir())
        plain(part, target)

    plain = newfile._rename_new
    monkeypatch.setattr(newfile, "_rename_new", rename)
    with pmstore.open(shm / "run.pm", size="2MiB") as store:
        logged(store, 1)
        export_tensorboard(store, shm / "logs")
    (part,) = seen
    assert "tfevents" not in part


def test_times_between_those_that_are_known(shm: Path) -> None:
    """The course of a long run has the times of some steps, and of the starts of processes."""
    read = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with pmstore.open(shm / "run.pm", size="2MiB") as store:
        logged(store, 8)
        course = store["pmstore.course/run"]
        course["curve"][:], course["starts"][:] = 0, 0
        course["steps"][:] = 0
        course["steps"][:3] = [[of, 100 * of, 0, 0, 0, 0] for of in (2, 4, 8)]
        course["starts"][1, :3] = 1, 4, 500  # the process that did steps 5 to 8
        export_tensorboard(store, shm / "known")
        for name in ("curve", "starts", "steps"):
            del course[name]
        now = time.time()
        export_tensorboard(store, shm / "none")
    events = read.EventAccumulator(str(shm / "known")).Reload().Scalars("loss")
    passed = [500 + 300 * (step - 4.5) / 3.5 for step in (5, 6, 7, 8)]
    assert [event.wall_time for event in events] == pytest.approx([200, 200, 300, 400, *passed])
    events = read.EventAccumulator(str(shm / "none")).Reload().Scalars("loss")
    assert all(now <= event.wall_time <= time.time() for event in events)


def test_what_is_there_stays(shm: Path) -> None:
    with pmstore.open(shm / "run.pm") as store:
        logged(store, 2)
        (shm / "log.csv").write_text("mine")
        with pytest.raises(FileExistsError):
            export_log(store, shm / "log.csv")
        with pytest.raises(KeyError, match="no run 'other'"):
            export_log(store, shm / "other.csv", run="other")
        (shm / "log.parquet").write_text("mine")
        with pytest.raises(FileExistsError):
            export_log(store, shm / "log.parquet")
    assert (shm / "log.csv").read_text() == "mine"
    assert not (shm / "other.csv").exists()


def test_names_are_told_apart_and_break_no_line(shm: Path) -> None:
    """Names that are equal in their first letters, or twice; with letters that no line may have."""
    long = "x" * 100
    given = [long + "a", long + "b", "a\rb", "a\nb", 'c,"d', "\x1b[31m", "e\x00", "step", ""]
    given += ["step.1", "=1+1", "-x", "+x", "@x"]
    with pmstore.open(shm / "run.pm") as store:
        logged(store, 1)
        store["run/log/names"] = [*given, "same", "same"]
        values = [[1, 1 + at, at / 8] for at in range(len(given) + 2)]
        store["run/log/0"][: len(values)] = values
        store["run/log/0"][len(values) :] = 0
        assert export_log(store, shm / "log.csv") == 1
    head, rows = read(shm / "log.csv")
    told = ["a\\rb", "a\\nb", 'c,"d', "\\x1b[31m", "e\\x00", "step.2", ""]
    told += ["step.1", "'=1+1", "'-x", "'+x", "'@x"]  # no formula of a spreadsheet
    assert head == ["step", long + "a", long + "b", *told, "same", "same.1"]
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
