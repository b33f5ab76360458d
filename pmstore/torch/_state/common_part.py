"""Stored tensors for a program that has other ones: what both have is taken over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch

from pmstore.torch.run_errors import AttachError, MismatchError

_WRAPPER = re.compile(r"(?<![^./])(?:_orig_mod|module)\.")
"""What torch.compile, DataParallel and the like put before a model's names."""


def of_wrapper(stored: Iterable[str], given: Iterable[str]) -> str:
    """What to write where only a wrapper stands between two models; "": they differ otherwise."""
    ours, theirs = set(stored), set(given)
    inside = {_WRAPPER.sub("", name) for name in ours}
    if ours == theirs or inside != {_WRAPPER.sub("", name) for name in theirs}:
        return ""
    if ours == inside:
        return (
            "the given model is the stored one inside a wrapper (torch.compile, DataParallel): "
            "give the one inside, model._orig_mod or model.module"
        )
    return (
        "the stored model was given inside a wrapper (torch.compile, DataParallel): wrap the given "
        "one in the same way before"
    )


def fits(stored: Sequence[int], given: Sequence[int]) -> bool:
    """Whether the shapes are equal, or but for the first dimension."""
    if len(stored) != len(given):
        return False
    return list(stored[1:]) == list(given[1:])


def copy_common(target: torch.Tensor, source: torch.Tensor) -> None:
    """The rows that both have, the first ones; the target's others stay."""
    with torch.no_grad():
        if target.shape == source.shape:
            target.copy_(source)
        else:
            rows = min(len(target), len(source))
            target[:rows].copy_(source[:rows])


def check_fit(stored: Mapping[str, Sequence[int]], given: Mapping[str, Sequence[int]]) -> None:
    """Shapes by name.

    Raises:
        MismatchError: a tensor has another shape, in more than its first dimension.
        AttachError: no name is in both.
    """
    both = [name for name in stored if name in given]
    if stored and not both:
        raise AttachError(
            "nothing of the stored model has a name of the given one, so nothing of it can be "
            "taken: give that model a run of its own, attach(..., name=...)"
        )
    wrong = [
        f"{name}: stored {tuple(stored[name])}, given {tuple(given[name])}"
        for name in both
        if not fits(stored[name], given[name])
    ]
    if wrong:
        raise MismatchError(
            'Resume(model="partial") takes tensors that have the same shape, or differ in their '
            "first dimension only. Give other layers that differ other names",
            mismatched=wrong,
        )
