"""A stored run for a program with other layers, groups or pieces: what both have is taken over."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs_changed import go_on, program, step, train
from torch import nn
from training import contents

import pmstore
import pmstore.torch
from pmstore.testing import ForkServer
from pmstore.torch import AttachError, MismatchError, Resume

PARTIAL = Resume(model="partial")


def stored(path: Path, before: dict[str, Any], most: int = 7) -> dict[str, Any]:
    """Of a run of so many steps: its tensors, and its optimizer's state by parameter."""
    with pmstore.open(path, size="2MiB") as store:  # which is copied, again and again
        given = program(**before)
        run, _ = train(store, given, most)
        state = given["optimizer"].state
        found = {
            name: (tensor.detach().clone(), _copy(state.get(tensor, {})))
            for name, tensor in given["model"].named_parameters()
        }
        run.detach()
        return found


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    return {key: one.clone() if torch.is_tensor(one) else one for key, one in state.items()}


def resumed(path: Path, now: dict[str, Any], resume: Resume) -> dict[str, Any]:
    """The program after attach; then it trains, and is resumed as any other."""
    with pmstore.open(path) as store:
        given = program(seed=3, **now)
        run, _ = train(store, given, 0, resume=resume)
        assert run.step == 7
        state = given["optimizer"].state
        found = {
            name: (tensor.detach().clone(), _copy(state.get(tensor, {})))
            for name, tensor in given["model"].named_parameters()
        }
        go_on(run, given, 9)
    with pmstore.open(path) as store:
        assert store.check().problems == ()
        given = program(seed=4, **now)
        assert train(store, given, 0)[0].step == 9
    with pmstore.open(path) as store:
        epoch = store.epoch
        train(store, program(seed=4, **now), 0, resume=resume)
        assert store.epoch <= epoch + 1  # what is noted of the choice, and nothing else
    return found


def equal(ours: Any, theirs: Any) -> bool:
    if torch.is_tensor(ours):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, tuple):
        return all(map(equal, ours, theirs))
    return bool(ours == theirs)


def test_new_layers(path: Path) -> None:
    before = stored(path, {})
    with pmstore.open(path) as store, pytest.raises(MismatchError, match=r'model="partial"'):
        pmstore.torch.attach(store, **program(extra=True))
    after = resumed(path, {"extra": True}, PARTIAL)
    fresh = dict(program(extra=True, seed=3)["model"].named_parameters())
    for name, held in after.items():
        expected = before.get(name) or (fresh[name].detach(), {})
        assert equal(held, expected), name


def test_layers_that_are_gone(path: Path) -> None:
    before = stored(path, {"extra": True, "norm": True})
    after = resumed(path, {"bias": False}, PARTIAL)
    assert after.keys() == {"body.weight", "head.weight", "head.bias"}
    for name, held in after.items():
        assert equal(held, before[name]), name
    with pmstore.open(path) as store:
        assert set(store["run/model"]) == set(after)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop])
@pytest.mark.parametrize(("was", "now"), [(2, 5), (5, 2)])
def test_rows(path: Path, kind: Any, was: int, now: int) -> None:
    """As an embedding grows. Rprop's state does not begin with zeros: it begins anew."""
    before = stored(path, {"outputs": was, "kind": kind})
    after = resumed(path, {"outputs": now, "kind": kind}, PARTIAL)
    fresh = program(outputs=now, seed=3)["model"].head
    rows = min(was, now)
    for name in ("weight", "bias"):
        ours, state = after[f"head.{name}"]
        theirs, old = before[f"head.{name}"]
        assert torch.equal(ours[:rows], theirs[:rows])
        assert torch.equal(ours[rows:], getattr(fresh, name).detach()[rows:])
        if kind is torch.optim.Rprop:
            assert not state
            continue
        assert state.keys() == old.keys()
        for key, one in state.items():
            if torch.is_tensor(one) and one.dim():
                assert torch.equal(one[:rows], old[key][:rows])
                assert not one[rows:].any()
            else:
                assert one == old[key]
    assert equal(after["body.weight"], before["body.weight"])


