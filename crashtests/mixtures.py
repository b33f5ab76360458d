"""Mixtures of operations that Hypothesis makes: arrays, values, lists, slots, groups, flushes,
blocks, roll backs, reopening, pages that change back, new blocks that go straight home, views that
outlive their arrays.

    python -m crashtests --kind mixtures --size 40
    build/crashtest/crash images --workload script --script "a1,300 c0,0" ...    one of them again

Each is run as a workload is: recorded, crashed under the models (i) to (iii), and every image
checked. One that fails is shrunk to the shortest that does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from crashtests import cases, jobs
from crashtests.report import leave

UNDER = (("i", "process"), ("ii", "emulated"), ("iii", "file"))
IMAGES = 100
"""Of each, per model."""
LETTERS = "advwmekDlsSguhpfcrbBo"
"""What they mean: crashtests/native/script.c."""

Operation = tuple[str, int, int]
operations = st.lists(
    st.tuples(st.sampled_from(LETTERS), st.integers(0, 20_000), st.integers(0, 20_000)),
    min_size=1,
    max_size=40,
)


@dataclass
class Tally:
    examples: int = 0
    images: int = 0
    failure: str = ""
    """The shortest program that fails, and how; empty: none did."""


def text_of(program: list[Operation]) -> str:
    return " ".join(f"{letter}{a},{b}" for letter, a, b in program)


def messages_of(text: str, budget: int, number: int, tally: Tally) -> list[str]:
    options = {
        "seed": number,
        "budget": budget,
        "nested-every": 40,
        "stop-after": 1,
        "script": text,
    }
    # A table of images seen of its own: what is tried again has to fail again.
    with jobs.Runner(jobs.BUILD / "crash", room=1 << 16) as runner:
        outcomes = runner.run_all(
            [jobs.Job("images", "script", d, m, options) for m, d in UNDER], lambda job, n: None
        )
    tally.images += sum(o.result.get("distinct", 0) for o in outcomes)
    return [
        f"({o.job.model}) {o.job.domain}: {failure.get('message')}"
        for o in outcomes
        for failure in o.failures
    ]


def run(examples: int, budget: int, number: int) -> Tally:
    tally = Tally()
    jobs.build()

    @seed(number)
    @settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(operations)
    def check(program: list[Operation]) -> None:
        tally.examples += 1
        text = text_of(program)
        found = messages_of(text, budget, number, tally)
        if found:
            # of the last one that fails: the shortest
            tally.failure = f"{text!r}: {'; '.join(found)}"
        assert not found

    try:
        check()
    except AssertionError:
        assert tally.failure
    return tally


def _examine(number: int, size: int, _: None) -> cases.Found:
    tally = run(size, IMAGES, number)
    counts = Counter(programs=tally.examples, images=tally.images)
    leave("mixtures", number, **counts, failures=int(bool(tally.failure)))
    return cases.Found(counts, [tally.failure] if tally.failure else [])


CASES = cases.Kind(
    20,
    "programs",
    lambda: 1,
    lambda seed, size: (f"{size} mixtures, Hypothesis's seed {seed}", seed),
    _examine,
)
