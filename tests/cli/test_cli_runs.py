"""What the command line says of a training run: `info`, `ls`, `top --json`, and that every command
answers as JSON."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import pmstore
from pmstore.commands.application import app
from pmstore.commands.table import TABLE
from pmstore.course import read
from pmstore.show.snapshot_of_runs import RunState
from pmstore.show.units import seconds

torch = pytest.importorskip("torch")
attach = pytest.importorskip("pmstore.torch").attach

STEPS = 12


def run(*words: Any) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def program(
    store: pmstore.Store, *, steps: int | None, epochs: int = 3, name: str = "run", **more: Any
) -> Any:
    """A scheduler that halves the rate every fifth step, two numbers logged, an array of the
    program's own. steps: of a loop by steps; None: a loop over data."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    given: dict[str, Any] = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule}
    loop = more.pop("loop", {})
    given |= {"name": name, **more}
    if steps is None:
        given["loader"] = [torch.ones(1, 2)] * 4
    run = attach(store, **given)
    for _ in run.batches(epochs=epochs) if steps is None else run.steps(steps, **loop):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        optimizer.step()
        schedule.step()
        run.log(accuracy=(run.step + 1) / 100, loss=float(run.step + 1))
        if run.step == 0:
            run.log(once=7.5)
    return run


