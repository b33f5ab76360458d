"""What a step asks of each object, in C: the answers are those of the slow ways, and a commit that
looked writes what one writes that did not."""

from __future__ import annotations

import ctypes
import gc
import random
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pmstore
from pmstore._engine._binding import Spent, Watch, encode, same_bytes, trained
from pmstore._engine.constants import ARRAY
from pmstore.objects import values
from pmstore.objects.structure import split
from pmstore.torch import attach
from pmstore.torch.changes import OTHERS, SAME, VALUES
from pmstore.torch.kept_structure import Structure
from pmstore.torch.run import Run


@pytest.fixture(autouse=True, scope="module")
def introduced(tmp_path_factory: pytest.TempPathFactory) -> None:
    """C code knows torch once a store has given out a tensor."""
    with pmstore.open(tmp_path_factory.mktemp("looks") / "a.pm", size=1 << 20) as store:
        store["tensor"] = torch.ones(1)
        assert store["tensor"].item() == 1.0


# ---- states as bytes

_LEAVES: list[Callable[[random.Random], Any]] = [
    lambda r: None,
    lambda r: r.random() < 0.5,
    lambda r: r.choice((-1, 1)) * (1 << r.randrange(70)) + r.randrange(-2, 3),
    lambda r: r.randrange(-40, 300),
    lambda r: r.choice((0.0, -0.0, 1.5, float("nan"), float("inf"), r.random())),
    lambda r: "x" * r.choice((0, 1, 31, 32, 255, 256, 65535, 65536)),
    lambda r: r.choice(("ä", "\ud800", "pmstore", "\0")),
    lambda r: b"y" * r.choice((0, 1, 255, 256, 65536)),
    lambda r: complex(r.random(), 2),
    lambda r: np.float32(r.random()),
    lambda r: torch.float16,
    lambda r: np.arange(r.randrange(4)),
    lambda r: torch.arange(r.randrange(4)),
    lambda r: nn.Parameter(torch.ones(2)),
]


def structure(r: random.Random, depth: int = 0) -> Any:
    kind = r.randrange(12) if depth < 4 else 99
    count = r.choice((0, 1, 2, 3, 15, 16, 17)) if depth < 2 else r.randrange(3)
    if kind == 0:
        return [structure(r, depth + 1) for _ in range(count)]
    if kind == 1:
        return tuple(structure(r, depth + 1) for _ in range(count))
    if kind in (2, 3):
        keys = [r.choice((f"key{i}", i, (i, "t"), None, 0.5, b"k", True)) for i in range(count)]
        made = {key: structure(r, depth + 1) for key in keys}
        if r.random() < 0.1:
            made["pmstore"] = 1
        return made if r.random() < 0.9 else OrderedDict(made)
    return r.choice(_LEAVES)(r)


def test_states_are_the_bytes_of_the_slow_way() -> None:
    kinds = (torch.Tensor, np.ndarray)
    r, known = random.Random(1), 0
    for _ in range(3000):
        state = structure(r)
        found = encode(state, kinds)
        if found is None:
            continue
        known += 1
        skeleton, arrays = split(state)
        assert found[0] == values._pack(values._lower(skeleton, 0))  # in Python
        assert len(found[1]) == len(arrays)
        for one, other in zip(found[1], arrays, strict=True):
            assert one is other or one.data_ptr() == other.data_ptr()
    assert known > 1000


def test_what_is_not_known_is_left_to_the_slow_way() -> None:
    deep: Any = []
    for _ in range(60):
        deep = [deep]
    for state in (deep, {"a": object()}, 1 << 64, {("a",): 1}, {1, 2}, "\ud800", torch.float16):
        assert encode(state, (torch.Tensor,)) is None
    loop: list[Any] = []
    loop.append(loop)
    assert encode(loop, ()) is None


def test_bytes_of_arrays_and_tensors() -> None:
    nan = torch.tensor([float("nan"), -0.0])
    assert same_bytes(nan, nan.clone()) is True
    assert same_bytes(torch.tensor([0.0]), torch.tensor([-0.0])) is False
    assert same_bytes(nan, nan.numpy().tobytes()) is True
    assert same_bytes(nan, b"") is False
    assert same_bytes(torch.empty(0), b"") is True
    assert same_bytes(torch.ones(2, 3).t(), b"") is None
    assert same_bytes(np.ones((2, 3)).T, b"") is None
    assert same_bytes(torch.ones(2, dtype=torch.bfloat16), b"\x80\x3f\x80\x3f") is True
    assert same_bytes(object(), b"") is None
    assert same_bytes((), b"") is True
    assert same_bytes((b"ab", b"", nan), b"ab" + nan.numpy().tobytes()) is True
    assert same_bytes((b"ab", b"c"), b"abcd") is False
    assert same_bytes((b"ab", b"cd"), b"abc") is False
    assert same_bytes((b"ab", b"d"), b"abc") is False
    assert same_bytes((b"ab", object()), b"abc") is None


