"""How tensors of models lie in the store, as plain data, and how two of these differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pmstore.torch.errors import MismatchError


@dataclass(frozen=True, slots=True)
class Place:
    """How a member lies in the store; the layout stored with the model is a list of these."""

    kind: str
    shape: list[int]
    dtype: str
    tied_to: str  # name of the first member that shares its memory; its own if none does
    # [shape, stride, offset] in a one-dimensional block, for members that overlap otherwise
    view: list[Any] | None


def encode_place(place: Place) -> list[Any]:
    return [place.kind, place.shape, place.dtype, place.tied_to, place.view]


def decode_place(raw: list[Any]) -> Place:
    return Place(*raw)


def compare(
    stored: dict[str, Place], given: dict[str, Place], what: str, ways: Iterable[str] = ()
) -> None:
    """Raises: MismatchError: they differ; it lists how, and the ways out."""
    missing = [
        f"{stored[name].kind} {name} {_describe(stored[name])}"
        for name in stored
        if name not in given
    ]
    unexpected = [
        f"{given[name].kind} {name} {_describe(given[name])}"
        for name in given
        if name not in stored
    ]
    mismatched = []
    for name, ours in stored.items():
        theirs = given.get(name)
        if theirs is None:
            continue
        if (ours.kind, ours.shape, ours.dtype) != (theirs.kind, theirs.shape, theirs.dtype):
            mismatched.append(
                f"{name}: stored {ours.kind} {_describe(ours)}, given {theirs.kind} "
                f"{_describe(theirs)}"
            )
        elif ours.tied_to != theirs.tied_to:
            mismatched.append(f"{name}: stored {_tie(name, ours)}, given {_tie(name, theirs)}")
    if missing or unexpected or mismatched:
        raise MismatchError(
            what, missing=missing, unexpected=unexpected, mismatched=mismatched, ways=ways
        )


def _describe(place: Place) -> str:
    return f"{tuple(place.shape)} {place.dtype}"


def _tie(name: str, place: Place) -> str:
    return "as a tensor of its own" if place.tied_to == name else f"tied to {place.tied_to}"
