"""Jobs whose ranks, stores or groups do not fit: every rank that lives raises, within the timeout,
and nothing was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import pythons

pytest.importorskip("torch", reason="needs torch: pip install 'pmstore[torch]'")

from jobs.server import JobServer
from jobs.trying import SLACK_SECONDS, Outcome, Try
from programs.bits import Bits

TRAINED = 6
"""Steps of the stores that are there."""


@pytest.fixture(scope="module")
def server() -> JobServer:
    return JobServer(forks=pythons.server())


@pytest.fixture
def job(server: JobServer, shm: Path) -> Try:
    return Try(server, shm)


@pytest.fixture(scope="module")
def whole(server: JobServer, tmp_path_factory: pytest.TempPathFactory) -> list[Bits]:
    """What a job of 12 steps trains, if nothing happens."""
    job = Try(server, tmp_path_factory.mktemp("whole"))
    job.right("trains:12")
    found = job.trained()
    assert all(found)
    return found


@pytest.fixture
def trained(job: Try) -> Try:
    assert job.right(f"trains:{TRAINED}") == [0, 0]
    return job


def all_raise(job: Try, case: str, kinds: str, *words: str, alive: int = 2) -> list[Outcome]:
    """Every living rank raises one of these, within the timeout, and says these words (`a|b`: one
    of them). Returns what they got."""
    raised = [one for one in job.run(case) if one is not None]
    assert len(raised) == alive
    for one in raised:
        assert set(kinds.split()) & set(one.kinds), (one.kinds, job.said())
        assert one.seconds < job.timeout + SLACK_SECONDS
        for word in words:
            assert any(each in one.said for each in word.split("|")), (word, one.said)
    return raised


def refused(job: Try, case: str, kinds: str, *words: str) -> None:
    """And nothing was written; after that, what was right goes on."""
    before = job.content()
    all_raise(job, case, kinds, *words)
    assert job.content() == before


# ---- groups


def test_the_group_is_not_initialised(trained: Try) -> None:
    refused(trained, "not_initialised", "ValueError AttachError", "init_process_group")
    assert trained.right("trains:8") == [TRAINED, TRAINED]


def test_torch_has_no_gloo(trained: Try) -> None:
    refused(trained, "without_gloo", "ValueError AttachError", "gloo")


def test_a_rank_is_not_in_the_group(job: Try) -> None:
    first, second = job.run("not_in_the_group")
    assert first is not None
    assert second is not None
    assert not first.kinds
    assert {"ValueError", "TypeError"} & set(second.kinds)
    assert "group" in second.said


@pytest.mark.parametrize("case", ["no_group", "bad_timeout"])
def test_arguments_of_no_use(job: Try, case: str) -> None:
    refused(job, case, "ValueError TypeError", "process_group|timeout")
    assert job.content() == [{}, {}]


# ---- ranks that are not alike


OTHERS = {
    "other_models": "0.weight",
    "other_optimizers": "optimizer|SGD",
    "native_at_one": "pmstore.torch.optim|first commit|optimizer",
    "other_policies": "policy|EveryN",
    "policy_at_one": "policy|EverySeconds",
    "other_versions": "version|0.0.1",
    "other_formats": "format|version",
    "other_names": "name|run-1",
    "mirror_at_one": "mirror",
}


@pytest.mark.parametrize("case", OTHERS)
def test_ranks_differ_in_a_new_job(job: Try, case: str) -> None:
    refused(job, case, "MismatchError", "rank 0|rank 1", OTHERS[case])
    assert job.content() == [{}, {}]


@pytest.mark.parametrize("case", [*sorted(OTHERS.keys() - {"other_names"}), "other_rates"])
def test_ranks_differ_in_a_job_that_goes_on(trained: Try, case: str) -> None:
    kinds = "MismatchError ChangedError FormatVersionError AttachError"
    refused(trained, case, kinds, "rank 0|rank 1", OTHERS.get(case, "groups, 0, lr: rank 0: "))
    assert trained.right("trains:8") == [TRAINED, TRAINED]


# ---- stores that do not belong together


def test_stores_of_two_jobs(trained: Try) -> None:
    ours = trained.copies("ours")
    for rank in range(2):
        trained.store(rank).unlink()
    trained.right(f"trains:{TRAINED}")
    trained.put(0, ours[0])
    refused(trained, "trains:12", "MixedStoresError", "rank 0", "rank 1", "job")
    trained.put(1, ours[1])
    assert trained.right("trains:8") == [TRAINED, TRAINED]


def test_a_copy_of_one_store_at_two_ranks(trained: Try) -> None:
    ours = trained.copies("ours")
    trained.put(1, ours[0])
    refused(trained, "trains:12", "MixedStoresError", "rank 0", "rank 1", "cop", "give")
    trained.put(1, ours[1])
    assert trained.right("trains:8") == [TRAINED, TRAINED]


def test_swapped_stores(trained: Try) -> None:
    ours = trained.copies("ours")
    trained.put(0, ours[1])
    trained.put(1, ours[0])
    refused(trained, "trains:12", "MixedStoresError", "rank 0", "rank 1", "give")


@pytest.mark.parametrize("rank", [0, 1])
def test_generations_more_than_one_apart(trained: Try, rank: int) -> None:
    old = trained.copies("old")
    trained.right("trains:9")
    new = trained.copies("new")
    trained.put(rank, old[rank])
    words = (f"step {TRAINED}", "step 9", "rank 0", "rank 1")
    refused(trained, "trains:12", "MixedStoresError", *words)
    for one, copy in enumerate(old):  # what it says may be done
        trained.put(one, copy)
    assert trained.right("trains:8") == [TRAINED, TRAINED]
    for one, copy in enumerate(new):
        trained.put(one, copy)
    assert trained.right("trains:12") == [9, 9]


def test_one_history_at_each_rank(trained: Try) -> None:
    """Old copies of all stores were put back once, and the job went on from there; then one rank
    gets the store that it had before. Numbers and steps are equal, what they mean is not."""
    old = trained.copies("old")
    trained.right("trains:10")
    before = trained.copies("before")
    for rank in range(2):
        trained.put(rank, old[rank])
    trained.right("trains:10")
    trained.put(1, before[1])
    refused(trained, "trains:12", "MixedStoresError", "rank 0", "rank 1", "step 10")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_store(trained: Try, rank: int) -> None:
    trained.store(rank).unlink()
    before = trained.content()
    all_raise(trained, "trains:12", "MixedStoresError", "rank 0", "rank 1", f"step {TRAINED}")
    assert trained.content() == before
    assert not before[rank]


def test_a_damaged_store(trained: Try) -> None:
    with trained.store(1).open("r+b") as file:
        file.truncate(5000)
    trained.timeout = 4  # which the other rank waits for it
    kinds = "CorruptStoreError MismatchError MixedStoresError PeerLostError"
    all_raise(trained, "trains:12", kinds, "rank 1|run1.pm")


def test_fewer_ranks_than_before(trained: Try, server: JobServer) -> None:
    trained.right("trains:7")
    fewer = Try(server, trained.folder, world=1)
    kinds = "MixedStoresError MismatchError"
    all_raise(fewer, "trains:12", kinds, "2 ranks", "1", alive=1)


def test_more_ranks_than_before(trained: Try, server: JobServer) -> None:
    more = Try(server, trained.folder, world=3)
    before = more.content()
    kinds = "MixedStoresError MismatchError"
    all_raise(more, "trains:12", kinds, "2 ranks|rank 2", alive=3)
    assert more.content() == before


def test_stores_that_were_trained_alone(job: Try) -> None:
    """The job takes in runs that were made without one, if they are at the same step."""
    job.right("trains_alone:4")
    refused(
        job, "trains:12", "MixedStoresError MismatchError", "rank 0", "rank 1", "step 4", "step 5"
    )


def test_a_store_that_was_trained_alone_meanwhile(trained: Try, server: JobServer) -> None:
    """A rank's program without process_group goes on with the store: refused, or refused later."""
    ours = trained.copies("ours")
    alone = Try(server, trained.folder, world=1)
    outcome = alone.run("trains_alone:9")[0]
    assert outcome is not None
    if not outcome.kinds:
        refused(trained, "trains:12", "MixedStoresError", "rank 0", "rank 1")
    trained.put(0, ours[0])
    assert trained.right("trains:8") == [TRAINED, TRAINED]


