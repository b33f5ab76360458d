"""Programs with several models, optimizers and schedulers: GANs, actor and critic."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# which the first optimizer of a process imports: here once, in the fork server
import torch._dynamo
from gan import Gan, in_heap, same
from torch import nn
from training import assert_same, contents

import pmstore
import pmstore.torch.optim
from pmstore.testing import ForkServer
from pmstore.torch import AttachError, MismatchError, Run, TornStepError, attach

STEPS = 14
KILLS = 12
HOW: dict[str, dict[str, Any]] = {
    "torch": {},
    "native": {"native": True},
    "mixed": {"native": True, "critic_native": False},
    "mirror": {"mirror": True},
}


def work(ack: Callable[[int], None], path: str, kinds: dict[str, Any]) -> None:
    """One process's life: goes on where the store is. Runs in a child of the fork server."""
    torch.set_num_threads(1)
    with pmstore.open(path, size="8MiB") as store:
        ack(0)
        Gan(**kinds).train(store, STEPS)
        ack(STEPS)


@pytest.mark.parametrize("how", HOW)
def test_a_gan_in_a_store_is_the_one_of_plain_torch(tmp_path: Path, how: str) -> None:
    """And a run in pieces, with steps that are taken back, is the one at a time."""
    plain, kept = Gan(**HOW[how]), Gan(**HOW[how])
    torch.manual_seed(7)
    for number in range(STEPS):
        plain.step(number)
    torch.manual_seed(7)
    with pmstore.open(tmp_path / "whole.pm") as store:
        kept.train(store, STEPS)
        whole = contents(store)
        assert same(plain.state(), kept.state())
    torch.manual_seed(7)
    for until in (1, 2, 3, 4, 7, None):
        with pmstore.open(tmp_path / "pieces.pm") as store:
            gan = Gan(**HOW[how])
            if until == 1:
                torch.manual_seed(7)
            run = gan.attach(store)
            for number in run.steps(STEPS):
                gan.step(number)
                if number == until:
                    run.rollback()
                    if run.stats().rollbacks == 2:
                        break
            run.detach()
            pieces = contents(store)
    assert_same(whole, pieces)
    assert same(plain.state(), gan.state())


