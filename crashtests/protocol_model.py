"""The global-commit protocol of `pmstore/job/` as an explicit state and its moves.

Read it beside that code: a move is one step of one rank that another rank, or a death, can come
between. What is durable of a rank is `current` and `held`; all else dies with its process. Parts
that only the check knows are called ghosts: which training made a content, how often the job was
started, what was acknowledged.

| here | there |
|---|---|
| `newest_common`, `keys`, `Key` | `objects/generations.py` |
| `start`, `at_go_back`, `at_allow`, `at_begin_term`, `at_barrier` | `torch/_job/join.py` |
| `at_train`, `at_end` | `torch/_step/steps.py`: `end`, with `Membership.turn` around it |
| `at_commit`, the landing, what is held | `native/commit/hold.c`, `pmstore/mirror/` |
| `begin_ticket`, `settle`, `at_leave` | `job/membership.py` |

A rule that is in `left_out` is not kept: see `crashtests/protocol.py`, which lists them.
"""

from __future__ import annotations

from collections.abc import Iterator

from crashtests.protocol_state import (
    NOTHING,
    Content,
    Key,
    Move,
    Post,
    Rank,
    State,
    Steps,
    Version,
    Violation,
    World,
    no_run,
)


class Model:
    def __init__(self, world: World, left_out: frozenset[str] = frozenset()) -> None:
        self.world = world
        self.left_out = left_out

    def rule(self, name: str) -> bool:
        return name not in self.left_out

    def first(self) -> State:
        w = self.world
        empty = Version(no_run(0), None, NOTHING)
        return State(
            (Rank(empty),) * w.ranks,
            strays=w.strays,
            signals=w.signals,
            halves=w.halves,
            copies=w.copies,
            acts=w.act_count,
            edits=w.edits,
        )

    # ---- keys

    def mark(self, rank: Rank, attempt: int) -> tuple[int, ...]:
        """As the ticket carries it."""
        return (
            attempt if self.rule("draw") else 0,
            rank.updates if self.rule("updates in the mark") else 0,
            len(rank.rollbacks) if self.rule("roll backs in the mark") else 0,
        )

    def key(self, rank: Rank, state: State, number: int) -> Key:
        mark = self.mark(rank, state.attempt)
        if not self.rule("mark in the key"):
            mark = ()
        return Key(state.term, number, rank.step, mark)

    def keys(self, rank: Rank) -> list[Key]:
        """What the rank can produce, as its store's record says."""
        found = [rank.current.key]
        if rank.held is not None and rank.current.previous is not None:
            found.append(rank.current.previous)
        if not self.rule("held version is offered"):
            del found[1:]
        if not self.rule("no run is a version too"):
            found = [key for key in found if key.number >= 0 or key == rank.current.key]
        if not self.rule("step of no run"):
            found = [key if key.number >= 0 else no_run(0) for key in found]
        if not self.rule("whole keys compared"):
            found = [Key(0, key.number, key.step, ()) for key in found]
        return found

    def is_apart(self, version: Version) -> bool:
        """Whether the run is seen to be at another step than its record: then it is of no
        generation."""
        differs = version.key.number >= 0 and version.content.step != version.key.step
        return differs and self.rule("run is at the record's step")

    def newest_common(self, ranks: tuple[Rank, ...]) -> Key | None:
        """The newest key that all can produce; None: the job is refused."""
        if self.rule("store of this rank") and not all(rank.mine for rank in ranks):
            return None
        if any(self.is_apart(rank.current) for rank in ranks):
            return None
        claims = [self.keys(rank) for rank in ranks]
        if not self.rule("that all can produce"):
            return max(key for keys in claims for key in keys)
        common = set(claims[0]).intersection(*claims[1:])
        if not self.rule("newest of them"):
            return min(common, key=lambda key: (key.number, key.term), default=None)
        return max(common, key=lambda key: (key.number, key.term), default=None)

    # ---- all moves

    def moves(self, state: State) -> Iterator[Move]:
        yield from self.start(state)
        for i, rank in enumerate(state.ranks):
            for label, new, changes in self.move(state, i, rank):
                ranks = (*state.ranks[:i], new, *state.ranks[i + 1 :])
                yield f"{i}: {label}", state._replace(ranks=ranks, **changes)

    def faults(self, state: State) -> Iterator[Move]:
        """Deaths, but in the last attempt, where a death is no more than a rank that makes no
        further move; signals; what people do while no process runs."""
        last = state.attempt == self.world.attempts
        for i, rank in enumerate(state.ranks):
            found = list(self.signal(state, rank))
            if not last and rank.alive:
                found.append(("dies", rank.dead(), {}))
            if not last and not any(other.alive for other in state.ranks):
                found += self.by_hand(state, i, rank)
            for label, new, changes in found:
                ranks = (*state.ranks[:i], new, *state.ranks[i + 1 :])
                yield f"{i}: {label}", state._replace(ranks=ranks, **changes)
        if state.edits and not last and not any(rank.alive for rank in state.ranks):
            yield "the program is edited", state._replace(edits=state.edits - 1, edited=True)
        if self.world.branch and state.copies and not any(rank.alive for rank in state.ranks):
            copied = [rank._replace(copy=(rank.current, rank.held)) for rank in state.ranks]
            yield "all are copied", state._replace(ranks=tuple(copied), copies=state.copies - 1)

    def start(self, state: State) -> Iterator[Move]:
        """All ranks are started, open their stores and gather what each can produce. (A rank that
        starts before others have died waits for them, and changes nothing.)"""
        ranks = state.ranks
        if state.attempt == self.world.attempts:
            return
        if any(rank.alive for rank in ranks):
            return
        if all(rank.at == "done" for rank in ranks) and not (state.tampered or self.world.acts):
            return
        target = self.newest_common(ranks)
        if target is None:
            return  # refused; `check_durable` says whether that was right
        newest = max(0, *(rank.current.key.term for rank in ranks))
        raised = newest + 1 if self.rule("term is raised") else max(newest, 1)
        at = "go back" if self.rule("told before any commit") else "let go early"
        yield (
            "all start, tell and gather",
            state._replace(
                ranks=tuple(rank.dead()._replace(at=at, posts=()) for rank in ranks),
                attempt=state.attempt + 1,
                target=target,
                term=raised,
            ),
        )

    # ---- one rank

    def move(self, state: State, i: int, rank: Rank) -> Steps:
        if rank.alive:
            yield from getattr(self, "at_" + rank.at.replace(" ", "_"))(state, i, rank)
        if rank.landing is not None:
            landed = self.committed(rank, rank.landing)._replace(landing=None)
            yield "its commit lands", landed, self.reached(state, rank.landing)

    def reached(self, state: State, version: Version) -> dict[str, object]:
        """Ghosts, after a commit."""
        changes: dict[str, object] = {}
        if version.key.number > state.newest:
            changes["newest"] = version.key.number
        if not self.rule("acknowledged by the ticket"):
            changes["acknowledged"] = max(state.acknowledged, version.key.number)
        return changes

    def committed(self, rank: Rank, version: Version) -> Rank:
        held = rank.current if self.rule("commit holds the version before") else None
        return rank._replace(current=version, held=held)

    # ---- joining, in attach

    def at_let_go_early(self, state: State, i: int, rank: Rank) -> Steps:
        """Mutant: a commit before the gather."""
        yield "commits before the gather", rank._replace(at="go back", held=None), {}

    def at_go_back(self, state: State, i: int, rank: Rank) -> Steps:
        """A rank that is ahead goes back, in one transaction."""
        keys = self.keys(rank)
        ahead = keys[0] != state.target and state.target in keys[1:]
        if ahead and self.rule("those ahead go back"):
            assert rank.held is not None
            yield "goes back", rank._replace(current=rank.held, held=None, at="allow"), {}
        else:
            yield "stays", rank._replace(at="allow"), {}

    def at_allow(self, state: State, i: int, rank: Rank) -> Steps:
        """Allowed, as all can produce the target; the commit lets the held version go first."""
        yield "lets go", rank._replace(held=None, at="begin term"), {}

    def at_begin_term(self, state: State, i: int, rank: Rank) -> Steps:
        """The commit that begins the term, with what an edited program asks for."""
        old = rank.current
        joined = rank._replace(step=old.key.step, at="barrier")
        content = old.content if old.content != NOTHING else Content(state.attempt)
        if state.edited and not content.adapted:
            content = content._replace(adapted=state.attempt)
        if old.key.number < 0 or self.rule("joining makes a generation"):
            new = Version(self.key(joined, state, old.key.number + 1), old.key, content)
        else:
            new = Version(old.key, old.key, content)
        joined = self.committed(joined, new)
        joined = joined._replace(posts=(Post(-1, 0, "joined", (), 0, False),))
        yield "commits the term", joined, self.reached(state, new)

    def at_barrier(self, state: State, i: int, rank: Rank) -> Steps:
        if self.rule("barrier") and not all(other.posts for other in state.ranks):
            return
        for other in state.ranks:
            if not other.posts:
                raise Violation("a rank trains before all have joined")
            if other.at == "barrier" and other.current.content != rank.current.content:
                raise Violation("ranks resume different contents")
            if not other.mine:
                raise Violation("a rank resumes the store of another one")
        if not state.tampered and rank.current.key.number < state.acknowledged:
            raise Violation("an acknowledged generation is lost")
        ready = rank._replace(at="ask", taken=1)
        newest = max(other.current.key.number for other in state.ranks)
        known = max(state.acknowledged, rank.current.key.number)
        yield "passes the barrier", ready, {"newest": newest, "acknowledged": known}

    # ---- steps

    def at_ask(self, state: State, i: int, rank: Rank) -> Steps:
        """A meeting without a commit; the joining is one."""
        asking = rank._replace(due=self.mark(rank, state.attempt))
        yield from self.begin_ticket(state, i, asking, "train", rank.current, "ask")

    def at_train(self, state: State, i: int, rank: Rank) -> Steps:
        w = self.world
        if state.halves:
            half = rank._replace(half=True, at="leave")
            yield "leaves in a step", half, {"halves": state.halves - 1, "strayed": True}
        if rank.step >= w.steps or (rank.stops and rank.ended >= rank.meeting):
            yield "leaves the loop", rank._replace(at="leave"), {}
            return
        if rank.told and not self.rule("all stop at the same step"):
            yield "stops alone", rank._replace(at="leave"), {}
        trained = rank._replace(step=rank.step + 1, updates=rank.updates + 1)
        yield "trains", trained._replace(at="end"), {}
        if state.strays:
            stray: dict[str, object] = {"strays": state.strays - 1, "strayed": True}
            yield "leaves run.commit() out", trained._replace(step=rank.step), stray
            if rank.landing is None:
                again = rank._replace(
                    step=rank.current.key.step, rollbacks=(*rank.rollbacks, rank.updates), void=True
                )
                yield "rolls back", self.softened(again), stray

    def softened(self, rank: Rank) -> Rank:
        """The step to be committed at the meeting is another now: they only ask again."""
        every = self.world.wishes == (2,)
        return rank._replace(commits=False) if rank.void and not (every or rank.stops) else rank

    def at_end(self, state: State, i: int, rank: Rank) -> Steps:
        """`run.commit`: the ticket under way is waited for, then what was agreed on is done."""
        yield from self.settle(state, i, rank, "end")
        if self.settled(rank) or (not self.rule("wait for the ticket") and rank.due is None):
            ended = rank._replace(ended=rank.ended + 1)
            if ended.ended < ended.meeting:
                yield "no meeting", ended._replace(at="train"), {}
            elif not ended.commits:
                yield "asks", ended._replace(at="ask"), {}
            elif self.rule("ticket after the commit"):
                yield "lets go", ended._replace(held=None, at="commit"), {}
            else:
                due = ended._replace(held=None, due=self.mark(rank, state.attempt))
                new = self.next(state, rank)
                yield from self.begin_ticket(state, i, due, "commit", new, "commit")

    def settled(self, rank: Rank) -> bool:
        return rank.due is None and rank.taken == len(rank.posts) and rank.landing is None

    def at_commit(self, state: State, i: int, rank: Rank) -> Steps:
        new = self.next(state, rank)
        due = self.mark(rank, state.attempt)
        if not self.world.wait:
            yield "begins a commit", rank._replace(landing=new, due=due, at="train"), {}
            return
        done = self.committed(rank, new)
        if self.rule("ticket after the commit"):
            yield "commits", done._replace(at="ticket", due=due), self.reached(state, new)
        else:
            yield "commits", done._replace(at="train"), self.reached(state, new)

    def next(self, state: State, rank: Rank) -> Version:
        key = self.key(rank, state, rank.current.key.number + 1)
        content = rank.current.content
        if rank.updates:
            trained = Content(state.attempt, rank.step, rank.updates, rank.rollbacks)
            content = trained._replace(adapted=content.adapted)
        return Version(key, rank.current.key, content)

    def at_ticket(self, state: State, i: int, rank: Rank) -> Steps:
        yield from self.begin_ticket(state, i, rank, "train", rank.current, "commit")

    def begin_ticket(
        self, state: State, i: int, rank: Rank, at: str, version: Version, kind: str
    ) -> Steps:
        """Starts a ticket."""
        assert rank.due is not None
        step = version.key.step if kind in ("commit", "final") else rank.step
        for wish in self.world.wishes if kind in ("commit", "ask") else (2,):
            told = rank.told and self.rule("all stop at the same step")
            post = Post(version.key.number, step, kind, rank.due, wish, told, rank.half)
            posted = rank._replace(posts=(*rank.posts, post), at=at, due=None, void=False)
            changes: dict[str, object] = {}
            n = len(rank.posts)
            given = [o.posts[n] for j, o in enumerate(state.ranks) if j != i and len(o.posts) > n]
            if len(given) == len(state.ranks) - 1 and all(map(post.agrees, given)):
                changes["acknowledged"] = max(state.acknowledged, post.number)
            yield f"starts ticket {n} with {post}", posted, changes

    def settle(self, state: State, i: int, rank: Rank, at: str) -> Steps:
        """The ticket that is due is started, and the one under way waited for. A rank that waits in
        vain raises PeerLostError: as if it died."""
        if rank.due is not None:  # of a commit that was not waited for
            if rank.landing is None or not self.rule("ticket after a pending commit"):
                version = rank.landing or rank.current
                yield from self.begin_ticket(state, i, rank, at, version, "commit")
            return
        n = rank.taken
        if n == len(rank.posts):
            return
        given = [o.posts[n] for o in state.ranks if len(o.posts) > n]
        if len(given) < len(state.ranks):
            if not self.rule("a lost peer ends it") and any(o.at == "down" for o in state.ranks):
                alone = rank._replace(taken=n + 1, at=at, meeting=0, commits=True)
                yield "goes on without a peer", alone, {}
            return
        if self.rule("alike fields compared") and not all(map(given[0].agrees, given)):
            if not state.strayed:
                raise Violation(f"ranks differ, which did nothing wrong: {given}")
            yield "finds that ranks differ", rank.dead(), {}
            return
        yield f"ticket {n} has completed", self.heard(rank, given)._replace(at=at), {}

    def heard(self, rank: Rank, given: list[Post]) -> Rank:
        """What all have agreed on."""
        n = rank.taken
        wish = min(p.wish for p in given) if self.rule("least wish") else rank.posts[n].wish
        stop = any(p.stop for p in given)
        half = any(p.half for p in given) if self.rule("all leave alike") else rank.half
        agreed = rank._replace(
            taken=n + 1,
            meeting=rank.ended + (1 if stop else wish // 2),
            commits=stop or wish % 2 == 0,
            stops=stop,
            half=half,
        )
        return self.softened(agreed)

    # ---- leaving `with`

    def at_leave(self, state: State, i: int, rank: Rank) -> Steps:
        """Ranks say first that they leave, and whether in the middle of a step."""
        yield from self.settle(state, i, rank, "leave")
        if self.settled(rank):
            leaving = rank._replace(due=self.mark(rank, state.attempt))
            yield from self.begin_ticket(state, i, leaving, "leaving", rank.current, "leaving")

    def at_leaving(self, state: State, i: int, rank: Rank) -> Steps:
        yield from self.settle(state, i, rank, "leaving")
        if self.settled(rank) and rank.half:
            yield "leaves, held", rank.dead()._replace(at="done"), {}
        elif self.settled(rank):
            yield "lets go", rank._replace(held=None, at="final commit"), {}

    def at_final_commit(self, state: State, i: int, rank: Rank) -> Steps:
        new = self.next(state, rank)
        yield (
            "makes the last commit",
            self.committed(rank, new)._replace(
                at="final ticket", due=self.mark(rank, state.attempt)
            ),
            self.reached(state, new),
        )

    def at_final_ticket(self, state: State, i: int, rank: Rank) -> Steps:
        yield from self.begin_ticket(state, i, rank, "release", rank.current, "final")

    def at_release(self, state: State, i: int, rank: Rank) -> Steps:
        done = rank.dead()._replace(at="done", held=None)
        if not self.rule("last ticket before the release"):
            yield "releases", done, {}
            return
        yield from self.settle(state, i, rank, "release")
        if self.settled(rank):
            yield "releases", done, {}

    # ---- what goes wrong

    def signal(self, state: State, rank: Rank) -> Steps:
        if state.signals and rank.alive:
            yield "is told to stop", rank._replace(told=True), {"signals": state.signals - 1}
        if state.copies and rank.copy is None and not self.world.branch:
            copied = rank._replace(copy=(rank.current, rank.held))
            yield "its store is copied", copied, {"copies": state.copies - 1}

    def by_hand(self, state: State, i: int, rank: Rank) -> Steps:
        """What people do to files, or with a store opened alone."""
        if not state.acts:
            return
        acts = self.world.acts
        by_hand: dict[str, object] = {"acts": state.acts - 1, "tampered": True}
        if "exchange" in acts and rank.copy is not None:
            current, held = rank.copy
            back = rank._replace(current=current, held=held, copy=(rank.current, rank.held))
            yield "its store and the copy are exchanged", back, by_hand
        if "lose" in acts:
            empty = rank._replace(current=Version(no_run(0), None, NOTHING), held=None)
            yield "its store is lost", empty, by_hand
        for j, other in enumerate(state.ranks):
            if "swap" in acts and i != j and rank.mine and other.mine:
                foreign = rank._replace(current=other.current, held=other.held, mine=False)
                yield f"gets a copy of the store of {j}", foreign, by_hand
        if "resolve" in acts and rank.held is not None:
            yield "resolve --keep", rank._replace(held=None), by_hand
            yield "resolve --back", rank._replace(current=rank.held, held=None), by_hand
        if "note" in acts and rank.held is not None and not self.rule("in doubt after an open"):
            noted = rank._replace(held=None)
            yield "opened alone, another commit", noted, {"acts": state.acts - 1}
        if "alone" in acts and rank.held is None:
            old = rank.current
            step = old.key.step + 1
            # without a record of a job there is none to remove: the run itself tells its step
            leaves = self.rule("training alone leaves the job") or old.key.number < 0
            key = no_run(step) if leaves else old.key
            content = old.content._replace(alone=old.content.alone + 1, step=step)
            alone = rank._replace(current=Version(key, None, content))
            yield "trained alone", alone, by_hand

    # ---- what must hold

    def check(self, state: State) -> None:
        """Raises: Violation."""
        known: dict[Key, Content] = {}
        for rank in state.ranks:
            versions = [rank.current, rank.held, *(rank.copy or ())]
            for version in versions:
                if version is None or version.key.number < 0 or self.is_apart(version):
                    continue
                if known.setdefault(version.key, version.content) != version.content:
                    raise Violation(f"two contents have the key {version.key}")
        self.check_durable(state)
        over = all(rank.at == "done" for rank in state.ranks) and not state.tampered
        if over and len({rank.current.content for rank in state.ranks}) > 1:
            raise Violation("the ranks ended apart")

    def check_durable(self, state: State) -> None:
        """If all died now, and were started again."""
        if state.tampered:
            return
        target = self.newest_common(state.ranks)
        if target is None:
            raise Violation("no generation that all can produce")
        if target.number < state.acknowledged:
            raise Violation("an acknowledged generation is lost")
        if target.number < state.newest - 1:
            raise Violation("more than one generation is lost")

    def check_stuck(self, state: State, moved: bool) -> None:
        at = {rank.at for rank in state.ranks}
        if not moved and "down" not in at and at != {"done"}:
            raise Violation("stuck")