class Tied(nn.Module):
    def __init__(self, words: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(words, 4)
        self.head = nn.Linear(4, words, bias=False)
        self.head.weight = self.embedding.weight


def test_a_grown_embedding_with_a_tied_head(path: Path) -> None:
    before = torch.empty(0)
    for words, resume in ((5, None), (8, PARTIAL), (8, None)):
        with pmstore.open(path) as store:
            model = Tied(words, words)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            fresh = model.head.weight.detach().clone()
            run = pmstore.torch.attach(store, model=model, optimizer=optimizer, resume=resume)
            assert model.head.weight is model.embedding.weight
            if resume is not None:
                assert torch.equal(model.head.weight[:5], before)
                assert torch.equal(model.head.weight[5:], fresh[5:])
            for _ in range(3):
                with run.next_step():
                    optimizer.zero_grad()
                    model.head(model.embedding(torch.tensor([0, 2]))).square().sum().backward()
                    optimizer.step()
            before = model.head.weight.detach().clone()


def test_other_shapes_are_refused(path: Path) -> None:
    stored(path, {})
    with pmstore.open(path) as store:
        kept = contents(store)
        for now in ({"width": 32}, {"width": 8}):
            with pytest.raises(MismatchError) as caught:
                pmstore.torch.attach(store, **program(**now), resume=PARTIAL)
            assert caught.value.mismatched == (
                f"head.weight: stored (1, 16), given (1, {now['width']})",
            )
        with pytest.raises(AttachError, match="nothing of the stored model"):
            other = nn.Linear(10, 16)
            optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
            loader = program()["loader"]
            give = {"model": other, "optimizer": optimizer, "loader": loader}
            pmstore.torch.attach(store, **give, resume=PARTIAL)
        assert contents(store) == kept


def test_another_dtype(path: Path) -> None:
    before = stored(path, {})
    after = resumed(path, {"dtype": torch.bfloat16}, PARTIAL)
    for name, (tensor, state) in after.items():
        assert torch.equal(tensor, before[name][0].to(torch.bfloat16))
        assert torch.equal(state["exp_avg"], before[name][1]["exp_avg"].to(torch.bfloat16))
        assert state["step"].dtype == torch.float32


def test_other_groups(path: Path) -> None:
    before = stored(path, {})
    with pmstore.open(path) as store, pytest.raises(MismatchError, match="1 parameter groups are"):
        pmstore.torch.attach(store, **program(groups=2))
    after = resumed(path, {"groups": 2}, Resume(optimizer="settings"))
    assert equal(after, before)
    with pmstore.open(path) as store:
        given = program(groups=2)
        train(store, given, 0)
        assert len(given["optimizer"].param_groups) == 2


def test_another_optimizer_begins_anew(path: Path) -> None:
    before = stored(path, {})
    after = resumed(path, {"kind": torch.optim.SGD}, Resume(optimizer="program"))
    assert equal(
        {name: one for name, (one, _) in after.items()}, {n: o for n, (o, _) in before.items()}
    )
    assert not any(state for _, state in after.values())


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_group_that_is_added_while_it_trains(path: Path, scheduled: bool) -> None:
    """The commit takes it in. The program adds it again before attach."""

    def made(grown: bool) -> dict[str, Any]:
        given = program(extra=True)
        model = given["model"]
        parts = [*model.body.parameters(), *model.head.parameters()]
        given["optimizer"] = torch.optim.AdamW(parts, lr=1e-2)
        if grown:
            grow(given)
        if scheduled:
            given["stateful"] = {"rates": Rates(given["optimizer"])}
        return given

    def grow(given: dict[str, Any]) -> None:
        extra = list(given["model"].extra.parameters())
        given["optimizer"].add_param_group({"params": extra, "lr": 1e-3})

    def life(path: Path, stops: list[int]) -> dict[str, tuple[str, bytes]]:
        for stop in stops:
            with pmstore.open(path) as store:
                given = made(store.get("grown", False))
                run = pmstore.torch.attach(store, **given)
                for _, features in run.batches(epochs=None):
                    if run.step >= 4 and not store.get("grown", False):
                        store["grown"] = True
                        grow(given)
                    if scheduled:
                        given["stateful"]["rates"].step()
                    step(given, run, features)
                    if run.step + 1 == stop:
                        run.end_step()
                        break
        with pmstore.open(path) as store:
            return contents(store)

    whole = life(path.with_name("whole.pm"), [9])
    pieces = life(path, [3, 4, 5, 7, 9])
    for held in (whole, pieces):
        held.pop("run/given")  # what the last program gave
    assert pieces == whole
    with pmstore.open(path) as store, pytest.raises(MismatchError, match="are added before attach"):
        pmstore.torch.attach(store, **made(False))


def test_a_layer_that_is_added_while_it_trains(path: Path) -> None:
    """The run is ended and attached anew, in the same process."""
    with pmstore.open(path) as store:
        given = program()
        run = pmstore.torch.attach(store, **given, policy=None)
        for _, features in run.batches(epochs=9):
            if run.step == 3:
                break
            step(given, run, features)
        before = _clone(given["model"])
        given["model"].extra = nn.Linear(16, 16)
        given["optimizer"].add_param_group({"params": list(given["model"].extra.parameters())})
        fresh = _clone(given["model"].extra)
        with pytest.raises(MismatchError, match=r"run\.detach\(\) after a commit"):
            run.commit()
        run.rollback()
        run.detach()
        run = pmstore.torch.attach(store, **given, resume=PARTIAL)
        assert run.step == 3
        assert equal(
            _clone(given["model"]), {**before, **{f"extra.{k}": v for k, v in fresh.items()}}
        )
        assert given["optimizer"].state[given["model"].head.weight]["step"] == 3
        go_on(run, given, 5)
        run.commit()
        assert store.check().problems == ()


class Rates:
    """A scheduler of the program's own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.at = optimizer, 0

    def step(self) -> None:
        self.at += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_model_alone(path: Path) -> None:
    before = stored(path, {"extra": True})
    with pmstore.open(path) as store:
        model = program(extra=True, seed=5)["model"]
        run = pmstore.torch.attach(store, model=model, resume=Resume(pieces="program"))
        assert equal(dict(model.named_parameters()), {n: one for n, (one, _) in before.items()})
        assert not {"optimizer", "loader", "gradients", "gradients_layout"} & set(store["run"])
        run.commit()
        run.detach()
        given = program(extra=True, seed=6)  # and all of it again
        run, _ = train(store, given, 2, epochs=9, resume=Resume(pieces="program"))
        assert run.step == 9


def test_models_under_keys(path: Path) -> None:
    def made(keys: str, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        models = {key: nn.Linear(3, 3) for key in keys}
        return {
            "model": models,
            "optimizer": {key: torch.optim.Adam(models[key].parameters()) for key in keys},
            "lr_scheduler": {},
        }

    def life(keys: str, seed: int, resume: Resume | None) -> dict[str, nn.Module]:
        with pmstore.open(path) as store:
            given = made(keys, seed)
            given.pop("lr_scheduler")
            run = pmstore.torch.attach(store, **given, resume=resume)
            begun = {key: _clone(model) for key, model in given["model"].items()}
            with run.next_step():
                for key, model in given["model"].items():
                    given["optimizer"][key].zero_grad()
                    model(torch.ones(3)).sum().backward()
                    given["optimizer"][key].step()
            run.commit()
            ended.update({key: _clone(model) for key, model in given["model"].items()})
            return begun

    ended: dict[str, Any] = {}
    life("g", 0, None)
    with pytest.raises(MismatchError, match=r'pieces="program"'):
        life("gd", 1, None)
    first = dict(ended)
    begun = life("gd", 1, Resume(pieces="program"))
    assert equal(begun["g"], first["g"])
    fresh = made("gd", 1)["model"]
    assert equal(begun["d"], _clone(fresh["d"]))
    second = dict(ended)
    assert equal(life("gd", 2, None), second)
    third = dict(ended)
    begun = life("d", 3, Resume(pieces="program"))
    assert equal(begun["d"], third["d"])
    assert equal(life("d", 4, None)["d"], ended["d"]) is False  # it has trained on


def _clone(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def test_an_accumulation_goes_on(path: Path) -> None:
    """A gradient that the next step needs is kept for the parameters that are still there."""
    with pmstore.open(path) as store:
        given = program()
        run = pmstore.torch.attach(store, **given)
        for _, features in run.batches():
            if run.step == 2:
                break
            step(given, run, features)
        given["optimizer"].zero_grad()
        given["model"].head.weight.square().sum().backward()
        run.commit()
        expected = given["model"].head.weight.grad.clone()
        run.detach()
    with pmstore.open(path) as store:
        given = program(extra=True)
        train(store, given, 0, resume=PARTIAL)
        assert torch.equal(given["model"].head.weight.grad, expected)
        assert given["model"].extra.weight.grad is None


@pytest.mark.parametrize("mirror", [False, True])
def test_what_cannot_be_taken_in_part_says_so(path: Path, mirror: bool) -> None:
    def attach(store: pmstore.Store, resume: Resume | None, **now: Any) -> None:
        given = program(**now)
        if not mirror:
            model = given["model"]
            given["optimizer"] = pmstore.torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = pmstore.torch.attach(store, **given, resume=resume, mirror=mirror)
        go_on(run, given, run.step + 1)

    with pmstore.open(path) as store:
        attach(store, None)
    with pmstore.open(path) as store:
        kept = contents(store)
        for resume, now in ((PARTIAL, {"extra": True}), (Resume(optimizer="program"), {})):
            with pytest.raises(AttachError, match=r"pmstore\.torch\.load"):
                attach(store, resume, **now)
        assert contents(store) == kept
    with pmstore.open(path) as store:
        attach(store, None)
    with pmstore.open(path) as store, pytest.raises(AttachError, match="mirrored, and so it stays"):
        pmstore.torch.attach(store, **program(), mirror=not mirror)


# ---- killed in the middle of it


def work(ack: Callable[[int], None], path: str) -> None:
    """Attaches the changed program. Runs in a child of the fork server."""
    torch.set_num_threads(1)
    with pmstore.open(path) as store:
        given = program(extra=True, outputs=4, lr=1e-3, batch_size=50, seed=3)
        resume = Resume(model="partial", lr="program", batch_size="samples")
        ack(0)
        pmstore.torch.attach(store, **given, resume=resume).detach()
        ack(1)


def test_killed_in_the_middle_it_is_as_before_or_whole(path: Path, server: ForkServer) -> None:
    stored(path, {"outputs": 2})
    with pmstore.open(path, mode="r") as store:
        before = contents(store)
    trial = path.with_name("trial.pm")
    shutil.copy(path, trial)
    assert server.run("test_partial_resume:work", [str(trial)]).exit_code == 0
    with pmstore.open(trial, mode="r") as store:
        whole = contents(store)
    seen = {"before": 0, "whole": 0}
    at, ended = 1, False
    while not ended:
        shutil.copy(path, trial)
        run = server.run("test_partial_resume:work", [str(trial)], kill_at=at)
        ended = not run.killed
        with pmstore.open(trial) as store:
            assert store.check().problems == ()
            held = contents(store)
        assert held in (before, whole), at
        seen["before" if held == before else "whole"] += 1
        at += 1 + at // 5
    assert seen["before"] > 5
    assert seen["whole"]


class Compiled(nn.Module):
    """As torch.compile makes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model


@pytest.mark.parametrize("wrap", [Compiled, nn.DataParallel])
def test_a_model_in_a_wrapper(path: Path, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Resume would find nothing that both have: the message says what to write."""
    model = nn.Linear(2, 2)
    for name, one in (("plain", model), ("wrapped", wrap(nn.Linear(2, 2)))):
        with pmstore.open(path) as store:
            pmstore.torch.attach(store, model=one, name=name).commit()
    with pmstore.open(path) as store:
        with pytest.raises(MismatchError, match="give the one inside") as inside:
            pmstore.torch.attach(store, model=wrap(model), name="plain")
        assert "Resume" not in str(inside.value)
        with pytest.raises(MismatchError, match="wrap the given one"):
            pmstore.torch.attach(store, model=nn.Linear(2, 2), name="wrapped")
        with pytest.raises(MismatchError, match="give the one inside"):
            pmstore.torch.load(store, wrap(nn.Linear(2, 2)), name="plain", strict=False)


def test_resume_of_another_kind(path: Path) -> None:
    with pmstore.open(path) as store, pytest.raises(TypeError, match="Resume"):
        pmstore.torch.attach(store, model=nn.Linear(2, 2), resume={"lr": "program"})  # type: ignore[arg-type]