# ---- containers and places


def test_containers_that_hold_others() -> None:
    key, big = "k" * 50, 10**30
    table: dict[Any, Any] = {key: big, "list": [1]}
    items: list[Any] = [table, 0.5]
    nested = (1, (2.0, "x"))
    watched = defaultdict(dict, {"a": nested})
    watch = Watch([table, items, watched], [], [], 0)
    assert watch.look() == SAME
    table[key] = big + 1
    assert watch.look() == VALUES
    watch.take()
    assert watch.look() == SAME
    watched["a"] = (1, (2.0, "y"))  # type: ignore[assignment]
    assert watch.look() == VALUES
    watched["a"] = (1, [2.0])  # type: ignore[assignment]
    assert watch.look() == OTHERS
    with pytest.raises(RuntimeError, match="more than values"):
        watch.take()
    watched["a"] = nested  # type: ignore[assignment]
    watch = Watch([table, items, watched], [], [], 0)
    changes: list[Callable[[], Any]] = [
        lambda: items.append(1),
        lambda: items.pop(),
        lambda: table.update(new=1),
        lambda: table.pop("new"),
        lambda: table.update(list=table.pop("list")),  # in another place now, or alone
        lambda: table.update({key: table.pop(key)}),
        lambda: items.__setitem__(0, dict(table)),
        lambda: watched["made by looking"],
    ]
    seen = []
    for change in changes:
        watch = Watch([table, items, watched], [], [], 0)
        change()
        seen.append(watch.look())
    assert seen == [OTHERS, OTHERS, OTHERS, OTHERS, SAME, OTHERS, OTHERS, OTHERS]


def test_some_keys_of_a_dict() -> None:
    """Which have constants, and which; other values may be replaced, and are not held."""
    held = nn.Linear(1, 1)
    table: dict[Any, Any] = {"a": 1, "b": held, "c": (1, "x"), "others": 2}
    keys = ["c", "a", "b"]
    watch = Watch([[1.5], (table, keys), {"d": 1}], [], [], 0)
    reference = weakref.ref(held)
    del held
    table["b"] = nn.Linear(1, 1)
    assert reference() is None
    assert watch.look() == SAME
    table["others"] = 3
    assert watch.look() == SAME
    table["a"], table["c"] = 2, (1, "y")
    assert watch.look() == VALUES
    watch.take()
    assert watch.look() == SAME
    changes: list[Callable[[], Any]] = [
        lambda: table.update(b=None),
        lambda: table.update(b=[]),
        lambda: table.update(b={}),  # of another type
        lambda: table.update(a=[1]),
        lambda: table.update(a=1, new=1),
        lambda: table.update(renamed=table.pop("a")),
    ]
    seen = []
    for change in changes:
        before = watch.look()
        change()
        seen.append((before, watch.look()))
        watch = Watch([(table, [key for key in keys if key in table])], [], [], 0)
    assert seen == [(SAME, OTHERS)] * len(changes)
    for wrong in ((table,), (keys, table), (table, ["gone"]), (table, [1])):
        with pytest.raises((TypeError, RuntimeError)):
            Watch([wrong], [], [], 0)


class Holder:
    """Its attributes are a dict that Python stores into by itself."""

    def __init__(self) -> None:
        self.a, self.b = [0], [1]

    def store(self, value: Any) -> None:
        self.a = value


WAYS: list[Callable[[Any], Any]] = [
    lambda table: table.__setitem__("a", [2]),
    lambda table: table.update(a=[2]),
    lambda table: table.update(new=1),
    lambda table: table.setdefault("new", 1),
    lambda table: table.pop("a"),
    lambda table: table.popitem(),
    lambda table: table.clear(),
    lambda table: table.__delitem__("b"),
    lambda table: table.__ior__({"b": None}),
    lambda table: table.update(a=table["b"], b=table["a"]),
    lambda table: dict.__setitem__(table, "a", [2]),
]


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda items: defaultdict(list, items)])
def test_each_way_to_change_a_dict_after_a_look(kind: Callable[[Any], dict[str, Any]]) -> None:
    """Python's number of a dict tells of all of them, also of those that are taken back."""
    for change in WAYS:
        table, other = kind({"a": [0], "b": [1]}), {"c": 1}
        first = dict(table)
        watch = Watch([table, other, (table, ["a", "b"])], [], [], 0)
        for _ in range(3):
            assert watch.look() == SAME
        change(table)
        assert watch.look() == OTHERS
        assert watch.look() == OTHERS
        table.clear()
        table.update(first)
        assert watch.look() == SAME
        other["c"] = 2
        assert watch.look() == VALUES
        assert watch.look() == VALUES
        watch.take()
        assert watch.look() == SAME
        change(table)
        assert watch.look() == OTHERS


