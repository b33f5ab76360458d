"""Mixtures of operations that Hypothesis makes: arrays, values, lists, slots, groups, flushes,
blocks, roll backs, reopening.

    python -m crashtests.mixtures --examples 40 --seed 1
    build/crashtest/crash images --workload script --script "a1,300 c0,0" ...    one of them again

Each is run as a workload is: recorded, crashed under the models (i) to (iii), and every image
checked. One that fails is shrunk to the shortest that does. Exit code 1 then.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from crashtests import jobs
from crashtests.report import commit_id, leave

UNDER = (("i", "process"), ("ii", "emulated"), ("iii", "file"))
LETTERS = "advwmekDlsSgfcrbBo"
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


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m crashtests.mixtures",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--examples", type=int, default=20)
    parser.add_argument("--images", type=int, default=100, help="of each, per model")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    tally = run(arguments.examples, arguments.images, arguments.seed)
    print(
        f"mixtures: {tally.examples} programs, {tally.images:,} distinct images, "
        f"{int(bool(tally.failure))} failures"
    )
    leave(
        "mixtures",
        arguments.seed,
        programs=tally.examples,
        images=tally.images,
        failures=int(bool(tally.failure)),
    )
    if tally.failure:
        print(f"FAILED: {tally.failure} (seed {arguments.seed}, commit {commit_id()})")
    return 1 if tally.failure else 0


if __name__ == "__main__":
    sys.exit(main())