@pytest.fixture(scope="module", params=["batches", "steps"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run.pm"
    with pmstore.open(path, domain="process") as store:
        store["mine"] = np.arange(3.0)
        program(store, steps=None if request.param == "batches" else STEPS)
    return path


def test_info_begins_with_the_run(trained: Path) -> None:
    told = json.loads(run("info", trained, "--json"))
    ((state),) = told["runs"]
    by_steps = state["steps"] is not None
    assert (state["name"], state["step"], state["live"]) == ("run", STEPS, False)
    assert (state["steps"], state["epochs"]) == ((STEPS, None) if by_steps else (None, 3))
    assert state["data_epoch"] == (0 if by_steps else 3)
    assert state["logged"] == {"accuracy": STEPS / 100, "loss": STEPS, "once": 7.5}
    assert state["rates"] == [0.25 * 0.5**2]
    assert state["epoch_batches"] == (None if by_steps else 4)
    assert state["seconds_left"] is None  # nobody trains
    assert (state["lives"], state["kills"]) == (1, 0)
    assert 0 <= time.time() - state["stepped_at"] < 3600
    first, *rest = run("info", trained).splitlines()
    words = first.split(None, 1)[1].split(" \N{MIDDLE DOT} ")
    assert words[0] == ("step 12 of 12" if by_steps else "step 12")
    assert words[1:4] == ["loss 12", "accuracy 0.12", "once 7.5"]
    assert words[4] == "lr 0.0625"
    assert ("epoch 3 of 3" in words) is not by_steps
    assert "1 life, 0 kills" in words
    assert words[-1].startswith("last step 20")
    assert [line.split()[0] for line in rest] == ["path", "domain", "content", "recovery"]
    every = [line.split()[0] for line in run("info", "--all", trained).splitlines()]
    assert every == ["run", "path", "domain", "epoch", "content", "opened", "recovery", "heap"]


@pytest.mark.parametrize(
    ("steps", "epochs", "batches", "at", "left"),
    [
        (80, None, None, (0, 0), 3.0),
        (50, None, None, (0, 0), 0.0),
        (None, 10, 10, (2, 5), 15.0),  # 20 steps an epoch: 2 of a batch
        (None, 10, None, (2, 0), 20.0),
        (None, 10, None, (2, 5), math.nan),
        (None, 10, 10, (0, 0), math.nan),
        (None, None, 10, (2, 5), math.nan),
    ],
)
def test_how_long_is_left(
    steps: int | None, epochs: int | None, batches: int | None, at: tuple[int, int], left: float
) -> None:
    """Of a run at step 50, with ten steps a second."""
    rest = ({}, (), batches, 1, 0, (), time.time(), math.nan)
    state = RunState("run", 50, *at, steps, epochs, *rest, True, {}, None)
    assert state.seconds_left(10.0) == pytest.approx(left, nan_ok=True)
    told = [one for one in state.facts(10.0) if "left" in one]
    assert told == ([f"about {seconds(left)} left"] if left > 0.0 else [])
    assert math.isnan(replace(state, live=False).seconds_left(10.0))


def test_lives_and_kills_are_counted(shm: Path) -> None:
    path = shm / "run.pm"
    for life in range(3):
        copy = shm / f"life{life}.pm"
        with pmstore.open(path) as store:
            program(store, steps=None, epochs=life + 1)
            copy.write_bytes(path.read_bytes())  # as a kill leaves it
        copy.rename(path)
        (state,) = json.loads(run("info", path, "--json"))["runs"]
        assert (state["step"], state["lives"], state["kills"]) == (
            4 * (life + 1),
            life + 1,
            life + 1,
        )
    pmstore.open(path).close()
    (state,) = json.loads(run("info", path, "--json"))["runs"]
    assert (state["lives"], state["kills"]) == (3, 3)
    assert "3 lives, 3 kills" in run("info", path)


def test_each_life_is_told_also_after_a_rewind(shm: Path) -> None:
    """Those that are not in the state that the run was taken back to, too."""

    def life(work: Any, rate: float = 0.5, **more: Any) -> Any:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with pmstore.open(shm / "run.pm") as store:
            work(attach(store, model=model, optimizer=optimizer, **more))
            return read(store, "run")

    def go(run: Any) -> None:
        for _ in range(3):
            with run.next_step():
                run.log(loss=run.step)
        run.commit()

    def keep(run: Any) -> None:
        go(run)
        run.keep("early")
        go(run)

    def back(run: Any) -> None:
        run.rewind(to="early")
        go(run)
        run.rewind(to="early")
        go(run)

    life(keep)
    life(go)
    life(back)
    told = life(go, 0.25, resume=pmstore.torch.Resume(lr="program"))
    assert [(one.number, one.step) for one in told.starts] == [(1, 0), (2, 6), (3, 9), (4, 6)]
    assert [(one.step, one.to) for one in told.rewinds] == [(9, 3), (6, 3)]
    assert [one.life.resume for one in told.starts] == ["Resume()"] * 3 + ['Resume(lr="program")']
    assert told.starts[3].life.changed == (
        ("lr of the optimizer, group 0", "0.5", "0.25", 'lr="program"'),
    )
    assert {one.life.torch for one in told.starts} == {str(torch.__version__)}


def test_the_loss_stands_first_also_where_it_is_not_finite(shm: Path) -> None:
    """In `info` and in both places of `top`."""
    with pmstore.open(shm / "nan.pm", size="2MiB") as store:
        made = attach(store, model=torch.nn.Linear(1, 1))
        for step in made.steps(8):
            made.log(a=1.0, b=2.0, c=3.0)
            made.log(loss=0.5 if step < 5 else math.nan)
    assert "step 8 of 8 · loss nan · a 1 · b 2 · " in run("info", shm / "nan.pm")
    shown = run("top", "--once", shm / "nan.pm")
    assert "loss nan" in shown
    assert re.search(r"^\W*loss +nan\b", shown, re.MULTILINE)


def test_a_number_that_is_larger_than_a_float(shm: Path) -> None:
    with pmstore.open(shm / "large.pm", size="2MiB") as store:
        made = attach(store, model=torch.nn.Linear(1, 1))
        for _ in made.steps(1):
            with pytest.raises(ValueError, match=r"run\.log\(huge="):
                made.log(huge=10**400)


def test_kills_are_of_the_run_that_was_trained(shm: Path) -> None:
    """Not of another one in the same store, nor of a program that trains none."""
    path = shm / "run.pm"

    def killed(work: Any) -> None:
        with pmstore.open(path) as store:
            work(store)
            store.commit()
            (shm / "copy.pm").write_bytes(path.read_bytes())
        (shm / "copy.pm").rename(path)

    with pmstore.open(path) as store:
        program(store, steps=3, name="first")
    killed(lambda store: program(store, steps=4, name="second"))
    killed(lambda store: program(store, steps=5, name="second"))
    killed(lambda store: store.update(x=1))
    told = {one["name"]: one for one in json.loads(run("info", path, "--json"))["runs"]}
    assert (told["first"]["lives"], told["first"]["kills"]) == (1, 0)
    assert (told["second"]["lives"], told["second"]["kills"]) == (2, 2)
    assert told["second"]["steps"] == 5


def test_where_a_loop_ends_is_told_only_where_it_is_known(shm: Path) -> None:
    def told(**given: Any) -> Any:
        with pmstore.open(shm / "run.pm") as store:
            program(store, **given)
        ((state,),) = (json.loads(run("info", shm / "run.pm", "--json"))["runs"],)
        return state["step"], state["steps"], state["epochs"]

    assert told(steps=6) == (6, 6, None)
    assert told(steps=4) == (6, None, None)  # it is beyond that already
    assert told(steps=9) == (9, 9, None)
    edited = pmstore.torch.Resume(loops="program")
    assert told(steps=2, loop={"name": "two"}, resume=edited) == (11, None, None)


def test_numbers_that_are_none(shm: Path) -> None:
    with pmstore.open(shm / "run.pm") as store:
        trained = program(store, steps=2)
        with trained.next_step():
            trained.log(loss=math.nan, accuracy=-math.inf)
        trained.commit()
    (state,) = json.loads(run("info", shm / "run.pm", "--json"))["runs"]
    assert state["logged"] == {"accuracy": "-inf", "loss": "nan", "once": 7.5}
    assert "loss nan" in run("info", shm / "run.pm")


@pytest.mark.parametrize("rate", [1, torch.tensor(0.5)])
def test_a_rate_that_is_no_float(shm: Path, rate: Any) -> None:
    model = torch.nn.Linear(1, 1)
    with pmstore.open(shm / "run.pm") as store:
        attach(store, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=rate))
    (state,) = json.loads(run("info", shm / "run.pm", "--json"))["runs"]
    assert state["rates"] == [float(rate)]


def test_a_run_that_trains_now_is_live(shm: Path) -> None:
    with pmstore.open(shm / "one.pm") as store:
        program(store, steps=1)
        assert "steps a second" not in run("info", shm / "one.pm")  # not known yet
    with pmstore.open(shm / "run.pm") as store:
        program(store, steps=5)
        (state,) = json.loads(run("info", shm / "run.pm", "--json"))["runs"]
        assert (state["live"], state["kills"]) == (True, 0)
        assert re.search(r"\d steps a second", run("info", shm / "run.pm"))
        (seen,) = json.loads(run("top", "--json", shm / "run.pm"))
        assert (seen["live"], seen["problem"]) == (True, None)
        assert [one["step"] for one in seen["runs"]] == [5]


def test_ls_lists_what_is_the_programs(trained: Path) -> None:
    lines = run("ls", trained).splitlines()
    assert [line.split()[0] for line in lines] == ["name", "mine", "run"]
    assert lines[2].split() == ["run", "run", "step", "12"]
    names = [row["name"] for row in json.loads(run("ls", "-r", "--json", trained))]
    assert names == [
        *("mine", "run", "run/model", "run/model/weight", "run/model/bias"),
        *("run/optimizer", "run/optimizer/state"),
        *(f"run/optimizer/state/{n}.momentum_buffer" for n in range(2)),
        *("run/lr_scheduler", "run/lr_scheduler/value"),
    ]
    every = [row["name"] for row in json.loads(run("ls", "-r", "-a", "--json", trained))]
    with pmstore.open(trained, "r") as store:
        assert set(every) == {entry.name for entry in pmstore.objects.containers.tree(store)}
    assert [row["name"] for row in json.loads(run("ls", trained, "run", "--json"))] == [
        *("run/model", "run/optimizer", "run/lr_scheduler")
    ]
    assert "run/rng/torch" in run("ls", trained, "run/rng")  # it was asked for


def test_ls_hides_no_run_and_nothing_of_the_programs(shm: Path) -> None:
    """A run in the group of another one; values beside a run's own."""
    path = shm / "run.pm"
    with pmstore.open(path) as store:
        for name in ("a", "a/b"):
            store[f"{name}/progress"] = np.array([3, 0, 0, 0])
            store[f"{name}/about"] = {}
            store[f"{name}/mine"] = 1
            for optimizer in ("x", "state"):
                store[f"{name}/optimizer/{optimizer}/state/0.step"] = np.zeros(1)
                store[f"{name}/optimizer/{optimizer}/layout"] = 1
    names = {row["name"] for row in json.loads(run("ls", "-r", "--json", path))}
    for name in ("a", "a/b"):
        assert {name, f"{name}/mine", f"{name}/optimizer/x/state/0.step"} <= names
        assert f"{name}/optimizer/state/state/0.step" in names
    assert not [name for name in names if name.endswith(("layout", "about", "progress"))]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loops", 7),
        ("loops", {"loops": []}),
        ("loops", {"loops": [["batches", "", "x", None, 0]]}),
        ("loops", {"loops": [["batches", "", math.inf, 0, False]]}),
        ("loops", {"loops": [["steps", "", 10**5000, 0, False]]}),
        ("log/names", "text"),
        ("log/names", ["a", "b"]),
        ("log/0", np.full((4, 3), math.nan)),
        ("log/0", np.zeros((0, 3))),
        ("log/0", np.array([[1.0, 99.0, 1.0], [1.0, -1.0, 1.0]])),
        ("optimizer/groups/value", [{"lr": "high"}, 3, {"lr": math.inf}]),
        ("optimizer", 1),
        ("log", 1),
        ("given", 7),
        ("given", {"settings": {"loader": 1, "optimizer": {"groups": [{"lr": 10**5000}, 2]}}}),
        ("given", {"settings": {"loader": {"length": "x", "batch_size": 0}, "trainable": []}}),
    ],
)
def test_what_a_stranger_wrote_there_ends_no_answer(shm: Path, name: str, value: Any) -> None:
    path = shm / "run.pm"
    with pmstore.open(path) as store:
        program(store, steps=3)
        store.pop(f"run/{name}", None)
        store[f"run/{name}"] = value
    for words in (["info"], ["info", "--json"], ["ls", "-r"], ["top", "--json"], ["top"]):
        told = run(*words, path)
        assert "Infinity" not in told
        assert "NaN" not in told