def test_attributes_that_are_stored_after_a_look() -> None:
    """Many times by one line, which Python makes faster."""
    holder = Holder()
    watch = Watch([vars(holder)], [], [], 0)
    first = holder.a
    for number in range(100):
        assert watch.look() == SAME
        holder.store([number])
        assert watch.look() == OTHERS
        holder.store(first)


def test_tensors_that_moved() -> None:
    home = torch.zeros(4, 4)
    tensor = nn.Parameter(torch.ones(4, 4))
    tensor.data = home
    watch = Watch([], [tensor], [home], 0)
    assert watch.look() == SAME
    tensor.data = home.t()
    assert watch.look() == OTHERS
    tensor.data = home.view(2, 8)
    assert watch.look() == OTHERS
    tensor.data = home.view(torch.int32).view(torch.float32)
    assert watch.look() == SAME
    tensor.data = home.clone()
    assert watch.look() == OTHERS
    tensor.data = home
    assert watch.look() == SAME
    other = torch.ones(4, 4)
    tensor.data = other
    torch.utils.swap_tensors(tensor, nn.Parameter(home))
    assert watch.look() == SAME  # the same object with other insides
    for wrong in (([], [tensor], [], 0), ([], [tensor], [home], 2), ([1], [], [], 0)):
        with pytest.raises((ValueError, TypeError)):
            Watch(*wrong)


def test_what_functions_give() -> None:
    table: dict[str, Any] = {"list": [1], "bytes": b"ab", "tensor": torch.tensor([1.0, 2.0])}
    questions = [
        (table.get, ("list",), table["list"]),
        (table.get, ("bytes",), b"ab"),
        (table.get, ("tensor",), table["tensor"].numpy().tobytes()),
    ]
    watch = Watch([], [], [], 0, questions)
    outer = Watch([], [], [], 0, [(watch.look, (), SAME)])
    changes: list[dict[str, Any]] = [
        {"list": [1]},  # equal, and another one
        {"bytes": b"ac"},
        {"bytes": b"abc"},
        {"bytes": None},
        {"tensor": torch.tensor([1.0, 3.0])},
        {"tensor": torch.tensor([1.0, 0.0, 2.0])[::2]},  # not known
    ]
    for change in changes:
        before = dict(table)
        table |= change
        assert watch.look() == outer.look() == OTHERS, change
        table |= before
        assert watch.look() == outer.look() == SAME
    table |= {"bytes": bytearray(b"ab"), "tensor": table["tensor"].clone()}  # the same bytes
    assert watch.look() == SAME

    def fails(what: str) -> None:
        raise KeyError(what)

    with pytest.raises(KeyError, match="here"):
        Watch([], [], [], 0, [(fails, ("here",), None)]).look()
    for wrong in ([1], [(len, [], 0)], [(len, ())], (), None):
        with pytest.raises(TypeError):
            Watch([], [], [], 0, wrong)  # type: ignore[arg-type]


def test_a_watch_is_collected() -> None:
    class Table(dict[str, Any]):
        pass

    table = Table()
    table["watch"] = Watch([table], [], [], 0)
    table["asks"] = Watch([], [], [], 0, [(table.get, (table,), table)])
    gone = weakref.ref(table)
    del table
    gc.collect()
    assert gone() is None


# ---- gradients


class Known:
    """`Spent`, in Python."""

    def __init__(self) -> None:
        self.used: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def spend(self, parameters: list[torch.Tensor]) -> None:
        for one in parameters:
            if one.grad is not None:
                self.used[id(one.grad)] = weakref.ref(one.grad), one.grad._version

    def look(self, parameters: list[torch.Tensor]) -> bytes:
        def state(gradient: torch.Tensor | None) -> int:
            if gradient is None:
                return 0
            known = self.used.get(id(gradient))
            same = known is not None and known[0]() is gradient
            return 1 if same and known is not None and known[1] == gradient._version else 2

        found = bytes(state(one.grad) for one in parameters)
        alive = {id(one.grad) for one in parameters if one.grad is not None}
        self.used = {key: known for key, known in self.used.items() if key in alive}
        return found


