"""One destination of commits, and what is decided about it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pmstore.scheduler.cost import CostModel
from pmstore.scheduler.hazard import TARGETS_MAX

if TYPE_CHECKING:
    from pmstore import Store


@dataclass(frozen=True, slots=True)
class Decision:
    """What a step decided, and from what. True if it commits.

    Attributes:
        target: that committed; None: none did.
        reason: in words; "" without a commit.
        risk: expected seconds lost to failures since the target's last commit, that a commit now
            ends.
        cost: C_eff of the target's commit as expected before it, in seconds; NaN where nothing was
            known.
        hazard: h, failures per second, weighted as the objective says.
        weight: w, density of progress; 1.0 where it is unknown or of no interest.
        predicted_overhead: share of the running time that commits and failures cost at the present
            rates: sqrt(2 h C).
        step: finished steps of the run. seconds: of work done.
    """

    target: str | None
    reason: str
    risk: float
    cost: float
    hazard: float
    weight: float
    predicted_overhead: float
    step: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self.target is not None


NOTHING = Decision(None, "", 0.0, math.nan, 0.0, 1.0, 0.0)
"""What a step without a commit returns: one for all."""


@dataclass(slots=True, eq=False, repr=False)
class Target:
    """One destination of commits, as the scheduler sees it. Seconds.

    Attributes:
        number: 0 for the first (fastest), upward.
        work: since its last commit, as are `steps` and the `risk` that has accumulated.
        hazard: h per second.
        price: C_eff now; NaN before the first commit.
        free_work: work from which a commit is free.
        least_work: work before which none is allowed.
        retry_work: work before which one that failed in the background is not tried again.
        handle: of the commit that is being written in the background.
        stake: work, risk and steps that the commit in the background will have saved.
    """

    number: int
    name: str
    commit: Callable[[], object]
    cost: CostModel = field(default_factory=CostModel)
    work: float = 0.0
    steps: int = 0
    risk: float = 0.0
    hazard: float = 0.0
    price: float = math.nan
    free_work: float = math.inf
    least_work: float = 0.0
    retry_work: float = 0.0
    handle: Any = None
    launched: float = 0.0
    stake: tuple[float, float, int] = (0.0, 0.0, 0)

    def reset(self) -> None:
        self.work = self.risk = self.retry_work = 0.0
        self.steps = 0

    def put_back(self) -> None:
        """The commit in the background failed: what it was to save is at stake as before.

        It is tried again an interval later, sqrt(2 C_eff / h): a target that is away costs no
        more than one that is there.
        """
        work, risk, steps = self.stake
        self.risk += risk + self.hazard * work * self.work
        self.work += work
        self.steps += steps
        self.retry_work = self.work + (
            math.sqrt(2.0 * self.price / self.hazard) if self.hazard > 0.0 else self.work
        )

    def __repr__(self) -> str:
        return (
            f"<Target {self.name!r}: price {self.price:.3g} s, risk {self.risk:.3g} s, work "
            f"{self.work:.3g} s>"
        )


def is_done(handle: Any) -> bool:
    """Of a handle with `done`, a method or a property; or `over`: while a flush deletes old epochs
    the next one does not begin, and its snapshot would only be held meanwhile."""
    done = getattr(handle, "over", handle.done)
    return bool(done() if callable(done) else done)


def error_of(handle: Any) -> BaseException | None:
    """Of a handle that is done: a `pmstore.tiers.Flush`, or a Future. Who asks was told: the next
    flush does not raise it."""
    error = getattr(handle, "error", None)
    if isinstance(error, BaseException):
        if callable(wait := getattr(handle, "wait", None)):
            with contextlib.suppress(Exception):
                wait()
        return error
    error = exception() if callable(exception := getattr(handle, "exception", None)) else None
    return error if isinstance(error, BaseException) else None


def store_targets(store: Store, *tiers: str) -> dict[str, Callable[[], object]]:
    """The store's own commit, as "store", and flushes to tiers of the store, nearest first.

    A flush commits the store first, so that it takes what is there now.

    Raises: ValueError for a tier given twice, and for "store".
    """
    if len({"store", *tiers}) <= len(tiers):
        raise ValueError(
            f"{tiers}: each tier once, and none named 'store', which is the store's own commit"
        )

    def flush(tier: str) -> Callable[[], object]:
        def run() -> object:
            store.commit()
            return store.flush(tier)

        return run

    return {"store": store.commit, **{tier: flush(tier) for tier in tiers}}


def commits_of(
    store: Store | None, tiers: Sequence[str], targets: Mapping[str, Callable[[], object]] | None
) -> Mapping[str, Callable[[], object]]:
    """What a scheduler was told to commit to.

    Raises: ValueError, TypeError.
    """
    if isinstance(tiers, str) or not all(isinstance(tier, str) for tier in tiers):
        raise TypeError(f"tiers={tiers!r}: a list of names of tiers, such as ['disk']")
    if tiers and (store is None or targets is not None):
        raise ValueError(
            f"tiers={tiers!r} are of store=, beside its own commit: give store=, and no targets="
        )
    unknown = [tier for tier in tiers if store is not None and tier not in store.tiers]
    if unknown:
        raise ValueError(
            f"the store has no tier {unknown[0]!r}: store.add_tier({unknown[0]!r}, url) adds one"
        )
    if targets is None:
        targets = {} if store is None else store_targets(store, *tiers)
    if not 1 <= len(targets) <= TARGETS_MAX:
        raise ValueError(
            f"what to commit to: store= or targets=, from 1 to {TARGETS_MAX} of them, fastest "
            f"first, not {len(targets)}"
        )
    return targets