def test_what_is_no_run_is_listed_as_it_is(shm: Path) -> None:
    path = shm / "run.pm"
    with pmstore.open(path, size="1MiB") as store:
        store.zeros("a/progress", (4,), "int64")
        store["b/progress"] = 1
        store["b/about"] = {}
    rows = json.loads(run("ls", "-r", "--json", path))
    assert [(row["name"], row["kind"]) for row in rows] == [
        *(("a", "group"), ("a/progress", "array")),
        *(("b", "group"), ("b/progress", "value"), ("b/about", "value")),
    ]
    assert json.loads(run("info", path, "--json"))["runs"] == []


@pytest.mark.parametrize("command", TABLE)
def test_each_command_answers_as_json(command: str) -> None:
    assert "--json" in run(command, "--help")


def test_changes_are_told_as_json(trained: Path, shm: Path) -> None:
    path = shm / "new.pm"

    def told(*words: Any) -> Any:
        return json.loads(run(*words, "--json"))

    made = told("create", path, "--size", "1MiB")
    assert (made["path"], made["domain"]) == (str(path), "process")
    assert told("set", path, "x", "3") == {"path": str(path), "name": "x"}
    assert told("set", path, "w", "[1, 2]", "--dtype", "float32")["name"] == "w"
    assert told("rm", path, "x") == {"path": str(path), "removed": ["x"]}
    assert told("export", path, shm / "w.npz")["arrays"] == 1
    assert told("import", shm / "w.npz", path, "--replace") == {"path": str(path), "arrays": 1}
    assert told("export", trained, shm / "log.csv")["steps"] == STEPS
    assert (shm / "log.csv").read_text().startswith("step,accuracy,loss,once\n1,0.01,1.0,7.5\n")
    assert told("dump", path, shm / "d")["bytes"] == (shm / "d").stat().st_size
    assert told("load", shm / "d", shm / "back.pm")["objects"] == 1
    assert told("compact", path)["path"] == str(path)
    assert told("report", trained, "-o", shm / "r.html")["bytes"] == (shm / "r.html").stat().st_size
    assert told("trust", path) == {"path": str(path), "trusted": []}
    with pmstore.open(path, hold=True) as store:
        store["y"] = 1
        store.commit()
        store["y"] = 2
        store.commit()
        (shm / "held.pm").write_bytes(path.read_bytes())
    (shm / "held.pm").rename(path)
    assert told("resolve", path, "--back")["back"] is True
    refused = CliRunner().invoke(app, ["dump", str(path), "-", "--json"])
    assert refused.exit_code == 2