def test_gradients_are_spent_as_in_python() -> None:
    r = random.Random(2)
    parameters = [torch.zeros(2, requires_grad=True) for _ in range(9)]
    spent, known, aside = Spent(None), Known(), list[torch.Tensor]()
    seen = set[int]()
    for _ in range(3000):
        one = r.choice(parameters)
        match r.randrange(8):
            case 0 | 1:
                one.grad = torch.ones(2)
            case 2:
                if one.grad is not None:
                    aside.append(one.grad)
                one.grad = None
            case 3:
                one.grad = aside.pop(r.randrange(len(aside))) if aside else None
            case 4:
                if one.grad is not None:
                    one.grad.mul_(2)
            case 5:
                one.grad = r.choice(parameters).grad
            case 6:
                some = r.sample(parameters, 4)
                spent.spend([{"params": some[:1]}, {"params": (*some[1:],)}])
                known.spend(some)
            case 7:
                looked = spent.look(parameters)
                assert looked == known.look(parameters)
                seen |= set(looked)
        if one.grad is not None:
            expected = known.used.get(id(one.grad))
            assert spent.is_spent(one.grad) == (
                expected is not None
                and expected[0]() is one.grad
                and expected[1] == one.grad._version
            )
    assert seen == {0, 1, 2}
    spent.clear()
    assert 1 not in spent.look(parameters)
    parameters[0].requires_grad_(False)
    assert trained(parameters[:2]) == b"\0\1"
    with pytest.raises(AttributeError):
        spent.look([object()])


# ---- whole steps


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(3))
        self.spare = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.norm(self.first(x)))
        return found