@pytest.mark.parametrize("how", HOW)
def test_a_gan_that_is_killed(tmp_path: Path, server: ForkServer, how: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # shown if it fails
    chance = random.Random(seed)
    assert server.run("test_many:work", [str(tmp_path / "whole.pm"), HOW[how]]).exit_code == 0
    with pmstore.open(tmp_path / "whole.pm", mode="r") as store:
        whole = contents(store)
    kills = lives = 0
    while kills < KILLS:
        path = tmp_path / f"killed{lives}.pm"
        ended = False
        while not ended:
            # by the engine, at one of its writes, or by the clock, at any instruction
            again = {"kill_at": chance.randrange(1, 700)}
            if chance.random() < 0.4:
                again = {"delay_seconds": chance.uniform(0, 0.4)}
            run = server.run("test_many:work", [str(path), HOW[how]], **again)
            kills += run.killed
            ended = not run.killed
            assert run.killed or (run.acknowledged == STEPS and run.exit_code == 0)
        with pmstore.open(path, mode="r") as store:
            assert_same(whole, contents(store))
        lives += 1


def test_where_the_pieces_lie(store: pmstore.Store) -> None:
    gan = Gan()
    gan.train(store, 1)
    assert in_heap(store, "run/model/g/0.weight", gan.g[0].weight)
    assert in_heap(store, "run/model/d/2.bias", gan.d[2].bias)
    assert in_heap(
        store, "run/model/average/module.1.running_var", gan.average.module[1].running_var
    )
    assert in_heap(store, "run/model/average/n_averaged", gan.average.n_averaged)
    moment = gan.of_d.state[gan.d[0].weight]["exp_avg"]
    assert in_heap(store, "run/optimizer/d/state/0.exp_avg", moment)
    assert [*store["run/lr_scheduler"]] == ["0", "1"]
    other = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    other.load_state_dict(store["run/model/d"])
    assert torch.equal(other[0].weight, gan.d[0].weight)


@pytest.mark.parametrize("which", ["g", "d"])
def test_an_update_by_any_optimizer_is_of_a_step(path: Path, which: str) -> None:
    with pmstore.open(path) as store:
        gan = Gan()
        run = gan.attach(store)
        update = getattr(gan, f"of_{which}").step
        with run.next_step():
            gan.step(0)
            update()
            with pytest.raises(pmstore.TransactionError, match="only the run commits it"):
                store.commit()
        run.commit()
        for parameter in (*gan.g.parameters(), *gan.d.parameters()):
            parameter.grad = torch.ones_like(parameter)
        with (
            store.transaction(),
            pytest.raises(pmstore.TransactionError, match="outside of a step"),
        ):
            update()
        with run.next_step():
            update()
            run.detach()
    with pmstore.open(path) as store, pytest.raises(TornStepError):
        Gan().attach(store)


def test_a_step_declares_what_each_optimizer_writes(store: pmstore.Store) -> None:
    """No page fault in a step: everything was captured before."""
    models = [nn.Linear(500, 500), nn.Linear(500, 500)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    run = attach(store, model=models, optimizer=optimizers)
    for _ in run.steps(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.randn(2, 500)).sum().backward()
            before = store.stats().faults
            optimizer.step()
            after = store.stats().faults
    assert after == before


def test_one_scaler_for_two_optimizers(tmp_path: Path) -> None:
    def life(name: str, *ends: int) -> dict[str, Any]:
        for until in ends:
            with pmstore.open(tmp_path / name) as store:
                torch.manual_seed(1)
                random.seed(1)
                models = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 1)}
                optimizers = {
                    key: torch.optim.Adam(model.parameters()) for key, model in models.items()
                }
                scaler = torch.amp.GradScaler("cpu", growth_interval=2)
                run = attach(store, model=models, optimizer=optimizers, scaler=scaler, policy=None)
                for number in run.steps(until):
                    for key, model in models.items():
                        optimizers[key].zero_grad()
                        loss = model(torch.randn(3, 2)).square().sum()
                        if number == 3 and key == "b":
                            loss = loss * torch.inf  # this one skips its step
                        scaler.scale(loss).backward()
                        scaler.step(optimizers[key])
                    scaler.update()
                run.detach()
                held = contents(store)
        return held

    assert_same(life("whole.pm", 6), life("pieces.pm", 1, 3, 4, 6))


def test_keys_with_slashes_and_names_of_the_format(path: Path) -> None:
    def program() -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
        keys = ["a/b", "a", "layout", "b/c%", "state", "optimizer"]
        models: dict[str, nn.Module] = {
            key: nn.Linear(2, number + 1) for number, key in enumerate(keys)
        }
        models["a"].add_module("b", nn.Linear(3, 1))
        models["a"].add_module("b/weight", nn.Linear(3, 2))
        optimizers: Any = {
            key: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            for key, model in models.items()
        }
        return models, optimizers

    with pmstore.open(path) as store:
        models, optimizers = program()
        run = attach(store, model=models, optimizer=optimizers)
        with run.next_step():
            for key, optimizer in optimizers.items():
                sum(one.sum() for one in models[key].parameters()).backward()
                optimizer.step()
        run.commit()
        kept = {key: copy.deepcopy(model.state_dict()) for key, model in models.items()}
    with pmstore.open(path) as store:
        models, optimizers = program()
        models = dict(reversed(models.items()))  # the order does not matter
        attach(store, model=models, optimizer=optimizers)
        assert same(
            {key: model.state_dict() for key, model in models.items()},
            {key: kept[key] for key in models},
        )
        assert all(
            state["momentum_buffer"].eq(1).all()
            for optimizer in optimizers.values()
            for state in optimizer.state.values()
        )


