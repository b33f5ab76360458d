"""A stored run made to fit a program that has changed, as its `Resume` says.

It is done in the store alone, in one transaction, before the program is bound: then the run is as
if it had always been the program's, and is resumed as any other. A death in between leaves it as it
was, or whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pmstore import Store
from pmstore.torch._migrate.choices import Choices
from pmstore.torch._migrate.differences import compare, has_more
from pmstore.torch._migrate.fitting import Fitting
from pmstore.torch._migrate.settings import Settings, fingerprint, plain
from pmstore.torch._state.attributes import conflicts, describe
from pmstore.torch._state.part import Part
from pmstore.torch._state.requires_grad import read_trainable
from pmstore.torch._step.progress import Progress
from pmstore.torch.errors import ChangedError, MismatchError
from pmstore.torch.program import Program
from pmstore.torch.resume import Resume


def note(store: Store, name: str, program: Program, resume: Resume) -> None:
    """What the program gives, and what it chose; pending until the next commit."""
    store[f"{name}/given"] = {"settings": fingerprint(program), "resume": resume.chosen()}


def adapt(store: Store, name: str, program: Program, resume: Resume) -> None:
    """Compares the program with what it was, and does what was chosen. What was done is durable on
    return; where there is nothing to do, nothing is written. The program is untouched.

    Raises:
        MismatchError: there are other pieces than were stored, or what is stored of one cannot be
            made to fit.
        ChangedError: settings are different, and nothing was chosen.
        In every case the store is as before.
    """
    noted: dict[str, Any] = store.get(f"{name}/given") or {}
    stored: Mapping[str, Settings] = noted.get("settings", {})
    given, chosen = fingerprint(program), resume.chosen()
    changed = conflicts(store, f"{name}/attributes", program.models)
    stored = {**stored, "attributes": {describe(at): was for at, (was, _) in changed.items()}}
    given["attributes"] = {describe(at): now for at, (_, now) in changed.items()}
    missing, unexpected = _other_pieces(store, name, program, chosen)
    differences = compare(stored, given, {})
    if differences:
        differences = compare(stored, given, _now(store, name, stored))
    choices = Choices(resume, noted.get("resume", {}), differences)
    if choices.unanswered:
        raise ChangedError(
            f"the program gives other settings than it gave when the run {name!r} was last "
            "attached, and the stored ones would count. Say which shall, in "
            "attach(..., resume=pmstore.torch.Resume(...))",
            mismatched=map(str, choices.unanswered),
        )
    about = store[f"{name}/about"]
    newest = about["format"] == program.format
    known = newest and noted.get("resume") == chosen and not has_more(stored, given)
    if known and not (missing or unexpected or differences or choices.by_name):
        return
    fitting = Fitting(store, name, program, choices, stored)
    try:
        if known and not (missing or unexpected or differences or fitting.needed):
            return
        with store.transaction():
            fitting.fit(missing, unexpected)
            if "loops" in chosen and "loops" not in noted.get("resume", {}):
                Progress.forget_loops(store, name)
            store[f"{name}/about"] = {**about, "format": program.format, "pieces": program.given()}
            note(store, name, program, resume)
            fitting.check()
    finally:
        fitting.release()


def _other_pieces(
    store: Store, name: str, program: Program, chosen: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Which are stored and not given, and the other way round."""
    stored, given = store[f"{name}/about"]["pieces"], program.given()
    missing = [piece for piece, there in stored.items() if there and not given.get(piece)]
    unexpected = [piece for piece, there in given.items() if there and not stored.get(piece)]
    if "mirror" in (*missing, *unexpected):
        raise MismatchError(
            f"the stored run {name!r} is {'' if stored['mirror'] else 'not '}mirrored, and so it "
            "stays: attach(..., mirror=...) says how. Or begin a run with another name from it: "
            "pmstore.torch.load(store, model) first, then attach(..., name=...)",
            missing=missing,
            unexpected=unexpected,
        )
    left = [
        piece
        for piece in (*missing, *unexpected)
        if "pieces" not in chosen and not ("model" in chosen and piece.startswith("model"))
    ]
    if left:
        raise MismatchError(
            f"the stored run {name!r} has other pieces than were given to attach",
            missing=_among(missing, left),
            unexpected=_among(unexpected, left),
            ways=(
                'Resume(pieces="program") drops what is not given; what is not stored begins anew',
            ),
        )
    return missing, unexpected


def _among(pieces: list[str], left: Iterable[str]) -> list[str]:
    return [piece for piece in pieces if piece in left]


def _now(store: Store, name: str, stored: Mapping[str, Settings]) -> dict[str, Settings]:
    """What the training made of the optimizers' hyperparameters, and of what is trained."""
    found: dict[str, Settings] = {}
    for piece in stored:
        groups = Part(store, f"{name}/{piece}/groups")
        if piece.partition("/")[0] == "optimizer" and groups.stored:
            found[piece] = {
                "groups": [
                    {key: plain(value) for key, value in group.items()} for group in groups.read()
                ]
            }
    names = list(stored.get("trainable", ()))
    found["trainable"] = dict(read_trainable(store, f"{name}/trainable", names))
    return found