# ---- ranks that do not do the same


@pytest.mark.parametrize("case", ["rollback_at_one", "commits_at_one"])
def test_one_rank_does_something_else(job: Try, case: str, whole: list[Bits]) -> None:
    """Nothing of what is not alike counts: the job goes on from before."""
    all_raise(job, case, "MixedStoresError MismatchError", "rank 0", "rank 1")
    joined = job.right("trains:12")
    assert joined[0] == joined[1] <= 5
    assert job.trained() == whole


def test_one_rank_ends_early(job: Try) -> None:
    all_raise(job, "ends_early", "MixedStoresError MismatchError PeerLostError", "rank")
    joined = job.right("trains:12")
    assert joined[0] == joined[1] >= 5


@pytest.mark.parametrize("case", ["attach_at_one", "without_a_job_at_one"])
@pytest.mark.parametrize("new", [True, False], ids=["new", "stored"])
def test_only_some_ranks_attach(job: Try, case: str, new: bool) -> None:
    job.timeout = 2
    if not new:
        job.right(f"trains:{TRAINED}")
    before = job.content()[0]
    first = job.run(case)[0]
    assert first is not None
    assert "PeerLostError" in first.kinds, job.said()
    assert first.seconds < job.timeout + SLACK_SECONDS
    assert "rank 1" in first.said
    assert job.content()[0] == before


