"""A program whose settings are not what they were: refused, or what it chooses is done."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs_changed import cosine, go_on, program, step, steps, train
from training import contents

import pmstore
import pmstore.torch
from pmstore.torch import AttachError, ChangedError, MismatchError, Resume

# what was before, what is now, what the error says
CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "lr": ({}, {"lr": 1e-3}, 'lr of the optimizer, group 0: stored 0.01, given 0.001. Resume(lr="'),
    "weight decay": ({}, {"weight_decay": 0.5}, 'stored 0.01, given 0.5. Resume(weight_decay="'),
    "lr under a scheduler": (
        {"schedule": cosine(10)},
        {"schedule": cosine(10), "lr": 1e-3},
        "lr of the optimizer, group 0: stored 0.01, given 0.001",
    ),
    "lr of one group": ({"groups": 2}, {"groups": 2, "lr": 2e-2}, "group 1: stored 0.001, given"),
    "T_max": (
        {"schedule": cosine(10)},
        {"schedule": cosine(50)},
        'T_max of the lr_scheduler: stored 10, given 50. Resume(lr_scheduler="settings")',
    ),
    "other scheduler": (
        {"schedule": cosine(10)},
        {"schedule": steps(3)},
        "stored 'CosineAnnealingLR', given 'StepLR'. Resume(lr_scheduler=\"program\")",
    ),
    "bigger batches": ({}, {"batch_size": 50}, 'stored 20, given 50. Resume(batch_size="samples")'),
    "smaller batches": ({}, {"batch_size": 10}, "batch_size of the loader: stored 20, given 10"),
    "drop_last": ({}, {"drop_last": True}, "drop_last of the loader: stored False, given True"),
    "data grew": ({}, {"samples": 140}, 'stored 100, given 140. Resume(data="next epoch")'),
    "data shrank": ({}, {"samples": 40}, "length of the data set of the loader: stored 100, given"),
    "other rows": (
        {"split": 1},
        {"split": 2},
        "rows of the data set of the loader: stored '100 that begin with ",
    ),
    "no shuffle": ({}, {"shuffle": False}, "stored 'shuffle=True', given 'shuffle=False'"),
    "SGD": ({}, {"kind": torch.optim.SGD}, "stored 'AdamW', given 'SGD'. Resume(optimizer=\"prog"),
    "Adam": (
        {},
        {"kind": torch.optim.Adam},
        "class of the optimizer: stored 'AdamW', given 'Adam'",
    ),
    "frozen": ({}, {"frozen": ("body.bias",)}, "requires_grad of body.bias: stored True, given F"),
    "thawed": ({"frozen": ("body.bias",)}, {}, 'stored False, given True. Resume(trainable="prog'),
}
PIECES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scheduler added": ({}, {"schedule": cosine(10)}),
    "scheduler removed": ({"schedule": cosine(10)}, {}),
    "loader removed": ({}, {"loader": False}),
    "loader added": ({"loader": False}, {}),
    "stateful added": ({}, {"stateful": {"g": torch.Generator()}}),
    "stateful removed": ({"stateful": {"g": torch.Generator()}}, {}),
}
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "rows": ({"split": 1}, {"split": 1}),
    "seed": ({}, {"seed": 5}),
    "workers": ({}, {"num_workers": 1, "prefetch_factor": 3}),
    "lr as a tensor": ({}, {"lr": torch.tensor(1e-2)}),
    "lr as a number": ({"lr": torch.tensor(1e-2)}, {"lr": 1e-2}),
    "scheduler": ({"schedule": cosine(10)}, {"schedule": cosine(10)}),
}


def begin(path: Path, before: dict[str, Any], most: int = 7) -> dict[str, tuple[str, bytes]]:
    with pmstore.open(path) as store:
        train(store, program(**before), most)
        return contents(store)


def values(given: dict[str, Any]) -> list[Any]:
    optimizer = given["optimizer"]
    found = [tensor.clone() for tensor in given["model"].state_dict().values()]
    return [*found, [dict(group, params=0) for group in optimizer.param_groups]]


@pytest.mark.parametrize("case", CHANGED)
def test_a_change_is_told_and_nothing_is_done(path: Path, case: str) -> None:
    before, now, told = CHANGED[case]
    stored = begin(path, before)
    with pmstore.open(path) as store:
        given = program(**now)
        untouched = values(given)
        with pytest.raises(ChangedError) as caught:
            pmstore.torch.attach(store, **given)
        assert told in str(caught.value)
        assert contents(store) == stored
        assert str(values(given)) == str(untouched)
        assert isinstance(caught.value, MismatchError)
        assert all("Resume(" in sentence for sentence in caught.value.mismatched)
        given = program(**before)
        assert train(store, given, 0)[0].step == 7  # as before


@pytest.mark.parametrize("case", CHANGED)
def test_what_the_error_says_can_be_written(path: Path, case: str) -> None:
    """Each way out that is told works, counts from then on, and may stay in the program."""
    before, now, _ = CHANGED[case]
    begin(path, before)
    with pmstore.open(path) as store, pytest.raises(ChangedError) as caught:
        pmstore.torch.attach(store, **program(**now))
    resume = eval(caught.value.mismatched[0].rpartition(". ")[2].split(" or ")[0])
    with pmstore.open(path) as store:
        run, _ = train(store, program(**now), 1, epochs=9, resume=resume)
        assert run.step == 8
    for again in (resume, None, resume):
        with pmstore.open(path) as store:
            run, _ = train(store, program(**now), 1, epochs=9, resume=again)
            assert run.resumed
    with pmstore.open(path) as store:
        before_attach = store.epoch
        train(store, program(**now), 0, resume=resume)[0].detach()
        assert store.epoch == before_attach  # nothing was written


@pytest.mark.parametrize("case", PIECES)
def test_other_pieces(path: Path, case: str) -> None:
    before, now = PIECES[case]
    stored = begin(path, before)
    with pmstore.open(path) as store:
        with pytest.raises(MismatchError, match=r'Resume\(pieces="program"\)'):
            pmstore.torch.attach(store, **program(**now))
        assert contents(store) == stored
        loops: Any = "program" if case == "loader removed" else None
        resume = Resume(pieces="program", loops=loops)
        run, _ = train(store, program(**now), 2, epochs=9, resume=resume)
        assert run.step == 9
    with pmstore.open(path) as store:
        run, _ = train(store, program(**now), 2, epochs=9)
        assert run.step == 11


@pytest.mark.parametrize("case", SAME)
def test_what_is_no_change(path: Path, case: str) -> None:
    before, now = SAME[case]
    begin(path, before)
    with pmstore.open(path) as store:
        run, _ = train(store, program(**now), 99, epochs=4)
        assert run.step == 20


# ---- false alarms


def test_a_rate_that_the_program_sets_by_hand_is_no_change(path: Path) -> None:
    for _ in range(3):
        with pmstore.open(path) as store:
            given = program()
            run = pmstore.torch.attach(store, **given)
            for _, features in run.batches(epochs=9):
                given["optimizer"].param_groups[0]["lr"] = 1e-2 * 0.9**run.step
                step(given, run, features)
                if run.step % 4 == 3:
                    run.end_step()
                    break


def test_a_rate_that_the_program_reads_back_from_the_store_is_no_change(path: Path) -> None:
    for _ in range(3):
        with pmstore.open(path) as store:
            given = program(lr=store.get("rate", 1e-2))
            run = pmstore.torch.attach(store, **given)
            for _, features in run.batches(epochs=9):
                given["optimizer"].param_groups[0]["lr"] *= 0.9
                store["rate"] = given["optimizer"].param_groups[0]["lr"]
                step(given, run, features)
                if run.step % 4 == 3:
                    run.end_step()
                    break


def test_settings_that_follow_from_the_loader_are_told_with_it(path: Path) -> None:
    def given(batch_size: int) -> dict[str, Any]:
        made = program(batch_size=batch_size)
        length = 10 * len(made["loader"])
        return {**made, "lr_scheduler": cosine(length)(made["optimizer"])}

    with pmstore.open(path) as store:
        train(store, given(20), 7)
    with pmstore.open(path) as store, pytest.raises(ChangedError) as caught:
        pmstore.torch.attach(store, **given(10))
    assert len(caught.value.mismatched) == 2
    with pmstore.open(path) as store:
        resume = Resume(batch_size="samples", lr_scheduler="settings")
        train(store, given(10), 1, epochs=9, resume=resume)


def test_a_run_of_an_earlier_version_gets_its_settings_at_the_next_attach(path: Path) -> None:
    begin(path, {})
    with pmstore.open(path) as store:
        del store["run/given"]
        del store["run/trainable"]
    with pmstore.open(path) as store:
        train(store, program(lr=1e-3), 1)  # nobody knows what it was
    with (
        pmstore.open(path) as store,
        pytest.raises(ChangedError, match=r"stored 0\.001, given 0\.1"),
    ):
        pmstore.torch.attach(store, **program(lr=0.1))


# ---- what was chosen is done


def rate(given: dict[str, Any]) -> float:
    return float(given["optimizer"].param_groups[0]["lr"])


@pytest.mark.parametrize("which", ["program", "store"])
def test_the_rate(path: Path, which: str) -> None:
    begin(path, {})
    with pmstore.open(path) as store:
        given = program(lr=1e-3)
        moments = given["optimizer"]
        run, _ = train(store, given, 0, resume=Resume(lr=which))
        assert rate(given) == {"program": 1e-3, "store": 1e-2}[which]
        assert moments.state[given["model"].body.weight]["step"] == 7
        run.rollback()
        assert rate(given) == {"program": 1e-3, "store": 1e-2}[which]
    with pmstore.open(path) as store:
        given = program(lr=1e-3)
        train(store, given, 0)
        assert rate(given) == {"program": 1e-3, "store": 1e-2}[which]


@pytest.mark.parametrize(
    "schedule",
    [
        cosine(10),
        steps(3),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 0.9**at),
        lambda optimizer: torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda at: 0.9),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=1e-4),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5),
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            ],
            [5],
        ),
    ],
    ids=["cosine", "step", "lambda", "multiplicative", "eta_min", "restarts", "sequential"],
)
def test_a_base_rate_under_a_scheduler(path: Path, schedule: Callable[[Any], Any]) -> None:
    """As if the schedule had had that rate from its beginning."""
    begin(path, {"schedule": schedule})
    expected = program(lr=3e-3, schedule=schedule)
    rates = []
    for _ in range(10):
        expected["optimizer"].step()
        expected["lr_scheduler"].step()
        rates.append(rate(expected))
    with pmstore.open(path) as store:
        given = program(lr=3e-3, schedule=schedule)
        run, _ = train(store, given, 0, resume=Resume(lr="program"))
        assert math.isclose(rate(given), rates[6], rel_tol=1e-9)
        for wanted, batch in zip(rates[7:], run.batches(epochs=9), strict=False):
            step(given, run, batch[1])
            assert math.isclose(rate(given), wanted, rel_tol=1e-9)
        run.end_step()


def test_settings_of_a_scheduler_keep_its_place(path: Path) -> None:
    begin(path, {"schedule": cosine(10)})
    with pmstore.open(path) as store:
        given = program(schedule=cosine(50))
        train(store, given, 0, resume=Resume(lr_scheduler="settings"))
        scheduler = given["lr_scheduler"]
        assert (scheduler.last_epoch, scheduler.T_max) == (7, 50)
        assert math.isclose(rate(given), 1e-2 * (1 + math.cos(math.pi * 7 / 50)) / 2)
        assert scheduler.get_last_lr() == [rate(given)]


def test_a_scheduler_of_the_program_begins_anew(path: Path) -> None:
    begin(path, {"schedule": cosine(10)})
    with pmstore.open(path) as store:
        given = program(schedule=steps(3))
        train(store, given, 0, resume=Resume(lr_scheduler="program"))
        assert (type(given["lr_scheduler"]).__name__, given["lr_scheduler"].last_epoch) == (
            "StepLR",
            0,
        )
        assert rate(given) == 1e-2
    with pmstore.open(path) as store:  # once
        given = program(schedule=steps(3))
        train(store, given, 4, epochs=9, resume=Resume(lr_scheduler="program"))
        assert given["lr_scheduler"].last_epoch == 4
    with pmstore.open(path) as store:
        given = program(schedule=steps(3))
        train(store, given, 0, resume=Resume(lr_scheduler="program"))
        assert given["lr_scheduler"].last_epoch == 4


def test_a_fresh_optimizer_of_the_same_kind(path: Path) -> None:
    """Nothing is different: what is chosen is done the first time that it is."""
    begin(path, {}, 6)
    for attached in range(3):
        with pmstore.open(path) as store:
            stored = store["run/model/body.weight"].clone()
            given = program(seed=9)
            run = pmstore.torch.attach(store, **given, resume=Resume(optimizer="program"))
            weight, state = given["model"].body.weight, given["optimizer"].state
            assert torch.equal(weight.detach(), stored)
            assert state[weight]["step"] == 2 * attached if attached else not state
            go_on(run, given, run.step + 2)


@pytest.mark.parametrize(
    ("size", "taken"), [(10, 7), (50, 2), (50, 7), (7, 2), (100, 8), (30, 0), (30, 5), (1, 9)]
)
def test_a_place_in_samples(path: Path, size: int, taken: int) -> None:
    """What is left of the data epoch comes once, in its order, whatever is killed in between."""
    whole = path.with_name("whole.pm")
    with pmstore.open(whole) as store:
        order = [one for batch in train(store, program(), 99)[1] for one in batch]
    begin(path, {}, taken)
    resume = Resume(batch_size="samples")
    store = pmstore.open(path)
    train(store, program(batch_size=size), 0, resume=resume)
    store.close()
    with pmstore.open(path) as store:
        run, seen = train(store, program(batch_size=size), 2, resume=resume)
        if size < 50:
            run.rollback()
    with pmstore.open(path) as store:
        _, more = train(store, program(batch_size=size), 999, resume=resume)
    assert [one for batch in seen + more for one in batch] == order[20 * taken :]
    assert max(map(len, seen + more)) <= size


def test_a_place_in_samples_changes_twice(path: Path) -> None:
    whole = path.with_name("whole.pm")
    with pmstore.open(whole) as store:
        order = [one for batch in train(store, program(), 99)[1] for one in batch]
    begin(path, {}, 2)
    seen: list[list[int]] = []
    for size, most in ((30, 0), (7, 1), (30, 1), (9, 99)):
        with pmstore.open(path) as store:
            given = program(batch_size=size, num_workers=1 if size == 7 else 0)
            seen += train(store, given, most, resume=Resume(batch_size="samples"))[1]
    assert [one for batch in seen for one in batch] == order[40:]


def test_samples_cannot_be_counted_everywhere(path: Path) -> None:
    with pmstore.open(path) as store:
        given = {**program(), "loader": [(torch.arange(4), torch.ones(4, 10))] * 5}
        train(store, given, 2)
    with pmstore.open(path) as store:
        given = {**program(), "loader": [(torch.arange(4), torch.ones(4, 10))] * 6}
        with pytest.raises(ChangedError, match=r'length of the loader: stored 5.*"next epoch"'):
            train(store, given, 0, resume=Resume(batch_size="samples"))
        run, seen = train(store, given, 99, resume=Resume(data="next epoch"))
        assert (len(seen), run.data_epoch) == (6, 2)


def test_the_next_data_epoch(path: Path) -> None:
    begin(path, {})
    with pmstore.open(path) as store:
        run, seen = train(
            store, program(samples=140), 99, epochs=3, resume=Resume(data="next epoch")
        )
        assert sorted(one for batch in seen for one in batch) == list(range(140))
    begin(path.with_name("at_its_begin.pm"), {}, 5)
    with pmstore.open(path.with_name("at_its_begin.pm")) as store:
        run, seen = train(store, program(samples=40), 99, resume=Resume(data="next epoch"))
        assert (len(seen), run.data_epoch) == (2, 2)


# ---- what is trained


def test_requires_grad_is_part_of_the_state(path: Path) -> None:
    frozen = ("body.weight", "body.bias")
    with pmstore.open(path) as store:
        given = program(frozen=frozen)
        run, _ = train(store, given, 3)
        given["model"].body.requires_grad_(True)
        run.rollback()
        assert not given["model"].body.weight.requires_grad
        for _, features in run.batches(epochs=9):
            given["model"].body.requires_grad_(True)
            step(given, run, features)
            run.end_step()
            break
        expected = given["model"].body.weight.clone()
    with pmstore.open(path) as store:
        given = program(frozen=frozen, seed=3)
        train(store, given, 0)
        assert given["model"].body.weight.requires_grad
        assert torch.equal(given["model"].body.weight, expected)
    with pmstore.open(path) as store:  # a program that gives what the training made of it
        given = program(seed=3)
        train(store, given, 1, epochs=9)
    for which, trained, now in (
        ("store", True, ("head.weight",)),
        ("program", False, ("head.weight", "head.bias")),
    ):
        with pmstore.open(path) as store:
            given = program(frozen=now)
            with pytest.raises(ChangedError):
                pmstore.torch.attach(store, **given)
            if which == "program":
                train(store, given, 1, epochs=9, resume=Resume(trainable="program"))
            else:
                train(store, given, 0, resume=Resume(trainable="store"))
            assert given["model"].head.bias.requires_grad == trained
            assert given["model"].body.weight.requires_grad


def test_what_resume_takes() -> None:
    with pytest.raises(ValueError, match='it takes "samples"'):
        Resume(batch_size="program")
    with pytest.raises(ValueError, match='it takes "program" or "store"'):
        Resume(lr=1e-3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Resume("program")  # type: ignore[misc]
    assert issubclass(ChangedError, AttachError)
