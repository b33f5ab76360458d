"""State in places where programs keep it beside parameters, buffers and moments: a run that was
stopped, rolled back and resumed ends in the same bits."""

from __future__ import annotations

import copy
import datetime as dt
import math
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Subset
from training import assert_same, contents

import pmstore
from pmstore.objects.structure import encode
from pmstore.torch import AttachError, ChangedError, Resume, Run, attach
from pmstore.torch._random.search import as_generator

Step = Callable[[int], None]


class Preconditioned(torch.optim.Optimizer):
    """Its state of a parameter has no tensor at its top: a list of matrices, as Shampoo's, and
    numbers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    state["pre"] = [torch.eye(size) for size in parameter.shape]
                    state["steps"] = 0
                state["steps"] += 1
                for at in range(gradient.ndim):
                    matrix = gradient.transpose(0, at).reshape(gradient.shape[at], -1)
                    state["pre"][at] += matrix @ matrix.T
                parameter -= group["lr"] * gradient / (state["pre"][0].trace() + state["steps"])


class Snapshot:
    """Clones of parameters, which require gradients, as moving averages have them."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = [one.clone() for one in model.parameters()]

    def take(self, model: nn.Module) -> None:
        self.weights = [
            mine * 0.5 + one for mine, one in zip(self.weights, model.parameters(), strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def lists_in_an_optimizer() -> tuple[dict[str, Any], Step]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = Preconditioned(model.parameters())

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


def tensors_that_require_gradients() -> tuple[dict[str, Any], Step]:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = Snapshot(model)

    def step(number: int) -> None:
        assert all(one.requires_grad for one in snapshot.weights)
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        snapshot.take(model)

    return {"model": model, "optimizer": optimizer, "stateful": {"snapshot": snapshot}}, step


def gradients_in_one_buffer() -> tuple[dict[str, Any], Step]:
    """They are accumulated over three steps."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    parameters = list(model.parameters())
    flat, at = torch.zeros(sum(one.numel() for one in parameters)), 0
    for one in parameters:
        one.grad = flat[at : at + one.numel()].view_as(one)
        at += one.numel()
    views = [one.grad for one in parameters]

    def step(number: int) -> None:
        model(torch.randn(5, 3)).square().sum().backward()
        assert all(one.grad is view for one, view in zip(parameters, views, strict=True))
        if number % 3 == 2:
            with torch.no_grad():
                for one, view in zip(parameters, views, strict=True):
                    one.sub_(view, alpha=0.01)
            flat.zero_()

    return {"model": model, "optimizer": torch.optim.SGD(parameters, lr=0.1)}, step


def sparse_gradients_of_another_optimizer() -> tuple[dict[str, Any], Step]:
    embedding, head = nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 1)
    sparse = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
    dense = torch.optim.Adam(head.parameters(), lr=0.1)

    def step(number: int) -> None:
        loss = head(embedding(torch.randint(0, 50, (8, 3)))).square().mean()
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()

    model = nn.ModuleDict({"embedding": embedding, "head": head})
    return {"model": model, "optimizer": dense, "stateful": {"sparse": sparse}}, step


class Attributes(nn.Module):
    """Changes whatever a module may keep in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tau = 1.0
        self.seen: list[Any] = []
        self.at = {"row": 0, "names": ["a"]}
        self.recent: deque[int] = deque(maxlen=3)
        self.peak = np.float32(0)
        self.counts = np.zeros(4, np.int64)
        self.center = torch.zeros(3)
        self.best: float | None = None
        self._private = 0
        self.noise = torch.Generator().manual_seed(3)
        self.choice = random.Random(4)
        self.parts = [np.random.default_rng(5)]
        self.table = list(range(100_000))  # not looked at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tau *= 0.9
        self.seen.append(round(self.tau, 3))
        self.at["row"] += 1
        self.recent.append(len(self.seen))
        self.peak = max(self.peak, np.float32(x.detach().max()))
        self.counts[self.choice.randrange(4)] += 1
        self.center = self.center * 0.5 + x.detach().mean(0)
        self.best = min(self.best or 9.0, self.tau)
        self._private += 1
        self.last = float(self.parts[0].random())  # was not there before
        if self._private % 2:
            self.every = self._private
        elif hasattr(self, "every"):
            del self.every
        self.activation = x + self.last  # no data: a gradient flows through it
        drawn = torch.randn(x.shape, generator=self.noise)
        return self.activation + self.center + drawn * self.tau / (1 + self.counts[0])


def attributes_of_modules() -> tuple[dict[str, Any], Step]:
    """And a part that is frozen from the third step on."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Attributes(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        if number == 2:
            model[1].eval()
        if number == 4:
            model[1].momentum = 0.5
        if number == 6:
            model[1].train()
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()

    return {"model": {"net": model, "loss": nn.L1Loss()}, "optimizer": optimizer}, step


class Noise:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)


class Replaced(nn.Module):
    """Keeps objects, in whose place the program puts others."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise(1)
        self.scale: Any = math.sqrt  # no data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale[0] if isinstance(self.scale, list) else self.scale(2)
        return x * scale + self.noise.rng.random()


def objects_of_modules() -> tuple[dict[str, Any], Step]:
    """That become others: one with a generator in it, and one that becomes data."""
    replaced = Replaced()
    model = nn.Sequential(nn.Linear(3, 3), replaced, nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        if number == 3:
            replaced.noise = Noise(2)
        if number == 4:
            replaced.scale = [0.5]
        optimizer.zero_grad()
        model(torch.ones(5, 3)).square().sum().backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


class Stage(Enum):
    FIRST = "first"
    LATER = "later"


class Recurrent(nn.Module):
    """Its hidden state is of the graph of the step before, until the next one detaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 3)
        self.hidden: Any = None
        self.means: list[torch.Tensor] = []
        self.stage = Stage.FIRST
        self.rng = np.random.default_rng(5)
        self.left: Any = None  # what a forward leaves behind, for looking at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = None if self.hidden is None else tuple(one.detach() for one in self.hidden)
        self.hidden = self.cell(x, before)
        self.means = [*self.means, self.hidden[0].mean()][-3:]
        self.left = self.hidden[0].repeat(40_000, 1)
        noise = float(self.rng.spawn(1)[0].normal())
        factor = noise if self.stage is Stage.FIRST else 2.0
        return self.hidden[0] * factor + sum(one.detach() for one in self.means)


def hidden_states_of_modules() -> tuple[dict[str, Any], Step]:
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        if number == 4:
            model.stage = Stage.LATER
        optimizer.zero_grad()
        model(torch.ones(5, 3)).square().sum().backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


def seed_sequences() -> tuple[dict[str, Any], Step]:
    """Each step draws from a child of its own."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sequence, rng = np.random.SeedSequence([1, 2]), np.random.default_rng(3)

    def step(number: int) -> None:
        children = [np.random.default_rng(sequence.spawn(1)[0]), *rng.spawn(number % 3)]
        noise = sum(float(one.normal()) for one in children)
        optimizer.zero_grad()
        (model(torch.ones(5, 3)) * noise).sum().backward()
        optimizer.step()

    return {
        "model": model,
        "optimizer": optimizer,
        "stateful": {"sequence": sequence, "rng": rng},
    }, step


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.recent: deque[int] = deque(maxlen=3)
        self.alias = self.recent
        self.nested: Any = {"a": [[1]], "b": ([], deque())}
        self.first, self.second = [0], [1]


def collections_that_others_hold() -> tuple[dict[str, Any], Step]:
    """The program holds what lies in them, and puts one in the place of another."""
    model, given = Holding(), [7]
    inner, of_tuple = model.nested["a"][0], model.nested["b"][1]

    def step(number: int) -> None:
        assert model.alias is model.recent
        assert given == [7]
        for one in (inner, of_tuple, model.alias):
            one.append(number)
        model.second.append(number)
        if number == 7:
            model.first, model.second = model.second, given

    return {"model": model}, step


PROGRAMS = [
    collections_that_others_hold,
    hidden_states_of_modules,
    seed_sequences,
    attributes_of_modules,
    objects_of_modules,
    lists_in_an_optimizer,
    tensors_that_require_gradients,
    gradients_in_one_buffer,
    sparse_gradients_of_another_optimizer,
]


def life(
    path: Path, program: Callable[[], tuple[dict[str, Any], Step]], *ends: int, back: int = -1
) -> dict[str, tuple[str, bytes]]:
    """What the store holds after lives that end at these steps. back: a step that is done, taken
    back and done again."""
    held: dict[str, tuple[str, bytes]] = {}
    for until in ends:
        torch.manual_seed(1)
        given, step = program()
        with pmstore.open(path) as store:
            run = attach(store, **given)
            while run.step < until:
                number = run.step
                with run.next_step():
                    step(number)
                if number == back:
                    run.rollback()
                    back = -1
                else:
                    run.commit()
            run.detach()
            held = contents(store)
    return held


@pytest.mark.filterwarnings("ignore:.*is too large to be kept as an attribute:RuntimeWarning")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_in_pieces_ends_in_the_same_bits(tmp_path: Path, program: Any) -> None:
    whole = life(tmp_path / "whole.pm", program, 9)
    assert_same(life(tmp_path / "pieces.pm", program, 1, 2, 5, 6, 9, back=7), whole)


def test_an_optimizer_given_as_stateful_uses_gradients(tmp_path: Path) -> None:
    """They are dead afterwards: not kept, and refused where they are used again."""
    model = nn.Linear(3, 3)
    beside = torch.optim.SGD([model.weight], lr=0.1)
    attached = torch.optim.SGD([model.bias], lr=0.1)
    with pmstore.open(tmp_path / "run.pm") as store:
        run = attach(store, model=model, optimizer=attached, stateful={"beside": beside})
        for _ in range(3):
            with run.next_step():
                model.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                beside.step()
                attached.step()
            run.commit()
            assert "run/gradients" not in store
        run.rollback()
        told = r"call zero_grad\(\) before backward"
        with pytest.raises(pmstore.TransactionError, match=told), run.next_step():
            beside.step()
        run.detach()


class Tempered(nn.Module):
    def __init__(self, tau: float = 1.0, rate: float = 0.1) -> None:
        super().__init__()
        self.tau, self.rate = tau, rate
        self.weight = nn.Parameter(torch.ones(2))
        self.history: list[float] = []


@contextmanager
def tempered(path: Path, resume: Resume | None = None, **given: float) -> Iterator[tuple[Any, Run]]:
    model = Tempered(**given)
    with pmstore.open(path) as store:
        run = attach(store, model=model, resume=resume or Resume())
        yield model, run
        run.detach()


@contextmanager
def step(run: Run) -> Iterator[None]:
    with run.next_step():
        yield
    run.commit()


def test_an_attribute_that_the_run_does_not_change_is_the_programs(path: Path) -> None:
    with tempered(path) as (model, run):
        with step(run):
            pass
        assert "run/attributes" not in run._steps.store
        with step(run):
            model.tau = 0.5
    for rate in (0.2, 0.3):
        with tempered(path, rate=rate) as (model, run):
            assert (model.tau, model.rate) == (0.5, rate)
            with run.next_step():
                model.rate = 1.0
            run.rollback()
            assert (model.tau, model.rate) == (0.5, rate)
            with step(run):
                pass


def test_an_attribute_that_both_have_changed_is_asked_for(path: Path) -> None:
    with tempered(path) as (model, run), step(run):
        model.tau = 0.5
    for given in (1.0, 0.5):  # as it was, as it is
        with tempered(path, tau=given) as (model, run):
            assert model.tau == 0.5
    told = r"tau of the model: stored 1.0, given 2.0. Resume\(attributes=\"program\"\)"
    with pytest.raises(ChangedError, match=told), tempered(path, tau=2.0):
        pass
    with tempered(path, Resume(attributes="store"), tau=2.0) as (model, run), step(run):
        assert model.tau == 0.5
    with tempered(path, tau=2.0) as (model, run):
        assert model.tau == 0.5
    with pytest.raises(ChangedError), tempered(path, tau=3.0):
        pass
    for _ in range(2):
        with tempered(path, Resume(attributes="program"), tau=3.0) as (model, run):
            assert model.tau == 3.0


def test_an_error_shows_the_beginning_of_a_long_attribute(path: Path) -> None:
    with tempered(path, tau="a" * 10_000) as (model, run), step(run):  # type: ignore[arg-type]
        model.tau = "b"
    with pytest.raises(ChangedError, match=r"ccc \.\.\. \(10,002 characters\)") as raised:
        with tempered(path, tau="c" * 10_000):  # type: ignore[arg-type]
            pass
    assert len(str(raised.value)) < 2000


def test_lists_that_are_shared_stay_shared(path: Path) -> None:
    with tempered(path) as (model, run):
        history = model.history
        for number in range(3):
            with step(run):
                history.append(0.5 * number)
        with run.next_step():
            history.append(9.0)
        run.rollback()
        assert model.history is history
        assert history == [0.0, 0.5, 1.0]
    with tempered(path) as (model, run):
        assert model.history == [0.0, 0.5, 1.0]


def test_a_list_that_grows_without_bounds_is_told_once_and_kept_no_more(path: Path) -> None:
    with tempered(path) as (model, run):
        with step(run):
            model.history += [0.5] * 20
        with (
            pytest.warns(RuntimeWarning, match=r"history of the model changed.*grown to"),
            step(run),
        ):
            model.history += [0.5] * 200_000
        with step(run):
            model.history.append(0.5)  # a second warning would be an error
            model.cache = [torch.zeros(1 << 19)]  # large from its beginning: not looked at
            model.table = np.zeros(1 << 10)
        with pytest.warns(RuntimeWarning, match="cache of the model changed"), step(run):
            model.cache.append(torch.zeros(1))
        with pytest.warns(RuntimeWarning, match="table of the model changed.*grown to"), step(run):
            model.table = np.zeros(1 << 20)
        with run.next_step():
            model.tau = 3.0
        run.rollback()
        assert (model.tau, len(model.history), model.table.size) == (1.0, 200_021, 1 << 20)
    with tempered(path) as (model, run):
        assert model.history == []  # as the program makes it
        assert not hasattr(model, "table")


class Attributed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.gate_v = nn.Parameter(torch.ones(2))
        self.gate = 1.0  # no weight that torch computes
        self.calls: dict[str, float] = defaultdict(float)
        self.queue = torch.zeros(600_000)
        self.counts = list(range(40_000))
        self.left: torch.Tensor | None = None


@contextmanager
def attributes(path: Path) -> Iterator[tuple[Attributed, Run]]:
    model = Attributed()
    with pmstore.open(path) as store:
        run = attach(store, model=model)
        yield model, run
        run.detach()


def test_an_attribute_with_the_name_of_a_computed_weight_and_one_with_a_factory(path: Path) -> None:
    for life in range(3):
        with attributes(path) as (model, run):
            assert model.gate == 0.5**life
            assert model.calls == ({"a": life} if life else {})
            with step(run):
                model.gate *= 0.5
                model.calls["a"] += 1
            with run.next_step():
                model.calls["b"] += 1
            run.rollback()
            assert model.calls == {"a": life + 1}
            assert model.calls["c"] == 0.0  # its factory is there
            del model.calls["c"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("queue", lambda model: model.queue[3:5000].add_(1.0)),
        ("queue", lambda model: setattr(model, "queue", torch.ones(600_000))),
        ("counts", lambda model: model.counts.append(1)),
        ("left", lambda model: setattr(model, "left", torch.ones(600_000))),
    ],
)
def test_a_large_attribute_that_changes_is_told_once(path: Path, name: str, change: Any) -> None:
    with attributes(path) as (model, run):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with step(run):
                model.left = model.weight.repeat(300_000)  # of a graph: nothing is said
            with step(run):
                model.left = torch.zeros(600_000)  # large when it is first seen
        with pytest.warns(RuntimeWarning, match=f"{name} of the model changed"), step(run):
            change(model)
        for _ in range(2):
            with step(run):
                change(model)  # a second warning would be an error


def test_a_list_in_two_places_of_the_state_is_told_once(path: Path) -> None:
    with attributes(path) as (_, run):
        with step(run):
            run.state.update(best=(one := torch.ones(1)), last=one, word="a", other="a")
        told = r"run.state\['a'\] and run.state\['b'\]\['deep'\]\[0\] hold the same list"
        with pytest.warns(RuntimeWarning, match=told), step(run):
            run.state.update(a=(shared := [1]), b={"deep": [shared]})
        with step(run):
            run.state["a"].append(2)  # a second warning would be an error


@pytest.mark.parametrize(
    ("shared", "place"),
    [
        (lambda one: [one, {"b": one}], r"\['a'\]\[1\]\['b'\]"),
        (lambda one: (one, one), r"\['a'\]\[1\]"),
        (lambda one: [(both := (0, one)), both], r"\['a'\]\[1\]\[1\]"),
        (lambda one: deque([one, one]), r"\['a'\]\[1\]"),
    ],
)
def test_what_is_shared_within_one_value_of_the_state_is_told(
    path: Path, shared: Any, place: str
) -> None:
    with attributes(path) as (_, run):
        told = rf"run.state\['a'\].* and run.state{place} hold the same set"
        with pytest.warns(RuntimeWarning, match=told), step(run):
            run.state["a"] = shared({1})


def test_a_state_that_contains_itself_is_refused(path: Path) -> None:
    with attributes(path) as (_, run):
        with run.next_step():
            run.state["a"] = run.state
        with pytest.raises(ValueError, match=r"run\.state: a value contains itself"):
            run.commit()
        run.rollback()


def test_defaultdicts_in_the_state(path: Path) -> None:
    with attributes(path) as (_, run):
        with run.next_step():
            run.state["a"] = {"b": defaultdict(lambda: 1)}
        with pytest.raises(TypeError, match=r"run.state: .* \['a'\]\['b'\]: .* without a factory"):
            run.commit()
        run.rollback()
        assert run.state == {}
        with step(run):
            run.state["a"] = {"b": defaultdict(int)}
    with attributes(path) as (_, run), step(run):
        run.state["a"]["b"]["c"] += 1


class Access(Flag):
    READ = 1
    WRITE = 2


class Named(NamedTuple):
    first: Any
    other: Any = 3


VALUES: dict[str, Any] = {
    "flags": Access.READ | Access.WRITE,
    "namedtuple": Named(torch.ones(2), [Named("a")]),
    "list of namedtuples": [Named(1), Named(2)],
    "members as keys": {Stage.FIRST: 1, (0, Stage.LATER): [Access(0)]},
    "numbers of numpy": Counter(np.array([1, 1, 2])),
    "tuples as keys": {(1, 2): 3},
    "nested defaultdicts": {"a": [defaultdict(list, b=[1])], "c": defaultdict(int, d=2)},
    "members in a set": [{Stage.FIRST}, frozenset({(1, Stage.LATER)})],
    "plain": [Path("a"), bytearray(b"b"), range(3), slice(1), Fraction(1, 3), Decimal("1.0")],
    "time": dt.datetime(2020, 1, 2),
    "of torch": [torch.float16, torch.device("cpu"), torch.Size([2])],
    "a shape": torch.Size([2]),
}


@pytest.mark.parametrize("where", ["state", "model", "data"])
@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_what_it_is(path: Path, where: str, name: str) -> None:
    for life in range(2):
        model, rows = nn.Linear(3, 1), Rows()
        with suppress(Kill), pmstore.open(path) as store:
            run = attach(store, model=model, loader=DataLoader(rows), policy=None)
            place: Any = {"state": run.state, "model": vars(model), "data": vars(rows)}[where]
            if life == 1:
                assert repr(place["held"]) == repr(VALUES[name])
                break
            for number, batch in enumerate(run.batches(epochs=1)):
                model(batch)
                place["held"] = copy.deepcopy(VALUES[name])
                if number == 1:
                    run.rollback()
                    assert repr(place["held"]) == repr(VALUES[name])
                if number == 2:
                    raise Kill


class Text(str):
    pass


LOCAL: Any = Enum("Kind", "A B")


class Local(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.kind: Any = Enum("Kind", "A B")
        self.stage: Any = self.kind.A
        self.calls: Any = {"a": defaultdict(lambda: 1)}
        self.point: Any = None


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("stage", lambda model: model.kind.B, "the enumeration Kind is found under no name"),
        ("calls", lambda model: {}, "a defaultdict comes back without a factory"),
        ("point", lambda model: namedtuple("Point", "x")(1), "the namedtuple Point is found under"),
        ("point", lambda model: defaultdict(lambda: 1), "a defaultdict comes back without"),
    ],
)
def test_an_attribute_that_would_come_back_as_another_type_is_told_once(
    path: Path, name: str, change: Any, told: str
) -> None:
    model = Local()
    with pmstore.open(path) as store:
        run = attach(store, model=model)
        for _ in range(2):
            with step(run):
                pass
        with pytest.warns(RuntimeWarning, match=f"{name} of the model changed.*{told}"), step(run):
            setattr(model, name, change(model))
        with step(run):
            setattr(model, name, change(model))  # a second warning would be an error
        run.detach()


@pytest.mark.parametrize(
    ("held", "more"),
    [
        ({"weights": Text("a"), "calls": 0, "seen": torch.ones(1)}, {"calls": 1}),
        ({"weights": torch.ones(1), "stage": LOCAL.A}, {"stage": LOCAL.B}),
        ({"calls": [defaultdict(lambda: 1)]}, {"calls": [defaultdict(lambda: 1, a=1)]}),
    ],
)
def test_a_change_within_what_would_come_back_as_another_type_is_told(
    path: Path, held: Any, more: Any
) -> None:
    model: Any = nn.Linear(3, 1)
    model.held = copy.deepcopy(held)
    with pmstore.open(path) as store:
        run = attach(store, model=model)
        with step(run):
            model.held = copy.copy(model.held)
        with pytest.warns(RuntimeWarning, match="held of the model changed"), step(run):
            model.held.update(more)
        run.detach()


class NotLookedAt(list[Any]):
    """Fails where all of it is looked at."""

    def __iter__(self) -> Any:
        raise AssertionError


def test_what_is_no_data_is_not_searched_in_each_step(path: Path) -> None:
    model: Any = nn.Linear(3, 1)
    model.held = [model, NotLookedAt()]
    with pmstore.open(path) as store:
        run = attach(store, model=model)
        for _ in range(2):
            with step(run):
                pass
        run.detach()


def test_an_attribute_that_contains_itself_is_no_data(path: Path) -> None:
    model: Any = nn.Linear(3, 1)
    model.held = [1]
    model.held.append(model.held)
    with pmstore.open(path) as store:
        run = attach(store, model=model)
        with step(run):
            model.held[0] = 2
        run.rollback()
        run.detach()


COLLECTIONS: list[Any] = [
    deque([1], maxlen=3),
    {1},
    bytearray(b"a"),
    defaultdict(int, a=1),
    OrderedDict(a=1),
    Counter("a"),
]


@pytest.mark.parametrize("where", ["state", "model", "data"])
@pytest.mark.parametrize("value", COLLECTIONS, ids=lambda one: type(one).__name__)
def test_collections_that_a_program_holds_stay_the_objects_that_they_are(
    path: Path, where: str, value: Any
) -> None:
    """Over a roll back, and where a head is taken back at a resume."""
    changed = copy.deepcopy(value)
    change(changed)
    for life in range(2):
        model, rows = nn.Linear(3, 1), Rows()
        with suppress(Kill), pmstore.open(path) as store:
            run = attach(store, model=model, loader=DataLoader(rows), policy=None)
            place: Any = {"state": run.state, "model": vars(model), "data": vars(rows)}[where]
            held = place.setdefault("held", copy.deepcopy(value))
            if life == 1:
                assert held == changed
                change(held, 3)
            for number, batch in enumerate(run.batches(epochs=1)):
                model(batch)
                if life == 1:
                    assert held == changed
                elif number == 1:
                    change(held)
                    run.rollback()
                    assert held == value
                elif number == 2:
                    change(held)
                elif number == 3:
                    raise Kill
            run.detach()
        assert place["held"] is held
        assert repr(held) == repr(changed)


class Kill(Exception):
    """The end of a life: it leaves the store, which goes back to its last commit."""


def change(held: Any, more: int = 2) -> None:
    if isinstance(held, dict):
        held["b"] = more
    elif isinstance(held, set):
        held.add(more)
    else:
        held.append(more)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.stage, self.past = Stage.FIRST, [Stage.FIRST]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(3)


class Hook:
    """Has a name, as those of torch that compute a weight."""

    def __init__(self, name: str) -> None:
        self.name = self._tensor_name = name

    def __call__(self, module: nn.Module, given: Any) -> None:
        pass


class Tied(nn.Module):
    """Has views of its parameters as attributes, and what its forwards leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 6) * 0.1)
        self.kept = torch.nn.utils.weight_norm(nn.Linear(6, 6))
        self.scale_orig = nn.Parameter(torch.ones(1))
        self.scale = torch.zeros(1)  # no weight that torch computes
        self.register_forward_pre_hook(Hook("scale"))
        self.head: Any = None
        self.last: Any = None
        self.large: Any = None
        self.copied = self.table.detach().repeat(60_000, 1)
        self.alias = self.copied.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.head is None:
            self.head = self.table.t()
        self.first, self.second = self.table.split(3, 1)
        if self.training:
            with torch.no_grad():
                self.scale += 1
        self.last = self.kept(torch.cat([x @ self.first, x @ self.second], 1) * self.scale)
        self.large = self.last.repeat(100_000, 1)
        return self.last @ self.head + self.scale_orig


def tied_views() -> tuple[dict[str, Any], Step]:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torch.inference_mode():
        model.eval()(torch.ones(2, 4))  # leaves tensors behind that nobody may write to
    model.train()
    model.head = None

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_views_of_parameters_and_what_forwards_leave_behind(tmp_path: Path) -> None:
    whole = life(tmp_path / "whole.pm", tied_views, 6)
    assert_same(life(tmp_path / "pieces.pm", tied_views, 1, 2, 4, 6, back=3), whole)


def test_a_sequence_stays_the_seed_that_it_is_in_a_worker() -> None:
    sequence = np.random.SeedSequence(range(3))
    found = as_generator(sequence)
    assert found is not None
    draws = []
    for seed in (7, 8, 7):
        found.seed(seed)  # as in a worker process
        assert sequence.entropy == range(3)
        draws.append(np.random.default_rng(sequence.spawn(1)[0]).random())
    assert draws[0] == draws[2] != draws[1]
    state, child = found.get_state(), sequence.spawn(1)[0].generate_state(2)
    encode(state)
    found.set_state(state)
    assert (sequence.spawn(1)[0].generate_state(2) == child).all()


class Cached(torch.utils.data.Dataset[Any]):
    """It keeps what it has made in collections that are empty at `attach`."""

    def __init__(self) -> None:
        self.made: OrderedDict[int, Any] = OrderedDict()
        self.last: deque[Any] = deque(maxlen=2)
        self.count: Counter[str] = Counter()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        self.made[index] = object()
        self.last.append(self.made[index])
        self.count["made"] += 1
        return torch.ones(3)


def test_a_data_set_with_a_cache_of_objects(path: Path) -> None:
    for epochs in (1, 3):
        model, data = nn.Linear(3, 1), Cached()
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        with pmstore.open(path) as store:
            run = attach(store, model=model, optimizer=sgd, loader=DataLoader(data, 2))
            for epoch in run.epochs(epochs):
                for batch in epoch:
                    sgd.zero_grad()
                    model(batch).sum().backward()
                    sgd.step()
        assert data.count == {"made": 4 * epochs}


class Current(nn.Linear):
    now: Any = -1


def test_the_number_of_an_epoch_is_kept_as_a_number(path: Path) -> None:
    """In the state, the store, a list, a module and a sampler."""
    for epochs in (1, 2):
        model = Current(3, 1)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        sampler = DistributedSampler(Rows(), num_replicas=1, rank=0)
        loader = DataLoader(Rows(), 2, sampler=sampler)
        with pmstore.open(path) as store:
            run = attach(store, model=model, optimizer=sgd, loader=loader)
            if epochs == 2:
                assert dict(run.state) == {"best": 0, "seen": {0: [0]}}
                assert (type(run.state["best"]), type(model.now), model.now) == (int, int, 0)
            for epoch in run.epochs(epochs):
                sampler.set_epoch(epoch)
                for batch in epoch:
                    sgd.zero_grad()
                    model(batch).sum().backward()
                    sgd.step()
                model.now = run.state["best"] = store["epoch"] = epoch
                run.state["seen"] = {epoch: [epoch]}
                store.list("history").append(epoch)
            assert type(store["epoch"]) is int
            assert [*store.list("history")] == [*range(epochs)]


def test_a_member_of_an_enumeration_in_a_data_set_comes_back_as_itself(path: Path) -> None:
    for life in range(2):
        rows, model = Rows(), nn.Linear(3, 1)
        with pmstore.open(path) as store:
            run = attach(store, model=model, loader=DataLoader(rows))
            assert rows.stage is (Stage.LATER if life else Stage.FIRST)
            assert rows.past == [Stage.FIRST, Stage.LATER][: life + 1]
            for batch in run.batches(epochs=life + 1):
                model(batch)
                if rows.stage is Stage.FIRST:
                    rows.stage = Stage.LATER
                    rows.past.append(Stage.LATER)
            run.detach()


class Curriculum(torch.utils.data.Dataset[torch.Tensor]):
    """Has more parts from epoch to epoch."""

    def __init__(self) -> None:
        self.parts = [[torch.full((3,), 4.0 * part + at) for at in range(4)] for part in range(3)]
        self.active: list[Any] = [Subset(self.parts[0], range(4))]  # type: ignore[arg-type]

    def choose(self, epoch: int) -> None:
        self.active = [Subset(one, range(4)) for one in self.parts[: epoch + 1]]  # type: ignore[arg-type]

    def __len__(self) -> int:
        return 4 * len(self.active)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.active[index // 4][index % 4]  # type: ignore[no-any-return]


def rows_of(path: Path, rows: Any, kill: int, *, append: bool = False) -> list[Any]:
    """The epoch and the first number of each batch, until a batch is trained on so often."""
    seen: list[Any] = []
    model = nn.Linear(3, 1)
    with suppress(Kill), pmstore.open(path) as store:
        run = attach(store, model=model, loader=DataLoader(rows, batch_size=2), policy=None)
        for epoch in run.epochs(3):
            if isinstance(rows, Curriculum):
                rows.choose(int(epoch))
            for batch in epoch:
                model(batch)
                if len(seen) == kill:
                    raise Kill
                seen.append((int(epoch), batch[0, 0].item()))
            if append and epoch == 0:
                rows.datasets.append(Curriculum())
                rows.cumulative_sizes = rows.cumsum(rows.datasets)
            if len(seen) == kill:
                run.commit()
                raise Kill
        run.detach()
    return seen


@pytest.mark.parametrize("kill", [2, 3, 6, 7])
def test_data_sets_that_each_epoch_chooses(path: Path, kill: int) -> None:
    whole = rows_of(path.with_name("whole.pm"), Curriculum(), -1)
    assert rows_of(path, Curriculum(), kill) + rows_of(path, Curriculum(), -1) == whole


@pytest.mark.parametrize("kill", [2, 4, 6])
def test_data_sets_that_were_added_have_to_be_there_at_a_resume(path: Path, kill: int) -> None:
    rows_of(path, ConcatDataset([Curriculum()]), kill, append=True)
    told = r"dataset\.datasets held 2 data sets at the last commit, and holds 1 now.*before attach"
    with pytest.raises(AttachError, match=told):
        rows_of(path, ConcatDataset([Curriculum()]), -1)


class Averaged(nn.Module):
    """Has a buffer that gets its first value, and its shape, in a forward."""

    def __init__(self, first: torch.Tensor | None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("mean", first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = x.detach().mean(0)
        known = self.mean is not None and self.mean.numel()
        self.mean = self.mean * 0.5 + now if known else now
        return self.layer(x + self.mean)  # type: ignore[no-any-return]


def averaged() -> tuple[dict[str, Any], Step]:
    model = nn.Sequential(Averaged(torch.empty(0)))

    def step(number: int) -> None:
        model.zero_grad()
        model(torch.randn(5, 3)).sum().backward()

    return {"model": model}, step


def test_a_buffer_that_begins_empty(tmp_path: Path) -> None:
    whole = life(tmp_path / "whole.pm", averaged, 6)
    assert_same(life(tmp_path / "pieces.pm", averaged, 1, 2, 4, 6, back=3), whole)


def test_a_buffer_that_begins_as_none_is_refused_with_what_to_write(path: Path) -> None:
    model = nn.Sequential(Averaged(None))
    told = r"in place of None write register_buffer\('mean', torch.empty\(0\)\)"
    with pytest.raises(AttachError, match=told) as error, pmstore.open(path) as store:
        run = attach(store, model=model)
        with run.next_step():
            model(torch.ones(2, 3))
        run.commit()
    assert "add layers" not in str(error.value)