@pytest.mark.alone  # a rank waits for two seconds
def test_a_rank_comes_late(trained: Try) -> None:
    trained.timeout = 2
    before = trained.content()
    first, second = trained.run("late_to_join")
    assert first is not None
    assert second is not None
    assert "PeerLostError" in first.kinds, trained.said()
    assert first.seconds < trained.timeout + SLACK_SECONDS
    assert "rank 1" in first.said
    assert "PeerLostError" in second.kinds, trained.said()
    assert trained.content() == before
    assert trained.right("trains:8") == [TRAINED, TRAINED]


@pytest.mark.parametrize(
    ("case", "others"),
    [
        ("dies_in_a_step", None),
        ("raises_in_a_step", "KeyError"),
        # a rank waits for two seconds
        pytest.param("late_in_a_step", "PeerLostError", marks=pytest.mark.alone),
    ],
)
def test_a_rank_is_lost_in_a_step(
    job: Try, case: str, others: str | None, whole: list[Bits]
) -> None:
    """The other stays at its last commit, which it holds."""
    job.timeout = 2 if case == "late_in_a_step" else job.timeout
    first, second = job.run(case)
    assert first is not None
    assert "PeerLostError" in first.kinds, job.said()
    assert first.seconds < 2 * job.timeout + SLACK_SECONDS
    assert "rank 1" in first.said
    if case == "late_in_a_step":  # so does a rank that never calls commit
        assert "did not commit, roll back or end as this rank did" in first.said
    assert (second is None) if others is None else (second is not None and others in second.kinds)
    reached = max(job.steps(0))
    joined = job.right("trains:12")
    assert joined[0] == joined[1] >= reached - 1
    assert job.trained() == whole


def test_one_rank_waits_for_agreement(job: Try) -> None:
    """That is its own affair."""
    assert job.right("agrees_alone") == [0, 0]


@pytest.mark.parametrize(
    ("case", "instead"),
    [
        ("commits_the_store", "run.commit"),
        ("transaction_of_the_store", "run.commit"),
        ("rewinds", "process_group"),
    ],
)
def test_what_a_job_does_not_do(job: Try, case: str, instead: str, whole: list[Bits]) -> None:
    for one in all_raise(job, case, "TransactionError", instead):
        assert "resolve" not in one.said  # that is for a job that will not go on
    assert job.right("trains:12") == [5, 5]
    assert job.trained() == whole
