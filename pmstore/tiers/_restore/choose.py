"""The choice of the epoch that is read, while its writer may be letting epochs go."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from pmstore.errors import CorruptStoreError, TierError
from pmstore.tiers._epochs.leases import Lease
from pmstore.tiers._epochs.listing import EpochInfo, forgotten, list_epochs
from pmstore.tiers._places.place import BrokenEpochError, Source

TRIES = 20
"""So often a reader begins anew whose epochs are forgotten while it reads them."""

_Answer = TypeVar("_Answer")


class Wanted(NamedTuple):
    """The epochs that will do: all, but for what is said."""

    epoch: int | None = None
    run: str | None = None
    """Its beginning will do."""
    kept: str | int | None = None
    """The newest that was kept under this name, or of this step."""


def read_first(
    place: Source, wanted: Wanted, what: str, read: Callable[[EpochInfo], _Answer]
) -> tuple[_Answer, EpochInfo, list[tuple[int, str]]]:
    """Reads the newest epoch that can be read. Returns what read makes of it, which epoch that is,
    and what is wrong with newer ones. read raises BrokenEpochError or CorruptStoreError for one
    that cannot be.

    An epoch that its writer let go meanwhile is no broken one: then it looks for the newest again.
    What it reads is held by a lease, where it may write.

    what: is done with it, for messages: "restored". Raises: TierError, OSError; what read raises.
    """
    for _ in range(TRIES):
        broken: list[tuple[int, str]] = []
        for info in _choose(list_epochs(place), place.url, wanted):
            problem = info.problem
            if problem is None:
                with Lease(place, info.epoch, info.run, info.world_size):
                    try:
                        return read(info), info, broken
                    except BrokenEpochError as error:
                        problem = str(error)
                    except CorruptStoreError as error:
                        problem = f"corrupt: {error}"
            if problem.startswith("missing") and forgotten(place, info):
                break
            broken.append((info.epoch, problem))
        else:
            reasons = "; ".join(f"epoch {number} is {why}" for number, why in broken)
            none_whole = TierError(f"{place.url}: no epoch could be {what}: {reasons}")
            none_whole.damaged = True
            raise none_whole
    raise TierError(
        f"{place.url}: {TRIES} times the newest epoch was let go while it was read: let its writer "
        "keep more of them (keep=), or give this reader the right to write there, so that it can "
        "hold what it reads"
    )


def _choose(found: list[EpochInfo], url: str, wanted: Wanted) -> list[EpochInfo]:
    """Returns the epochs to try, in this order.

    Raises: TierError.
    """
    if not found:
        raise TierError(f"{url}: there is no epoch here")
    candidates = [one for one in found if _fits(one, wanted)]
    if any(one.run == wanted.run for one in candidates):
        candidates = [one for one in candidates if one.run == wanted.run]
    if not candidates:
        raise TierError(f"{url}: no such epoch. It has {_listed(found)}")
    runs = sorted({one.run for one in candidates})
    if wanted[::2] != (None, None) and len(runs) > 1:
        which = f"epoch {wanted.epoch}" if wanted.kept is None else f"{wanted.kept!r}"
        raise TierError(
            f"{url}: {which} is there of several runs: say run= one of {', '.join(runs)}"
        )
    return candidates[:1] if wanted.kept is not None else candidates


def _listed(found: list[EpochInfo]) -> str:
    by_run: dict[str, list[str]] = {}
    for one in found[:20]:
        why = f" (kept: {', '.join(map(str, one.kept))})" if one.kept else ""
        by_run.setdefault(one.run, []).append(f"{one.epoch}{why}")
    told = (
        f"epoch{'s' * (len(epochs) > 1)} {', '.join(epochs)} of run {run}"
        for run, epochs in by_run.items()
    )
    return "; ".join(told) + (" and more" if len(found) > 20 else "")


def _fits(info: EpochInfo, wanted: Wanted) -> bool:
    epoch, run, kept = wanted
    return (
        (run is None or info.run.startswith(run))
        and (epoch is None or info.epoch == epoch)
        and (kept is None or any(reason.is_called(kept) for reason in info.kept))
    )
