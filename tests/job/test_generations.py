"""Which generation all ranks can produce, and what is said where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pmstore.objects.generations import (
    NO_RUN,
    Key,
    Member,
    Record,
    decode,
    encode,
    explain,
    newest_common,
    without_job,
)

JOB, OTHER = (2**63 - 1, -5), (7, 7)


def record(rank: int, generations: int = 0, *, term: int = 1, world: int = 2) -> Record:
    made = Record(Key(JOB, term, 0, 0), rank, world, 99, NO_RUN)
    for step in range(1, generations + 1):
        made = made.following(step)
    return made


def member(one: Record, *, held: bool = True, **other: object) -> Member:
    fields: dict[str, object] = {
        "uuid": f"uuid{one.rank}",
        "run_step": one.key.step,
        "rank": one.rank,
        "world": one.world,
    }
    return Member(one, held=held, **{**fields, **other})  # type: ignore[arg-type]


def bare(rank: int, step: int | None) -> Member:
    return Member(None, f"uuid{rank}", False, step, rank, 2)


def told(*members: Member) -> str:
    assert newest_common(members) is None
    return "\n".join(explain(members))


@pytest.mark.parametrize(
    "one",
    [
        record(0),
        record(1, 3),
        record(1, 3).joined(9, 77),
        record(1, 3).joined(9, 77).following(4, 78),
        replace(record(0), previous=without_job(0)),
    ],
)
def test_a_record_comes_back(one: Record) -> None:
    assert decode(encode(one)) == one
    assert len(encode(one)) == 16
    assert encode(one)[:10] == [
        *(1, *JOB, one.key.mark, one.key.term, one.key.number, one.key.step),
        *(one.rank, one.world, 99),
    ]


@pytest.mark.parametrize("place", range(16))
def test_a_record_that_no_job_wrote_is_refused(place: int) -> None:
    if place in (1, 2, 9):  # random, and a digest
        return
    numbers = encode(record(1, 3))
    for number in (-7, 1000):
        if number == 1000 and place in (3, 4, 6, 8, 13):  # later, larger
            continue
        wrong = [*numbers[:place], number, *numbers[place + 1 :]]
        with pytest.raises(ValueError, match="record"):
            decode(wrong)
    with pytest.raises(ValueError, match="15"):
        decode(numbers[:15])


def test_ranks_at_the_same_generation_stay_there() -> None:
    members = [member(record(rank, 5)) for rank in range(2)]
    assert newest_common(members) == Key(JOB, 1, 5, 5)
    assert explain(members) == []


def test_those_ahead_go_back_if_they_can() -> None:
    ahead, behind = record(0, 6), record(1, 5)
    assert newest_common([member(ahead), member(behind)]) == behind.key
    assert newest_common([member(ahead), member(behind, held=False)]) == behind.key
    assert "rank 0 can produce generation 6 (step 6, term 1)" in told(
        member(ahead, held=False), member(behind)
    )


def test_generations_more_than_one_apart_have_none_in_common() -> None:
    text = told(member(record(0, 7)), member(record(1, 5)))
    assert "different generations" in text
    assert "rank 0 can produce generation 7 (step 7, term 1) and generation 6 (step 6" in text
    assert "rank 1 can produce generation 5 (step 5, term 1) and generation 4" in text


def test_equal_numbers_of_different_terms_are_not_the_same() -> None:
    one = record(0, 5).joined(2)
    other = record(1, 6)
    assert newest_common([member(one), member(other)]) == Key(JOB, 1, 5, 5)
    text = told(member(one.following(7)), member(other, held=False))
    assert "generation 6 of terms 1, 2 is not the same one" in text


def test_the_same_step_with_another_past_is_not_the_same() -> None:
    one = record(0, 5)
    other = replace(record(1, 5), key=replace(record(1, 5).key, mark=8))
    assert newest_common([member(one), member(other)]) == Key(JOB, 1, 4, 4)
    assert "rolled back alone" in told(member(one, held=False), member(other))


def test_a_generation_that_a_joining_made_at_one_rank_only_is_gone_back_from() -> None:
    here, there = record(0, 5).joined(4, 7), record(1, 5)
    assert newest_common([member(here), member(there)]) == there.key
    assert newest_common([member(here), member(record(1, 5).joined(4, 7))]) == here.key
    assert newest_common([member(here), member(record(1, 5).joined(4, 8))]) == there.key
    assert newest_common([member(here), member(record(1, 4))]) is None


def test_no_run_yet() -> None:
    assert newest_common([bare(0, None), bare(1, None)]) == NO_RUN
    # killed between the first commits of a job
    assert newest_common([member(record(0)), bare(1, None)]) == NO_RUN
    assert newest_common([bare(0, None), member(record(1))]) == NO_RUN
    text = told(member(record(0), held=False), bare(1, None))
    assert "rank 1 has no generation of the job" in text
    assert "rank 1 can produce no run" in text
    told(member(record(0, 1)), bare(1, None))


def test_runs_without_a_job_have_to_be_at_one_step() -> None:
    assert newest_common([bare(0, 8), bare(1, 8)]) == without_job(8)
    assert "different steps" in told(bare(0, 8), bare(1, 9))
    assert "step 9 of a run without a job" in told(bare(0, 8), bare(1, 9))
    told(bare(0, None), bare(1, 0))
    # one was taken in, the other not yet
    taken = Record(Key(JOB, 1, 0, 8), 0, 2, 99, without_job(8))
    assert newest_common([member(taken), bare(1, 8)]) == without_job(8)
    assert newest_common([member(taken), bare(1, None)]) is None


def test_stores_of_other_jobs() -> None:
    stranger = record(1, 5)
    stranger = replace(stranger, key=replace(stranger.key, job=OTHER), previous=NO_RUN)
    text = told(member(record(0, 5)), member(stranger))
    assert "rank 0 of job 7fffffff; rank 1 of job 00000000" in text


def test_starts_that_were_killed_before_all_had_the_first_generation() -> None:
    """Rank 1 made it, rank 0 did not; in the next start rank 0 was quicker to make that one's than
    rank 1 to go back."""
    other = Record(Key(OTHER, 2, 0, 0), 0, 2, 99, NO_RUN)
    members = [member(other), member(record(1))]
    assert newest_common(members) == NO_RUN
    assert explain(members) == []
    assert "different jobs" in told(member(other), member(record(1), held=False))
    assert "different jobs" in told(member(other.following(1)), member(record(1, 1)))


def test_copies_of_one_store() -> None:
    first = member(record(0, 5))
    copy = member(record(0, 5), rank=1)
    assert "rank 0 and rank 1 have copies of one store, that of rank 0" in told(first, copy)
    # copies of a run without a job, each trained on as a rank of its own, are none any more
    members = [member(record(rank, 5), uuid="same") for rank in range(2)]
    assert newest_common(members) == Key(JOB, 1, 5, 5)


def test_exchanged_stores_and_another_world() -> None:
    one, other = member(record(0, 5), rank=1), member(record(1, 5), rank=0)
    assert "rank 1 was given the store of rank 0" in told(one, other)
    smaller = [member(record(rank, 5, world=3), world=2) for rank in range(2)]
    assert "one of 3 ranks, and there are 2 now" in told(*smaller)


def test_a_run_that_was_trained_outside_the_job() -> None:
    text = told(member(record(0, 5)), member(record(1, 5), run_step=8))
    assert "rank 1 was changed outside the job: it is at step 8" in text


def test_stores_that_are_looked_at_without_a_program() -> None:
    def seen(one: Record, name: str, **other: object) -> Member:
        return member(one, rank=None, world=None, name=name, **other)

    assert newest_common([seen(record(0, 5), "a.pm"), seen(record(1, 5), "b.pm")])
    text = told(seen(record(1, 5, world=4), "b.pm"), seen(record(3, 5, world=4), "d.pm"))
    assert "the job has 4 ranks: the stores of 0, 2 are missing" in text
    text = told(seen(record(0, 5), "a.pm"), seen(record(0, 5), "b.pm", uuid="other"))
    assert "rank 0 (a.pm) is not the only store of that rank" in text
    text = told(seen(record(0, 5), "a.pm"), Member(None, "uuid1", False, 3, name="b.pm"))
    assert "b.pm can produce step 3 of a run without a job" in text


def test_of_many_ranks_a_message_names_some() -> None:
    text = told(*(member(record(rank, 5, world=99), world=99, uuid="x") for rank in [0] * 20))
    assert "..." in text.splitlines()[0]
    assert len(text.splitlines()[0]) < 300
