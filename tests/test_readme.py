"""The programs of README.md: the first one killed and run again, as a newcomer does it; the others
as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import pmstore

torch = pytest.importorskip("torch")

import pmstore.torch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


def program(first_words: str) -> str:
    """The block of Python in the README that begins so."""
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (found,) = [block for block in blocks if block.startswith(first_words)]
    return str(found)


def start(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "train.py"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )


def test_the_training_loop_survives_kill_9(shm: Path) -> None:
    found = program("# train.py\n")
    longer = found.replace("epochs=100", "epochs=150")
    assert longer != found
    folders = [shm / "killed", shm / "whole"]
    for folder in folders:
        folder.mkdir()
        (folder / "train.py").write_text(longer, encoding="utf-8")
    whole = start(folders[1])
    killed = start(folders[0])
    assert killed.stdout is not None
    assert killed.stdout.readline() == "step 0 - new store\n"
    time.sleep(0.25)
    killed.kill()
    assert killed.communicate(timeout=300)[0] == ""  # it was not at its end
    told = start(folders[0]).communicate(timeout=300)[0].splitlines()
    assert re.match(r"step \d+ - the last writer was killed", told[0])
    assert told[-1] == whole.communicate(timeout=300)[0].splitlines()[-1]
    assert told[-1].startswith("step 3000 loss 0.")


def test_arrays_values_transactions(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shm)
    for _ in range(2):  # the second time there is nothing left to do
        exec(program("import pmstore\n"), {})
        with pmstore.open("run.pm", "r") as store:
            assert (store["w"] == 100).all()
            assert (store["step"], store["config"]["layers"]) == (100, [64, 64])


def test_commit_without_a_copy(store: pmstore.Store) -> None:
    exec(program("means = store.slots("), {"np": np, "store": store, "update": 2})
    assert (store["means"].current == 2).all()


def test_when_to_commit_and_to_where(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = shm / "checkpoints" / "run"
    attach, restore = (
        program("from pmstore.scheduler import")
        .replace("/mnt/checkpoints/run", str(tier))
        .split("pmstore.restore(")
    )
    assert str(tier) in attach
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with pmstore.open(shm / "here.pm") as store:
        names = {"pmstore": pmstore, "store": store, "model": model, "optimizer": optimizer}
        exec(attach, names)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().sum()
            loss.backward()
            optimizer.step()
            names["run"].commit(loss)  # type: ignore[attr-defined]
        store.commit()
        store.flush("disk", wait=True)
        epoch = store.epoch
    monkeypatch.chdir(shm)
    exec("pmstore.restore(" + restore, {"pmstore": pmstore})
    with pmstore.open("run.pm", "r") as store:
        assert store.epoch == epoch
        assert torch.equal(store["run/model/weight"], model.weight)
