"""Estimates a rate of failures from counts: what is expected before anything was counted, and when
old counts stop to count."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Exponential priors, one for each decade of the mean time between failures from 1.2 s to two weeks:
# seconds, and log of the weight. 20 minutes have half as much again as what is longer: there a rate
# that is thought too low costs most. What is killed every few seconds is killed on purpose.
_SHARES = (1, 1, 4, 900, 600, 600, 600)
_DECADES = [(1.2 * 10.0**k, math.log(share / sum(_SHARES))) for k, share in enumerate(_SHARES)]
_CHANGED = 0.02
_STRETCH = 4.0  # failures
_LONG = 0.1  # of the seconds before


def log_evidence(failures: float, seconds: float) -> float:
    """Returns the log of the likelihood of so many failures in so many seconds, a mean over the
    prior. The prior is a mixture of Gamma distributions, and so this has a closed form: sum_k w_k
    b_k Gamma(1 + n) / (b_k + T)^(1 + n), where b_k is the decade's mean time."""
    logs = [
        weight + math.log(mean) - (1.0 + failures) * math.log(mean + seconds)
        for mean, weight in _DECADES
    ]
    top = max(logs)
    return top + math.log(sum(math.exp(one - top) for one in logs)) + math.lgamma(1.0 + failures)


def expected_rate(failures: float, seconds: float) -> float:
    """Returns the posterior mean of the failures per second, from counts of one rate that does not
    change: the mean of (1 + n) / (b_k + T) over the decades, by their posterior weights.

    The mean is what minimises expected lost time: that is linear in the rate. Without counts it is
    one failure in 26 minutes; after four hours without a failure one in 21 hours.

    >>> round(1 / expected_rate(0, 0) / 60), round(1 / expected_rate(0, 4 * 3600) / 3600)
    (26, 21)
    >>> round(1 / expected_rate(10, 36 * 3600.0) / 3600, 1)
    3.5
    """
    return math.exp(log_evidence(failures + 1.0, seconds) - log_evidence(failures, seconds))


@dataclass(slots=True)
class Evidence:
    """Measures how much of what was counted still says something of the rate.

    Counts come in stretches of four failures, or of a run without one that was long. What was
    counted before a stretch has the stretch's rate too, or the rate is another one since (another
    cluster, another year): the odds are those of the stretch's counts under either, with 2 % for a
    change beforehand. The estimate is the mean over both. At a stretch's end what came before
    counts on by the probability that nothing changed. So where failures become a hundred times as
    frequent, the old rate is given up after two of them; where they become rarer, after a few times
    the old mean time without one; and a rate that stays is averaged over hundreds.

    Attributes:
        failures, seconds: of earlier stretches, that still count.
        seen_failures, seen_seconds: all that had been counted when the stretch began.
    """

    failures: float = 0.0
    seconds: float = 0.0
    seen_failures: float = 0.0
    seen_seconds: float = 0.0

    def rate(self, failures: float, seconds: float) -> float:
        """Returns the expected failures per second, where so much has been counted in all."""
        failures, seconds = self._since(failures, seconds)
        same = self._same(failures, seconds)
        return same * expected_rate(self.failures + failures, self.seconds + seconds) + (
            1.0 - same
        ) * expected_rate(failures, seconds)

    def take(self, failures: float, seconds: float, *, run_ended: bool = False) -> None:
        """Ends the stretch if that is due, where so much has been counted in all. It is called
        after each failure, and at the first opening after a run."""
        new_failures, new_seconds = self._since(failures, seconds)
        quiet = run_ended and not new_failures and new_seconds > _LONG * self.seconds
        if new_failures < _STRETCH and not quiet:
            return
        same = self._same(new_failures, new_seconds)
        self.failures = self.failures * same + new_failures
        self.seconds = self.seconds * same + new_seconds
        self.seen_failures, self.seen_seconds = failures, seconds

    def _since(self, failures: float, seconds: float) -> tuple[float, float]:
        return max(failures - self.seen_failures, 0.0), max(seconds - self.seen_seconds, 0.0)

    def _same(self, failures: float, seconds: float) -> float:
        """Returns the probability that the stretch has the rate of those before."""
        if not self.seconds:
            return 1.0
        before = log_evidence(self.failures, self.seconds)
        same = log_evidence(self.failures + failures, self.seconds + seconds) - before
        other = log_evidence(failures, seconds)
        odds = math.exp(max(min(same - other, 500.0), -500.0)) * (1.0 - _CHANGED) / _CHANGED
        return odds / (1.0 + odds)

    def values(self) -> list[float]:
        return [self.failures, self.seconds, self.seen_failures, self.seen_seconds]
