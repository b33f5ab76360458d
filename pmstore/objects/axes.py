"""Says how the elements of an array lie in its block: dense, in some order of the axes.

>>> strides_of((2, 3), None), strides_of((2, 3), (1, 0))
((3, 1), (1, 2))
>>> order_of((2, 3), (1, 2)), order_of((2, 3), (3, 1)), order_of((2, 3), (6, 2))
((1, 0), None, False)
>>> order_of((4, 1, 3, 3), (9, 1, 3, 1)), order_of((4, 1, 3, 3), (9, 9, 3, 1))
((0, 2, 3, 1), None)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal


def strides_of(shape: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the strides of dense elements, in elements. order: the axes from the slowest to the
    fastest; None: as they come (C)."""
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order if order is not None else range(len(shape))):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def order_of(
    shape: Sequence[int], strides: Sequence[int]
) -> tuple[int, ...] | Literal[False] | None:
    """Returns the order of the axes if the elements are dense: None for C order, False if they are
    not dense."""
    if 0 in shape or tuple(strides) == strides_of(shape, None):
        return None
    # The stride of an axis of length 1 moves nothing. But torch tells channels_last by it, and then
    # computes in another order; so it is kept where an order gives the same. Of equal strides that
    # axis is the faster one.
    exact = sorted(range(len(shape)), key=lambda axis: (-strides[axis], shape[axis] == 1))
    if tuple(strides) == strides_of(shape, exact):
        return tuple(exact)
    # Where no order gives the same, such an axis keeps its place among the others.
    wide = [axis for axis in range(len(shape)) if shape[axis] > 1]
    by_stride = sorted(wide, key=lambda axis: -strides[axis])
    places = iter(by_stride)
    order = tuple(next(places) if shape[axis] > 1 else axis for axis in range(len(shape)))
    dense = strides_of(shape, order)
    if any(dense[axis] != strides[axis] for axis in wide):
        return False
    return None if by_stride == wide else order


def decode_order(order: Any, axes: int) -> tuple[int, ...] | None:
    """Checks an order of axes that was read from a store, and returns it."""
    if order is None:
        return None
    if (
        not isinstance(order, list)
        or not all(type(axis) is int for axis in order)
        or sorted(order) != list(range(axes))
    ):
        raise ValueError("not an order of the axes")
    return tuple(order)