class ActorCritic:
    """A trunk that both share, an optimizer for each, and one for a parameter that is in neither
    model."""

    def __init__(self, shared: bool = True) -> None:
        torch.manual_seed(1)
        trunk = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        self.actor = nn.Sequential(trunk, nn.Linear(6, 2))
        self.critic = nn.Sequential(trunk if shared else copy.deepcopy(trunk), nn.Linear(6, 1))
        self.temperature = torch.zeros(1, requires_grad=True)
        self.of_actor = torch.optim.Adam(self.actor.parameters(), 1e-2)
        self.of_critic = torch.optim.RMSprop(self.critic.parameters(), 1e-2)
        self.of_rest = torch.optim.SGD([self.temperature], 0.1)

    def attach(self, store: pmstore.Store, **more: Any) -> Run:
        return attach(
            store,
            model={"critic": self.critic, "actor": self.actor},
            optimizer=[self.of_actor, self.of_critic, self.of_rest],
            **more,
        )

    def step(self, number: int) -> None:
        seen = torch.randn(5, 4)
        value = self.critic(seen).square().mean()
        chosen = (self.actor(seen) * self.temperature.exp()).logsumexp(1).mean()
        for optimizer in (self.of_actor, self.of_critic, self.of_rest):
            optimizer.zero_grad()
        (value + chosen).backward()
        self.of_critic.step()
        self.of_actor.step()
        if number % 3 == 0:
            self.of_rest.step()


@pytest.mark.parametrize("mirror", [None, True])
def test_actor_and_critic_share_a_trunk(tmp_path: Path, mirror: bool | None) -> None:
    def life(name: str, *ends: int) -> tuple[dict[str, Any], ActorCritic]:
        torch.manual_seed(5)
        for until in ends:
            program = ActorCritic()
            torch.manual_seed(5)
            with pmstore.open(tmp_path / name) as store:
                run = program.attach(store, mirror=mirror, policy=None)
                assert program.actor[0][0].weight is program.critic[0][0].weight
                for number in run.steps(until):
                    program.step(number)
                if mirror is None:
                    assert "0.0.weight" in store["run/model/actor"]
                    assert "0.0.weight" not in store["run/model/critic"]
                    assert in_heap(
                        store, "run/optimizer/2/parameters/0", program.temperature.detach()
                    )
                run.detach()
                held = contents(store)
        return held, program

    whole, _ = life("whole.pm", 8)
    pieces, program = life("pieces.pm", 1, 3, 4, 8)
    assert_same(whole, pieces)
    plain = ActorCritic()
    torch.manual_seed(5)
    for number in range(8):
        plain.step(number)
    assert same(plain.actor.state_dict(), program.actor.state_dict())
    assert torch.equal(plain.temperature, program.temperature)
    with (
        pmstore.open(tmp_path / "whole.pm") as store,
        pytest.raises(
            MismatchError,
            match=r"critic/0\.0\.weight: stored tied to actor/0\.0\.weight, given as a tensor of",
        ),
    ):
        ActorCritic(shared=False).attach(store, mirror=mirror)


def test_one_optimizer_for_two_models(path: Path) -> None:
    for number in range(3):
        with pmstore.open(path) as store:
            torch.manual_seed(0)
            first, second = nn.Linear(2, 2), nn.Linear(2, 1)
            optimizer = torch.optim.Adam(itertools.chain(first.parameters(), second.parameters()))
            run = attach(store, model=[first, second], optimizer=optimizer)
            with run.next_step():
                optimizer.zero_grad()
                second(first(torch.ones(1, 2))).sum().backward()
                optimizer.step()
            run.commit()
            assert in_heap(store, "run/model/1/bias", second.bias)
            assert float(store["run/optimizer/state/3.step"]) == number + 1


def test_other_keys_than_stored(path: Path) -> None:
    with pmstore.open(path) as store:
        gan = Gan()
        gan.train(store, 1)
    with pmstore.open(path) as store:
        gan = Gan()
        with pytest.raises(MismatchError) as caught:
            attach(
                store,
                model={"g": gan.g, "critic": gan.d, "average": gan.average},
                optimizer=[gan.of_g, gan.of_d],
                lr_scheduler={"of g": gan.schedulers[0], "of d": gan.schedulers[1]},
            )
        assert caught.value.missing == (
            "model/d",
            "optimizer/g",
            "optimizer/d",
            "lr_scheduler/0",
            "lr_scheduler/1",
        )
        assert caught.value.unexpected == (
            "model/critic",
            "optimizer/0",
            "optimizer/1",
            "lr_scheduler/of g",
            "lr_scheduler/of d",
        )
        with pytest.raises(MismatchError, match="given, but not stored") as caught:
            attach(
                store,
                model=gan.g,
                optimizer={"g": gan.of_g, "d": gan.of_d},
                lr_scheduler=gan.schedulers,
            )
        assert caught.value.missing == ("model/average", "model/d", "model/g")
        assert caught.value.unexpected == ("model",)
        gan.of_g, gan.of_d = gan.of_d, gan.of_g
        with pytest.raises(MismatchError, match="the optimizer 'g'"):
            gan.attach(store)
        assert [*map(id, gan.g.parameters())] == [
            id(one) for one in gan.of_d.param_groups[0]["params"]
        ]


