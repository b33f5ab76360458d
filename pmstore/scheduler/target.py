"""Describes one destination of commits, and what is decided about it."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pmstore.scheduler._models.cost import CostModel
from pmstore.scheduler._models.hazard import TARGETS_MAX

if TYPE_CHECKING:
    from pmstore import Store


@dataclass(frozen=True, slots=True)
class Decision:
    """Says what a step decided, and from what. It is true if the step commits.

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
            rates: sqrt(2 h C) + h P, for a commit of P seconds in the background saves what came
            before it P later.
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
    """One destination of commits, as the scheduler sees it. Times are in seconds.

    Attributes:
        number: 0 for the first (fastest), upward. key: see `cost_key`.
        work: since its last commit, as are `steps` and the `risk` that has accumulated.
        rate: of the failures that need it, per second; hazard: h, the same as the objective weighs
            it.
        price: C_eff now; NaN before the first commit.
        due: risk from which a commit pays (see `due`); before the first commit any does.
        free_work: work from which a commit is free, or demanded.
        least_work: work before which none is allowed.
        most_work: work from which one is demanded.
        retry_work: work before which one that failed is not tried again.
        handle: of the commit that is being written in the background.
        stake: work, risk and steps that the commit in the background will have saved.
    """

    number: int
    name: str
    commit: Callable[[], object]
    key: int = 0
    cost: CostModel = field(default_factory=CostModel)
    work: float = 0.0
    steps: int = 0
    risk: float = 0.0
    rate: float = 0.0
    hazard: float = 0.0
    price: float = math.nan
    due: float = -math.inf
    free_work: float = math.inf
    least_work: float = 0.0
    most_work: float = math.inf
    retry_work: float = 0.0
    handle: Any = None
    launched: float = 0.0
    stake: tuple[float, float, int] = (0.0, 0.0, 0)

    def reprice(self, dirty_bytes: float | None) -> None:
        """Computes the price and the risk from which a commit pays, after a commit or where the
        rates have changed."""
        if self.cost.count:
            self.price = self.cost.price(dirty_bytes)
            self.due = due(self.price, self.rate, self.hazard)
        else:
            self.price, self.due = math.nan, -math.inf

    def reset(self) -> None:
        self.work = self.risk = self.retry_work = 0.0
        self.steps = 0

    def put_back(self) -> None:
        """Puts back at stake what a commit in the background was to save: it failed.

        It is tried again an interval later.
        """
        work, risk, steps = self.stake
        self.risk += risk + self.hazard * work * self.work
        self.work += work
        self.steps += steps
        self.retry_work = self.work + self._interval(self.price)

    def put_off(self, seconds: float) -> None:
        """Puts off the next try after a commit that failed and took so long. It is tried again when
        that was a twentieth of the time, or an interval later if that is sooner: one that fails at
        once is tried again at once."""
        self.retry_work = self.work + min(20.0 * seconds, self._interval(seconds))

    def _interval(self, seconds: float) -> float:
        """Returns the interval of commits that take so long, sqrt(2 seconds / h): a target that is
        away costs no more than one that is there."""
        return math.sqrt(2.0 * seconds / self.hazard) if self.hazard > 0.0 else self.work

    def __repr__(self) -> str:
        return (
            f"<Target {self.name!r}: price {self.price:.3g} s, risk {self.risk:.3g} s, work "
            f"{self.work:.3g} s>"
        )


def due(price: float, rate: float, hazard: float) -> float:
    """Returns the risk from which a commit of so many seconds pays.

    While price x rate is small, that risk is the price. Otherwise a failure may come in the commit
    too, and in what is done again. An interval tau then costs (e^(rate (tau + price)) - 1) / rate,
    which is least for each second of work where -ln(1 - u) - u = rate price, with u = rate tau
    (Daly's interval to the third order, and the limit MTBF for commits that cost more than that).
    The risk of such an interval is hazard tau^2 / 2.

    >>> round(due(1.0, 1e-9, 1e-9), 4), round(due(60.0, 1 / 480, 1 / 480), 1)
    (1.0, 42.4)
    """
    part = price * rate * rate / hazard if hazard > 0.0 else 0.0
    if not part > 1e-12:  # or not a number, as the price is then
        return price
    if part > 1e6:
        return 0.5 * hazard / rate**2
    u = min(math.sqrt(2.0 * part), -math.expm1(-1.0 - part))  # above the root: Newton goes down
    for _ in range(8):
        if u >= 1.0:
            break
        u += (part + u + math.log1p(-u)) * (1.0 - u) / u
    return price * u * u / (2.0 * part)


def decided(
    target: Target, reason: str, targets: Sequence[Target], weight: float, step: int, seconds: float
) -> Decision:
    """Makes the decision to commit to this target now."""
    priced = [one for one in targets if one.price == one.price]
    overhead = sum(
        math.sqrt(2.0 * one.hazard * one.price) + one.hazard * one.cost.background for one in priced
    )
    name, risk, cost, hazard = target.name, target.risk, target.price, target.hazard
    return Decision(name, reason, risk, cost, hazard, weight, overhead, step, seconds)


def cost_key(run: str, target: str) -> int:
    """Stands for a run's target where there is no room for names."""
    return zlib.crc32(f"{run}\0{target}".encode()) or 1


def is_done(handle: Any) -> bool:
    """Returns whether a handle is done: by its `done`, a method or a property, or by its `over`.
    While a flush deletes old epochs, the next one does not begin, and its snapshot would only be
    held meanwhile: so `over` counts where a handle has it."""
    done = getattr(handle, "over", handle.done)
    return bool(done() if callable(done) else done)


def error_of(handle: Any) -> BaseException | None:
    """Returns the error of a handle that is done, or None: of a `pmstore.tiers.Flush`, or a Future.
    The caller counts as told: the next flush does not raise the error."""
    error = getattr(handle, "error", None)
    if isinstance(error, BaseException):
        if callable(wait := getattr(handle, "wait", None)):
            with contextlib.suppress(Exception):
                wait()
        return error
    error = exception() if callable(exception := getattr(handle, "exception", None)) else None
    return error if isinstance(error, BaseException) else None


def store_targets(store: Store, *tiers: str) -> dict[str, Callable[[], object]]:
    """Returns the store's own commit, as "store", and flushes to tiers of the store, nearest first.

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
    """Returns what a scheduler was told to commit to, by name.

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
