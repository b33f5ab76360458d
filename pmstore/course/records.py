"""Says where the course of a run lies in its store: under nine names in `pmstore.course/<run>`,
about 150 KiB, and more where `lives` has long texts (0.5 MiB at most). Those of decisions and tiers
are made with the first decision or tier.

`steps`: of the newest 512 steps a row each. That of step s is at s % 512.
`curve`: the whole run, in 1024 buckets. Bucket i holds the steps i * width to (i + 1) * width - 1.
When a step comes that is beyond the last one, the buckets are merged in pairs, and the width
doubles: so a run of any length shows its whole curve, at between 512 and 1024 points.
`decisions`: the newest 256 commits that a scheduler decided; `starts`: the newest 64 processes.
`lives`: what they were, a list of dicts (see `pmstore.course.lives`). `rewinds`: the newest 64.
`tiers`: how far flushes to them were at the last write. `words`: the names of targets and tiers,
and the reasons, that decisions and `tiers` refer to by their places. `totals`: of the whole run, in
one row.

All but `lives` and `words` are arrays of float64. Times are seconds since 1970.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from pmstore._base.text import encode_name

GROUP = "pmstore.course"


class Step(IntEnum):
    """Columns of `steps`. nan in SECONDS: it was not committed, or that is not known yet."""

    STEP = 0
    TIME = 1
    LOSS = 2
    SECONDS = 3  # seconds that the commit took
    BYTES = 4  # bytes that the commit wrote: a mean over those of a batch of rows
    GIVEN = 5  # 1: a loss was given, and LOSS is it


class Bucket(IntEnum):
    """Columns of `curve`. Sums are over the bucket's steps."""

    WIDTH = 0  # 0: nothing is in it
    LAST = 1  # the newest step that is in it
    TIME = 2  # the time of that step
    LOSSES = 3  # finite losses: how many, and their sum, least and greatest
    LOSS_SUM = 4
    LOSS_MIN = 5
    LOSS_MAX = 6
    BAD = 7  # losses that were nan or infinite
    COMMITS = 8
    SECONDS = 9  # seconds that the commits took
    SLOWEST = 10
    BYTES = 11


class Decision(IntEnum):
    """Columns of `decisions`; see `pmstore.scheduler.Decision`. NUMBER counts from 1."""

    NUMBER = 0
    STEP = 1
    TIME = 2
    TARGET = 3
    REASON = 4
    RISK = 5
    COST = 6
    HAZARD = 7
    WEIGHT = 8
    OVERHEAD = 9


class Tier(IntEnum):
    """Columns of `tiers`, whose rows are in the order of their names in `words`; see
    `pmstore.tiers._flush.flush.TierState`."""

    EPOCH = 0
    SECONDS = 1
    UNDER_WAY = 2  # the epoch that is being flushed; 0: none is
    SHARE = 3
    FAILED = 4
    TIME = 5


class Start(IntEnum):
    """Columns of `starts`: a process attached the run, or went on with it. NUMBER counts from 1."""

    NUMBER = 0
    STEP = 1
    TIME = 2
    PID = 3
    OPENS = 4  # openings of the store, and those of them after a crash
    UNCLEAN = 5


class Rewind(IntEnum):
    """Columns of `rewinds`: the run went from a step back to another one. NUMBER counts from 1."""

    NUMBER = 0
    FROM = 1
    TO = 2
    TIME = 3


class Total(IntEnum):
    """Columns of `totals`, over all processes of the run."""

    SECONDS = 0  # seconds that a program was attached
    STAKE = 1  # seconds: the most that passed from one commit to the next
    STAKE_STEPS = 2  # the most steps from one commit to the next
    STEP = 3  # the step that the row is of


STEPS = ("steps", (512, len(Step)))
CURVE = ("curve", (1024, len(Bucket)))
DECISIONS = ("decisions", (256, len(Decision)))
STARTS = ("starts", (64, len(Start)))
REWINDS = ("rewinds", (64, len(Rewind)))
LIVES = "lives"
COMMAND_MAX = 2000
"""How many characters of a command line are kept."""
CHANGES_MAX = 16
"""How many changed settings of a life are kept."""
TIERS = ("tiers", (16, len(Tier)))
TOTALS = ("totals", (1, len(Total)))
WORDS = "words"
WORDS_OF = ("targets", "reasons", "tiers")
WORDS_MAX = 64
"""How many words of each kind are kept. What comes later is the last one, "another"."""
WORD_MAX = 200
"""How many characters of a word are kept."""


def place(run: str) -> str:
    """Returns the path of the group with a run's course. Names of runs may have a "/"."""
    return f"{GROUP}/{encode_name(run)}"


def are_words(value: Any) -> bool:
    """Returns whether it is as `words` is stored: lists, by WORDS_OF."""
    return (
        isinstance(value, dict)
        and value.keys() == set(WORDS_OF)
        and all(
            isinstance(words, list) and all(isinstance(word, str) for word in words)
            for words in value.values()
        )
    )