class Job:
    """What a program trains with."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        self.net = Net()
        self.average = torch.optim.swa_utils.AveragedModel(self.net)
        self.optimizer: Any = torch.optim.AdamW(
            [
                {"params": [*self.net.first.parameters(), *self.net.norm.parameters()]},
                {"params": [*self.net.last.parameters(), self.net.spare], "lr": 0.02},
            ],
            lr=0.01,
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.scaler = torch.amp.GradScaler("cpu")
        self.aside: list[torch.Tensor] = []

    def attach(self, store: pmstore.Store) -> Run:
        return attach(
            store,
            model={"net": self.net, "average": self.average},
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            scaler=self.scaler,
        )

    def backward(self) -> None:
        loss = self.net(torch.randn(3, 4)).square().sum()
        self.scaler.scale(loss).backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def held(self) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state[self.net.first.weight]
        return found


def reload(job: Job) -> None:
    job.optimizer.load_state_dict(job.optimizer.state_dict())


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    one.data, other.data = other.data, one.data


def keep_aside(job: Job) -> None:
    weight = job.net.first.weight
    if weight.grad is not None:
        job.aside.append(weight.grad)
    weight.grad = None


def bring_back(job: Job) -> None:
    if job.aside:
        job.net.first.weight.grad = job.aside.pop()


def renew_buffer(job: Job) -> None:
    job.net.count = job.net.count + 1


def add_group(job: Job) -> None:
    if len(job.optimizer.param_groups) < 4:
        job.optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)]})
        job.scheduler.base_lrs.append(0.1)


CHANGES: list[Callable[[Job], Any]] = [
    lambda job: None,
    lambda job: job.step(),
    lambda job: job.step(),
    lambda job: job.scheduler.step(),
    lambda job: job.average.update_parameters(job.net),
    lambda job: job.backward(),
    lambda job: job.optimizer.zero_grad(),
    lambda job: job.optimizer.zero_grad(set_to_none=False),
    lambda job: job.optimizer.step(),
    lambda job: job.optimizer.param_groups[0].update(lr=random.random()),
    lambda job: job.optimizer.param_groups[1].update(lr=1),  # an int
    lambda job: job.optimizer.param_groups[1].update(lr=True),
    lambda job: job.optimizer.param_groups[0].update(betas=(0.5, random.random())),
    lambda job: job.optimizer.param_groups[0].update(note=[1, random.random()]),
    lambda job: job.optimizer.param_groups[0].pop("note", None),
    lambda job: job.optimizer.param_groups[0].setdefault("note", []).append(1),
    lambda job: setattr(job.optimizer, "param_groups", list(job.optimizer.param_groups)),
    lambda job: job.optimizer.param_groups.reverse(),
    lambda job: job.optimizer.param_groups[0]["params"].reverse(),
    add_group,
    reload,
    lambda job: job.optimizer.state.clear(),
    lambda job: setattr(job.optimizer, "state", defaultdict(dict, job.optimizer.state)),
    lambda job: job.held().update(exp_avg=torch.full((4, 4), random.random())),
    lambda job: job.held().update(count=job.held().get("count", 0) + 1),
    lambda job: job.held().update(count=float(random.random())),
    lambda job: job.held().pop("count", None),
    lambda job: job.held().update(exp_avg=job.held().pop("exp_avg", torch.zeros(4, 4))),
    lambda job: job.held().get("step", torch.zeros(())).add_(1),
    lambda job: job.optimizer.state.update({job.net.spare: {"k": 1.0}}),
    lambda job: swap(job.net.first.weight, job.net.last.weight),
    lambda job: setattr(job.net.first.weight, "data", job.net.first.weight.data.clone()),
    lambda job: setattr(job.net.first.weight, "data", job.net.first.weight.data.t()),
    lambda job: setattr(job.net.first, "weight", nn.Parameter(torch.randn(4, 4))),
    lambda job: job.net.last.weight.data.fill_(float("nan")),
    lambda job: job.net.last.weight.data.mul_(-0.0),
    lambda job: job.net.spare.requires_grad_(not job.net.spare.requires_grad),
    lambda job: job.net.load_state_dict(
        {key: value.clone() for key, value in job.net.state_dict().items()}, assign=True
    ),
    renew_buffer,
    lambda job: setattr(job.net, "count", torch.ones(random.randrange(1, 5))),
    lambda job: job.net.count.add_(1),
    lambda job: setattr(job.net.norm, "momentum", 0.3),
    lambda job: job.net.train(not job.net.training),
    keep_aside,
    bring_back,
    lambda job: job.net.last.weight.grad.mul_(2) if job.net.last.weight.grad is not None else None,
    lambda job: setattr(job.net.last.weight, "grad", torch.ones(4, 4)),
    lambda job: torch.rand(1),
    lambda job: np.random.standard_normal(),
    lambda job: random.gauss(0, 1),
    lambda job: job.scaler.update(float(random.choice((1, 2, 4)))),
    lambda job: job.scheduler.base_lrs.__setitem__(0, random.random()),
]


def content(store: pmstore.Store) -> dict[bytes, Any]:
    found: dict[bytes, Any] = {}
    for name, one in store._core.pool.tree():
        data = b""
        if one.kind == ARRAY and one.data_bytes:
            data = ctypes.string_at(store._core.pool.info.base + one.data, one.data_bytes)
        if not name.startswith(b"pmstore"):
            found[name] = one.kind, one.meta, data
    return found


def look_at_all(run: Run) -> None:
    """Nothing is known of the last commit."""
    pieces = run._steps.pieces
    for optimizer in pieces.optimizers.values():
        optimizer.synced = None
    assert pieces.model is not None
    assert pieces.gradients is not None
    pieces._seen = None
    pieces.model._places = None
    pieces.trainable.watch = pieces.gradients.watch = None
    pieces.rng.watch = None
    pieces.rng._written.clear()
    if pieces.loader is not None:
        pieces.loader._watch = None


def train(path: Path, seed: int, steps: int, *, slow: bool) -> Iterator[Any]:
    """After each step: that it was committed, or why it was not, and what is stored."""
    r = random.Random(seed)
    with pmstore.open(path, size=32 << 20) as store:
        job = Job()
        run = job.attach(store)
        for _ in range(steps):
            try:
                with run.next_step():
                    for _ in range(r.choice((0, 1, 1, 2, 3))):
                        r.choice(CHANGES)(job)
                    if slow:
                        look_at_all(run)
                    run.commit()
                yield "committed"
            except Exception as error:
                yield type(error).__name__
                try:
                    run.rollback()
                except Exception as worse:
                    yield type(worse).__name__
                    break
            yield content(store)
        run.detach()


@pytest.mark.parametrize("seed", range(3))
def test_a_commit_that_looked_is_one_that_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    fast = list(train(tmp_path / "fast.pm", seed, 40, slow=False))
    monkeypatch.setattr("pmstore._engine._binding.encode", lambda state, kinds: None)
    monkeypatch.setattr(Structure, "_put", _put)
    slow = list(train(tmp_path / "slow.pm", seed, 40, slow=True))
    assert len(fast) == len(slow)
    for number, (one, other) in enumerate(zip(fast, slow, strict=True)):
        if one != other and isinstance(one, dict) and isinstance(other, dict):
            different = {name for name in {*one, *other} if one.get(name) != other.get(name)}
            assert not different, (number, different)
        assert one == other, number
    assert fast.count("committed") > len(fast) // 3


def _put(self: Structure, arrays: Sequence[Any], held: Sequence[Any]) -> bool:
    """Always anew."""
    for index, given in enumerate(arrays):
        self._store[f"{self.path}/{index}"] = given
    return False