def test_a_log_for_tensorboard(trained: Path, shm: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = shm / "logs" / "a"
    told = json.loads(run("export", trained, "--tensorboard", folder, "--json"))
    (events,) = folder.iterdir()
    assert told == {"path": str(folder), "steps": STEPS, "bytes": events.stat().st_size}
    again = CliRunner().invoke(app, ["export", str(trained), "--tensorboard", str(folder)])
    assert again.exit_code == 2
    assert f"{folder}: there is something already: give another path" in again.stderr
    assert list(folder.iterdir()) == [events]


def test_which_run_is_exported(shm: Path) -> None:
    path = shm / "run.pm"
    with pmstore.open(path) as store:
        store["mine"] = 1

    def refused(*words: Any, file: Any = shm / "log.csv") -> str:
        result = CliRunner().invoke(app, [*map(str, ("export", path, file, *words))])
        assert result.exit_code == 2
        assert not (shm / "log.csv").exists()
        return result.stderr

    assert "it has no run" in refused()
    for name in ("a", "b"):
        with pmstore.open(path) as store:
            program(store, steps=2, name=name)
    assert "several runs: --group says which: a, b" in refused()
    assert "'c' is no run; there are: a, b" in refused("--group", "c")
    assert "for arrays" in refused("--group", "a", "--compress")
    assert "give FILE, or --tensorboard DIR" in refused("--tensorboard", shm / "events")
    assert ".csv or .parquet" in refused(file=shm / "log.txt")
    assert "log.csv: 2 steps" in run("export", path, shm / "log.csv", "--group", "b")
    back = CliRunner().invoke(app, ["import", str(shm / "log.csv"), str(path)])
    assert back.exit_code == 2