def test_what_is_no_piece_is_refused(store: pmstore.Store, tmp_path: Path) -> None:
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters())

    class Average:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    average = Average()
    kinds: list[tuple[dict[str, Any], str]] = [
        ({"model": 5}, r"model is a int: it must be an nn\.Module, or a dict or a list of such"),
        ({"model": optimizer}, "model is a SGD: it must be an nn.Module"),
        ({"model": {"a": net, "b": 3}}, r"model\['b'\] is a int: it must be an nn\.Module"),
        ({"model": [net, None]}, r"model\['1'\] is a NoneType.* Leave it out if there is none"),
        ({"model": {"a": net, "b": average}}, r"model\['b'\] is a .*Average: .* into stateful="),
        ({"model": average}, r"model is a .*Average: .* go into stateful=\{\.\.\.\}"),
        ({"model": {}}, "model={} is empty: leave it out"),
        ({"optimizer": []}, r"optimizer=\[\] is empty: leave it out"),
        ({"model": {"": net}}, "model has the key ''"),
        ({"model": {3: net}}, "model has the key 3: keys are names"),
        ({"model": {"a": net, "b": net}}, r"model\['a'\] and model\['b'\] are the same object"),
        ({"optimizer": [optimizer, optimizer]}, r"optimizer\['0'\] and optimizer\['1'\] are the s"),
        ({"optimizer": net}, r"optimizer is a Linear: it must be a torch\.optim\.Optimizer"),
        ({"optimizer": [net]}, r"optimizer\['0'\] is a Linear"),
        ({"optimizer": net.parameters()}, "optimizer is a generator"),
        ({"lr_scheduler": [3]}, r"lr_scheduler\['0'\] is a int: it must be an object with state_d"),
        ({"scaler": 3}, "scaler is a int: it must be an object with state_dict"),
    ]
    for given, message in kinds:
        with pytest.raises(AttachError, match=message):
            attach(store, **given)
    assert list(store) == []
    attach(store, model={"a": net}, optimizer={"a": optimizer})
    with pmstore.open(tmp_path / "other.pm", size="8MiB") as beside:
        with pytest.raises(AttachError, match="the model 'z' is attached already, as 'run'"):
            attach(beside, model={"y": other, "z": net})
        with pytest.raises(AttachError, match="the optimizer 'x' is attached already, as 'run'"):
            attach(beside, optimizer={"x": optimizer})


def test_memory_that_would_be_torn_apart_is_refused(store: pmstore.Store) -> None:
    """Of two optimizers that keep the same parameter, and of one that another thing shares."""
    net = nn.Linear(2, 2)
    alone = torch.zeros(3, requires_grad=True)
    native, sgd = pmstore.torch.optim.SGD, torch.optim.SGD
    whole = torch.zeros(8)
    viewed = nn.Linear(4, 2, bias=False)
    viewed.weight.data = whole.view(2, 4)
    shadow = nn.Module()
    shadow.register_buffer("shadow", net.weight.detach()[0])
    programs: list[dict[str, Any]] = [
        {"optimizer": [sgd([alone]), sgd([alone])]},
        {"model": net, "optimizer": [native(net.parameters()), sgd(net.parameters())]},
        {"optimizer": [native(net.parameters()), native(net.parameters())]},
        {"model": viewed, "optimizer": sgd([whole.requires_grad_()])},
        {"model": [net, shadow], "optimizer": native(net.parameters())},
    ]
    for program in programs:
        with pytest.raises(AttachError, match="share memory, which attach would tear apart"):
            attach(store, **program)
        assert list(store) == []
    # what the models share they keep
    run = attach(store, model=[net, shadow], optimizer=[sgd(net.parameters()), sgd([net.weight])])
    with run.next_step(), torch.no_grad():
        net.weight.fill_(3)
    run.commit()
    assert shadow.shadow.tolist() == [3, 3]
