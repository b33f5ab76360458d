"""The stored model made to fit the program's: what both have is taken over, by name."""

from __future__ import annotations

import torch

from pmstore import Store
from pmstore.torch.errors import AttachError, MismatchError
from pmstore.torch.model import ModelBinding, Place


def rows_in_common(stored: torch.Size | list[int], given: torch.Size | list[int]) -> int | None:
    """How many entries along the first dimension both have; None: another dimension differs too,
    or there is none."""
    if len(stored) != len(given) or list(stored[1:]) != list(given[1:]) or not len(stored):
        return None
    return min(stored[0], given[0])


def copy_common(target: torch.Tensor, source: torch.Tensor) -> None:
    """The first entries that both have. Shapes are equal, or `rows_in_common`."""
    with torch.no_grad():
        if target.shape == source.shape:
            target.copy_(source)
        else:
            rows = min(len(target), len(source))
            target[:rows].copy_(source[:rows])


def fit_model(store: Store, binding: ModelBinding) -> list[str]:
    """Makes the stored model one that `binding.check` accepts; pending until the next commit. The
    program is untouched.

    Returns: the names whose tensors are not what they were: new, gone, of another shape or dtype.

    Raises:
        MismatchError: a tensor has another shape, in more than its first dimension.
        AttachError: nothing that is stored has a name of the given model.
    """
    stored, given = binding.layout(), binding.plan()
    if stored == given:
        return []
    _check(stored, given)
    changed = [name for name in {**stored, **given} if stored.get(name) != given.get(name)]
    kept = _unchanged(stored, given)
    held = {name: tensor.clone() for name, tensor in binding.tensors_stored(stored) if name not in kept}
    for name, place in stored.items():
        if place.tied_to == name and name not in kept:
            store.pop(binding.block(name), None)
    written = binding.write_members([name for name in given if name not in kept])
    # the name under which tied ones lie comes last, and so counts
    for name in reversed(list(written)):
        if name in held:
            copy_common(written[name], held[name])
    binding.write_layout(given)
    return changed


def _check(stored: dict[str, Place], given: dict[str, Place]) -> None:
    both = [name for name in stored if name in given]
    if stored and not both:
        raise AttachError(
            "nothing of the stored model has a name of the given one: it is another model. Give it "
            "a run of its own: attach(..., name=...)"
        )
    wrong = [
        f"{name}: stored {tuple(stored[name].shape)}, given {tuple(given[name].shape)}"
        for name in both
        if stored[name].shape != given[name].shape
        and rows_in_common(stored[name].shape, given[name].shape) is None
    ]
    if wrong:
        raise MismatchError(
            'Resume(model="partial") takes tensors of the same shape, and of another first '
            "dimension; give layers that are otherwise different a name of their own",
            mismatched=wrong,
        )


def _unchanged(stored: dict[str, Place], given: dict[str, Place]) -> set[str]:
    """Names whose blocks stay: all that are tied to each other are as they were."""
    clusters: dict[str, set[str]] = {}
    for places in (stored, given):
        for name, place in places.items():
            clusters.setdefault(place.tied_to, set()).add(name)
    return {
        name
        for names in clusters.values()
        for name in names
        if all(one in stored and one in given and stored[one] == given[one] for one in names)
    }
