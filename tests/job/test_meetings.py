"""When ranks of a job meet: what they agree on, whatever each of them wants."""

from __future__ import annotations

import random

import pytest

from pmstore.job.meetings import BUSY, FAR, Meeting, Meetings, Wants, agreed, decode


def least(wants: list[Wants]) -> Wants:
    return decode([min(numbers) for numbers in zip(*(one.encode() for one in wants), strict=True)])


@pytest.mark.parametrize(
    ("wants", "meeting"),
    [
        ([Wants(7, True), Wants(9, True)], Meeting(107, True)),
        ([Wants(7, False), Wants(9, True)], Meeting(107, False)),
        ([Wants(7, False), Wants(7, True)], Meeting(107, True)),
        ([Wants(7, False), Wants(7, False, stop=True)], Meeting(101, True, stop=True)),
        # tiers
        ([Wants(7, True, tiers=(FAR, FAR))] * 2, Meeting(107, True)),
        ([Wants(7, True, tiers=(5, FAR)), Wants(9, True, tiers=(9, FAR))], Meeting(105, True, 1)),
        ([Wants(7, True, tiers=(FAR, 7)), Wants(9, True, tiers=(7, FAR))], Meeting(107, True, 2)),
        ([Wants(4, True, tiers=(FAR, 7)), Wants(9, True, tiers=(5, FAR))], Meeting(104, True)),
        # the first has no room for what the second wants, which asks again
        (
            [Wants(7, True, tiers=(BUSY,)), Wants(5, False, tiers=(5,))],
            Meeting(105, False, busy=frozenset({1})),
        ),
        (
            [Wants(1, True, stop=True, tiers=(1, FAR)), Wants(5, False, tiers=(5, BUSY))],
            Meeting(101, True, 1, True, frozenset({2})),
        ),
    ],
)
def test_what_ranks_make_of_their_wishes(wants: list[Wants], meeting: Meeting) -> None:
    assert agreed(100, least(wants)) == agreed(100, least(wants[::-1])) == meeting


@pytest.mark.parametrize("seed", range(30))
def test_all_ranks_do_the_same_at_the_same_steps(seed: int) -> None:
    """Random wishes; roll backs and calls for a commit, at all ranks together."""
    chance = random.Random(seed)
    world, tiers = chance.randint(1, 4), chance.randint(0, 3)
    every = seed % 5 == 0
    busy = [[False] * tiers for _ in range(world)]
    asked: list[list[Wants]] = [[] for _ in range(world)]

    def wants(rank: int, limit: int, avoid: frozenset[int]) -> Wants:
        steps = 1 if every else chance.randint(1, min(limit, 20))
        told = tuple(BUSY if one else chance.choice((steps, FAR)) for one in busy[rank])
        made = Wants(steps, every or chance.random() < 0.5, chance.random() < 0.002, told)
        asked[rank].append(made)
        return made

    ranks = [
        Meetings(lambda limit, avoid, rank=rank: wants(rank, limit, avoid), every)  # type: ignore[misc]
        for rank in range(world)
    ]

    def meet() -> list[int]:
        told = [rank.wish(ask=True).encode() for rank in ranks]
        assert len({rank.told() for rank in ranks}) == 1
        return [min(numbers) for numbers in zip(*told, strict=True)]

    assert all(rank.asking for rank in ranks)
    flying: list[int] | None = meet()
    began = 0
    for step in range(1, 1500):
        if flying is not None:
            for rank in ranks:
                rank.heard(began, flying)
            assert not any(rank.asking for rank in ranks)
            flying = None
        if chance.random() < 0.02:
            for rank in ranks:
                rank.rolled_back()
        call = chance.random() < 0.02
        done = [rank.end_step(call) for rank in ranks]
        assert all(one == done[0] for one in done)
        meeting = done[0]
        assert step - began <= 20
        if call or every:
            assert meeting is not None
            assert meeting.commit
        if meeting is not None:
            assert meeting.at == step
            last = [one[-1] for one in asked]
            for number in range(1, tiers + 1):
                full = any(one.tiers[number - 1] == BUSY for one in last)
                assert full == (number in meeting.busy)
                assert not (full and meeting.target == number)
            if meeting.stop:
                assert any(one.stop for one in last)
            busy = [[chance.random() < 0.2 for _ in range(tiers)] for _ in range(world)]
            flying, began = meet(), step
        elif any(one[-1].stop for one in asked):
            pytest.fail("a rank was told to stop, and the others went on")


def test_a_meeting_that_failed_is_made_up_for() -> None:
    meetings = Meetings(lambda limit, busy: Wants(3, True), every=False)
    meetings.told()
    meetings.heard(0, Wants(2, True).encode())
    assert meetings.end_step(False) is None
    assert meetings.end_step(False) == Meeting(2, True)  # the commit fails, and has no ticket
    assert meetings.end_step(False) == Meeting(2, True)
    meetings.rolled_back()
    assert meetings.end_step(False) == Meeting(2, False)
    assert meetings.asking
    assert meetings.told() == 4
    meetings.heard(4, meetings.wish(ask=True).encode())
    assert meetings.next == Meeting(7, True)


def test_nobody_looks_further_ahead_than_back() -> None:
    limits = []

    def wants(limit: int, busy: frozenset[int]) -> Wants:
        limits.append(limit)
        return Wants(limit, False)

    meetings = Meetings(wants, every=False)
    for step in range(40):
        if step:
            meetings.end_step(False)
        if meetings.asking:
            wish = meetings.wish(ask=True).encode()
            meetings.heard(meetings.told(), wish)
    assert limits == [1, 1, 2, 4, 8, 16, 32]


def test_a_roll_back_voids_what_was_wanted_before_it() -> None:
    """Also where the ticket completes after it. But not every step's commit, nor a stop."""
    for every, stop, commit in ((False, False, False), (True, False, True), (False, True, True)):
        meetings = Meetings(lambda limit, busy: Wants(1, True), every)
        meetings.told()
        meetings.rolled_back()
        meetings.heard(0, Wants(1, True, stop).encode())
        assert meetings.next == Meeting(1, commit, stop=stop)
