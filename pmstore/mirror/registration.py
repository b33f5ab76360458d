"""Begins to mirror a tensor."""

from __future__ import annotations

from typing import Any

import torch

from pmstore.errors import MirrorError
from pmstore.mirror.mirror import Mirror, MirrorPart
from pmstore.mirror.mirrors import Mirrors
from pmstore.objects.containers import Group


def add(store: Group, mirrors: Mirrors, name: str, tensor: Any) -> Mirror:
    """Makes a mirror of the tensor: see `Store.mirror`."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"a mirror is of a torch tensor, not of {type(tensor).__name__}: an array is stored by "
            "store[name] = array"
        )
    mirrors.copier(tensor.device)
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.is_contiguous():
        raise MirrorError(
            f"{name!r}: a mirror is of a dense, contiguous tensor: give the tensor that "
            ".contiguous() returns"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise MirrorError(
            f"{name!r}: a mirror is of a tensor whose memory holds its values, not of a lazy "
            "conjugate or negative: give the tensor that .resolve_conj().resolve_neg() returns"
        )
    there = name in store
    slots = store.slots(name, tuple(tensor.shape), tensor.dtype)
    mirror = Mirror(slots, [MirrorPart(tensor, 0)], there)
    if there:
        mirror.restore()
    mirrors.add(mirror)
    return mirror
