"""Stores with training runs, made without torch: for tests of what shows them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

import pmstore
from pmstore.course import Course
from pmstore.course.recorder import clock
from pmstore.scheduler.target import Decision


def begin(path: Path, run: str = "run", *, domain: str = "auto") -> pmstore.Store:
    """A store with a run that has done nothing yet."""
    store = pmstore.open(path, "a", size="8MiB", domain=domain)  # type: ignore[arg-type]
    if f"{run}/about" not in store:
        store[f"{run}/about"] = {"format": 2}
        store.zeros(f"{run}/progress", (4,), "int64")
    return store


def train(store: pmstore.Store, course: Course, steps: int, run: str = "run") -> None:
    """So many steps; the loss falls, and every tenth is committed by a scheduler."""
    progress = store[f"{run}/progress"]
    course.last_step = int(progress[0]) + steps
    for step in range(int(progress[0]) + 1, course.last_step + 1):
        progress[0] = step
        course.add(step, 3.0 * math.exp(-step / 300) + 0.1 * math.sin(step), clock())
        if step % 10 == 0:
            store.commit()
            course.committed(
                clock() - (0.002 + step * 1e-6),
                Decision("store", "risk reached the price", 0.5, 0.25, 1e-4, 1.0, 0.01, step, 1.0),
                step,
                False,
            )
    store.commit()


def made(path: Path, steps: int = 300, run: str = "run") -> Path:
    with begin(path, run) as store:
        train(store, Course(store, run), steps, run)
    return path


def log(store: pmstore.Store, rows: dict[str, list[tuple[int, float]]], run: str = "run") -> None:
    """Logged values, by name, of steps in any order."""
    places = {name: place for place, name in enumerate(rows, 1)}
    found = [(step, places[name], value) for name in rows for step, value in rows[name]]
    found.sort(key=lambda row: row[0])
    store[f"{run}/log/names"] = list(rows)
    for number in range(0, len(found), 1024):
        array = np.zeros((1024, 3))
        array[: len(found[number : number + 1024])] = found[number : number + 1024]
        store[f"{run}/log/{number // 1024}"] = array
    store.commit()
