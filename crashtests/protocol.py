"""All interleavings of the global-commit protocol, within bounds: see `protocol_model.py`.

    python -m crashtests.protocol                  every world, 2 and 3 ranks, and every mutant
    python -m crashtests.protocol --ranks 2 --world deaths --trace

A world says what may happen and how often. From each state that can be reached each rank's next
step is made, and each fault. In each state, and at each step, this has to hold:

* Ranks that begin to train hold the same content, each in its own store, and all have joined.
* What all ranks can produce is never below a generation that was acknowledged (a ticket completed),
  and at most one generation below what any rank has committed. It is never nothing.
* Two contents never have one key.
* Nobody waits for ever, unless a rank is dead. Ranks that did nothing wrong never differ.

Where people exchange files by hand, a job may be refused, and go back further; the rest holds.

A mutant leaves one rule out. It has to be found. Exit code 1 if anything went otherwise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crashtests.protocol_model import Model
from crashtests.protocol_state import Rank, State, Violation, World
from crashtests.report import leave

BY_HAND = ("exchange", "lose", "swap", "resolve", "alone")

WORLDS = (
    World("deaths"),
    World("pending", wait=False),
    World("meetings", steps=4, attempts=2, wishes=(2, 4, 5), signals=1),
    World("strays", steps=2, attempts=2, strays=3),
    World("strays between meetings", steps=4, attempts=2, wishes=(4,), strays=2),
    World("half steps", steps=2, attempts=2, halves=2),
    World("edited programs", edits=1),
    World("notes", acts=("note",), act_count=1),
    World("by hand", steps=1, copies=1, acts=BY_HAND, act_count=2),
    World("branches", steps=1, copies=1, branch=True, acts=("exchange",), act_count=3),
)

SMALLER: dict[str, dict[str, Any]] = {
    "meetings": {"steps": 3, "attempts": 1},
    "strays": {"strays": 2},
    "edited programs": {"attempts": 2},
    "by hand": {"attempts": 2, "act_count": 1},
    "branches": {"attempts": 2, "act_count": 2},
}
"""For more than two ranks."""


@dataclass(frozen=True)
class Mutant:
    rule: str
    """What is left out; several with a comma, of which each makes good for the other."""
    world: str
    """Where that shows."""
    says: str
    """The rule, or what leaving it out is."""
    equivalent: str = ""
    """Why nothing can tell; empty: it has to be found."""


MUTANTS = (
    # a commit
    Mutant("commit holds the version before", "deaths", "the engine, `hold_for_job`"),
    Mutant("wait for the ticket", "deaths", "nothing is let go before the last commit's ticket"),
    Mutant("ticket after the commit", "deaths", "it starts when the commit is durable"),
    Mutant("ticket after a pending commit", "pending", "also with commit(wait=False)"),
    Mutant("a lost peer ends it", "deaths", "a ticket that failed is not one that completed"),
    Mutant("acknowledged by the ticket", "deaths", "commit(agree=True) waits for it"),
    Mutant("last ticket before the release", "deaths", "leaving `with` waits for it"),
    Mutant("in doubt after an open", "notes", "a held store that is opened alone does not commit"),
    # joining
    Mutant("told before any commit", "deaths", "nothing is written before all have told"),
    Mutant("that all can produce", "deaths", "the target; not the newest of any"),
    Mutant("newest of them", "deaths", "the target; not an older one"),
    Mutant("held version is offered", "deaths", "a rank tells both that it can produce"),
    Mutant("no run is a version too", "deaths", "generation 0 holds the store without a run"),
    Mutant("those ahead go back", "deaths", "durably, before anything else"),
    Mutant("joining makes a generation", "edited programs", "of its own, with what is adapted"),
    Mutant("barrier", "deaths", "nobody trains before all stand at the target"),
    # what a generation is
    Mutant("whole keys compared", "by hand", "not numbers and steps alone"),
    Mutant("draw", "branches", "each term has a number drawn at random"),
    Mutant("term is raised", "branches", "a term is newer than all before", "draws differ"),
    Mutant("term is raised, draw", "by hand", "terms can be told apart"),
    Mutant("store of this rank", "by hand", "a rank takes no other rank's store"),
    Mutant("step of no run", "by hand", "runs that no job made are at the same step"),
    Mutant(
        "training alone leaves the job",
        "by hand",
        "attach without a job removes its record",
        "the record's step is not the run's then",
    ),
    Mutant(
        "run is at the record's step",
        "by hand",
        "else it was trained outside the job",
        "training alone has removed the record",
    ),
    Mutant(
        "training alone leaves the job, run is at the record's step",
        "by hand",
        "a run that was trained alone is not joined",
    ),
    # ranks that stray, and agreed steps
    Mutant("updates in the mark", "strays", "ranks that left a commit out are found"),
    Mutant("roll backs in the mark", "strays", "so are lone roll backs"),
    Mutant("mark in the key", "strays", "also if all die before the ticket"),
    Mutant("alike fields compared", "strays", "a ticket compares what must be alike"),
    Mutant("least wish", "meetings", "of all ranks, not each its own"),
    Mutant("all stop at the same step", "meetings", "which the ticket says"),
    Mutant("all leave alike", "half steps", "if one is in the middle of a step, none commits"),
)


@dataclass(frozen=True)
class Outcome:
    states: int
    violation: str = ""
    path: tuple[str, ...] = ()


class Search:
    """Breadth first, so that a violation has the shortest way. Ranks are alike: states that differ
    in their order alone are one."""

    def __init__(self, model: Model, say: Callable[[int], None] = lambda states: None) -> None:
        self.model = model
        self.say = say
        self._numbers: dict[Rank, int] = {}

    def plain(self, state: State) -> State:
        """The one that stands for all orders of the ranks."""
        # tickets that everybody has looked at are of no account
        old = min((rank.taken for rank in state.ranks if rank.alive), default=9)
        numbers = self._numbers
        ranks = [
            rank._replace(posts=rank.posts[old:], taken=max(rank.taken - old, 0)) if old else rank
            for rank in state.ranks
        ]
        ranks.sort(key=lambda rank: numbers.setdefault(rank, len(numbers)))
        return state._replace(ranks=tuple(ranks))

    def run(self) -> Outcome:
        first = self.plain(self.model.first())
        seen: dict[State, State | None] = {first: None}
        queue = deque([first])
        while queue:
            state = queue.popleft()
            try:
                moved = False
                found = []
                for _, new in self.model.moves(state):
                    moved = True
                    found.append(new)
                self.model.check_stuck(state, moved)
                found += [new for _, new in self.model.faults(state)]
                for new in map(self.plain, found):
                    if new not in seen:
                        seen[new] = state
                        self.model.check(new)
                        queue.append(new)
                        if len(seen) % 50_000 == 0:
                            self.say(len(seen))
            except Violation as violation:
                end = new if "new" in locals() and seen.get(new) is state else state
                return Outcome(len(seen), str(violation), self._path(seen, end))
        return Outcome(len(seen))

    def _path(self, seen: dict[State, State | None], end: State) -> tuple[str, ...]:
        """What happened, replayed: so that each rank keeps its number."""
        way: list[State] = []
        at: State | None = end
        while at is not None:
            way.append(at)
            at = seen[at]
        labels = []
        state = self.model.first()
        for wanted in way[-2::-1]:
            for moves in (self.model.moves(state), self.model.faults(state)):
                step = next((m for m in moves if self.plain(m[1]) == wanted), None)
                if step is not None:
                    break
            assert step is not None
            labels.append(step[0])
            state = step[1]
        return tuple(labels)


def world(name: str, ranks: int) -> World:
    (found,) = (w for w in WORLDS if w.name == name)
    found = found._replace(ranks=ranks)
    return found if ranks == 2 else found._replace(**SMALLER.get(name, {}))


def search(
    name: str, ranks: int, left_out: str = "", say: Callable[[int], None] = lambda states: None
) -> Outcome:
    rules = frozenset(rule.strip() for rule in left_out.split(",") if rule)
    return Search(Model(world(name, ranks), rules), say).run()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m crashtests.protocol",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    names = [w.name for w in WORLDS]
    parser.add_argument("--ranks", type=int, action="append", help="2 and 3")
    parser.add_argument("--world", choices=names, action="append")
    parser.add_argument("--rule", help="leave this one out: only that mutant")
    parser.add_argument("--no-mutants", action="store_true")
    parser.add_argument("--trace", action="store_true", help="show how each violation comes about")
    arguments = parser.parse_args()
    failures = 0
    total = 0
    mutants = [m for m in MUTANTS if arguments.rule in (None, m.rule) and not arguments.no_mutants]

    def line(what: str, run: Callable[[], Outcome], bad: Callable[[Outcome], bool]) -> None:
        nonlocal failures, total
        begun = time.monotonic()
        outcome = run()
        total += outcome.states
        wrong = bad(outcome)
        failures += wrong
        said = outcome.violation or "holds"
        seconds = time.monotonic() - begun
        print(
            f"{what:58s}{outcome.states:>10,} states {seconds:6.1f} s  "
            f"{'WRONG: ' if wrong else ''}{said}",
            flush=True,
        )
        if outcome.path and (arguments.trace or (wrong and outcome.violation)):
            print("".join(f"    {label}\n" for label in outcome.path), end="", flush=True)

    def say(states: int) -> None:
        print(f"    ... {states:,} states", file=sys.stderr, flush=True)

    for ranks in arguments.ranks or [2, 3]:
        for name in arguments.world or names:
            if arguments.rule is None:
                line(
                    f"{ranks} ranks, {name}",
                    lambda name=name, ranks=ranks: search(name, ranks, "", say),  # type: ignore[misc]
                    lambda outcome: bool(outcome.violation),
                )
    for mutant in mutants:
        line(
            f"without: {mutant.rule}",
            lambda mutant=mutant: search(mutant.world, 2, mutant.rule, say),  # type: ignore[misc]
            lambda outcome, mutant=mutant: bool(outcome.violation) == bool(mutant.equivalent),  # type: ignore[misc]
        )
    print(f"{total:,} states, {failures} failures")
    leave("protocol", 0, states=total, mutants=len(mutants), failures=failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
