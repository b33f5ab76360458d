"""How what a program gives now differs from what it gave before, and how it can go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pmstore.course.records import CHANGES_MAX
from pmstore.torch.keys import called
from pmstore.torch.resume import Resume
from pmstore.torch.settings import Settings, same

SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
"""Hyperparameters that a scheduler writes when it is made."""

_TOLD = 100
"""How many characters of a setting are kept."""
_MOST_SAID = 300
"""How many an error says of one."""
Answers = tuple[tuple[str, str], ...]
_FRESH_OR_NOT: Answers = (("optimizer", "program"), ("optimizer", "store"))
_SETTINGS: Answers = (("optimizer", "settings"), *_FRESH_OR_NOT)
_SCHEDULE: Answers = (("lr_scheduler", "program"), ("lr_scheduler", "settings"))
_NEXT: Answers = (("data", "next epoch"),)
_ATTRIBUTES: Answers = (("attributes", "program"), ("attributes", "store"))
_ANEW: Answers = (("pieces", "program"),)


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that is not what it was."""

    piece: str  # as in a fingerprint: "optimizer", "lr_scheduler/0", "loader", "trainable"
    key: str
    group: int | None  # of an optimizer
    stored: Any
    given: Any
    answers: Answers  # (field of Resume, value); the first ones are told

    def answer(self, resume: Resume) -> tuple[str, str] | None:
        chosen = resume.chosen()
        return next((one for one in self.answers if chosen.get(one[0]) == one[1]), None)

    @property
    def what(self) -> str:
        """The setting, in words."""
        kind, _, key = self.piece.partition("/")
        of = "" if kind in ("trainable", "attributes") else f" of {called(kind, key)}"
        group = f", group {self.group}" if self.group is not None else ""
        return f"{self.key}{of}{group}"

    def __str__(self) -> str:
        told = self.answers[:2]
        ways = " or ".join(f'Resume({field}="{value}")' for field, value in told)
        return f"{self.what}: stored {_short(self.stored)}, given {_short(self.given)}. {ways}"


def _short(value: Any) -> str:
    said = repr(value)
    more = f" ... ({len(said):,} characters)" if len(said) > _MOST_SAID else ""
    return said[:_MOST_SAID] + more


def compare(
    stored: Mapping[str, Settings], given: Mapping[str, Settings], now: Mapping[str, Settings]
) -> list[Difference]:
    """Returns the differences of the pieces that both have. now: what the training made of some
    settings, of the same form; a program that gives that has changed nothing."""
    found: list[Difference] = []
    for piece in given:
        if piece not in stored:
            continue
        kind, ours, theirs = piece.partition("/")[0], stored[piece], given[piece]
        if kind == "loader":
            found += _of_loader(ours, theirs)
        elif kind == "lr_scheduler":
            found += _of_scheduler(piece, ours, theirs)
        elif kind == "scaler":
            found += [
                Difference(piece, key, None, ours[key], theirs[key], _ANEW)
                for key in _changed(ours, theirs)
            ]
        elif kind == "attributes":
            found += [
                Difference(piece, key, None, ours[key], theirs[key], _ATTRIBUTES) for key in ours
            ]
        elif kind == "trainable":
            found += _of_trainable(ours, theirs, now.get(piece, {}))
    scheduled = set(given) == set(stored) and not any(
        one.piece.startswith("lr_scheduler") for one in found
    )
    for piece in given:
        if piece in stored and piece.partition("/")[0] == "optimizer":
            found += _of_optimizer(
                piece, stored[piece], given[piece], now.get(piece, {}), scheduled
            )
    return found


def has_more(stored: Mapping[str, Settings], given: Mapping[str, Settings]) -> bool:
    """Whether something is given that was not known before: a piece, a group, a parameter, an
    attribute of a newer torch."""
    return any(
        piece not in stored
        or not settings.keys() <= stored[piece].keys()
        or len(settings.get("groups", ())) > len(stored[piece].get("groups", ()))
        for piece, settings in given.items()
    )


def _changed(ours: Settings, theirs: Settings) -> list[str]:
    return [key for key in ours if key in theirs and not same(ours[key], theirs[key])]


def _of_loader(ours: Settings, theirs: Settings) -> list[Difference]:
    changed = _changed(ours, theirs)
    if "length of the data set" in changed:  # which says the rest
        others = ("samples of a data epoch", "rows of the data set")
        changed = [key for key in changed if key not in others]
    sizes = ("batch_size", "drop_last")
    # the place can be kept in samples only if their order is the same
    same_order = all(key in sizes for key in changed)
    return [
        Difference(
            "loader",
            key,
            None,
            ours[key],
            theirs[key],
            (("batch_size", "samples"), *_NEXT) if same_order else _NEXT,
        )
        for key in changed
    ]


def _of_scheduler(piece: str, ours: Settings, theirs: Settings) -> list[Difference]:
    if ours["class"] != theirs["class"]:
        fresh: Answers = (("lr_scheduler", "program"),)
        return [Difference(piece, "class", None, ours["class"], theirs["class"], fresh)]
    answers: Answers = (
        ("lr_scheduler", "settings"),
        ("lr_scheduler", "program"),
        ("lr_scheduler", "store"),
    )
    if any(
        ours[key] != theirs.get(key)
        for key in ours
        if key.startswith("schedulers[") and key.endswith("].class")
    ):
        answers = answers[1:2]  # the place of one says nothing of another
    return [
        Difference(piece, key, None, ours[key], theirs[key], answers)
        for key in _changed(ours, theirs)
    ]


def _of_trainable(ours: Settings, theirs: Settings, now: Settings) -> list[Difference]:
    found = []
    for was in (True, False):
        names = [
            name
            for name in _changed(ours, theirs)
            if ours[name] is was and now.get(name) is not theirs[name]
        ]
        if names:
            told = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
            answers = (("trainable", "program"), ("trainable", "store"))
            found.append(
                Difference("trainable", f"requires_grad of {told}", None, was, not was, answers)
            )
    return found


def _of_optimizer(
    piece: str, ours: Settings, theirs: Settings, now: Settings, scheduled: bool
) -> list[Difference]:
    """scheduled: the schedulers are the same, so that a rate that is different was set by hand."""
    if ours["class"] != theirs["class"]:
        return [Difference(piece, "class", None, ours["class"], theirs["class"], _FRESH_OR_NOT[:1])]
    found = []
    held: list[Settings] = now.get("groups", [])
    for number, (old, new) in enumerate(zip(ours["groups"], theirs["groups"], strict=False)):
        here = held[number] if number < len(held) else {}
        base = (old.get("initial_lr", old.get("lr")), new.get("initial_lr", new.get("lr")))
        for key in _changed(old, new):
            if key == "initial_lr" or (key in here and same(here[key], new[key])):
                continue  # the rate's base is compared as the rate
            if key == "lr" and same(*base) and not scheduled:
                continue  # its scheduler's doing
            found.append(
                Difference(piece, key, number, old[key], new[key], _answers(key, old, new))
            )
        told = any((one.group, one.key) == (number, "lr") for one in found)
        as_now = "lr" in here and same(here["lr"], new["lr"])
        if not (same(*base) or told or as_now):
            found.append(Difference(piece, "lr", number, *base, _answers("lr", old, new)))
    return found


def _answers(key: str, old: Settings, new: Settings) -> Answers:
    own: Answers = ()
    if key in ("lr", "weight_decay"):
        own = ((key, "program"), (key, "store"))
    cycled = "max_lr" in old and "max_lr" in new  # the scheduler's settings lie in the group
    if key in SCHEDULED:
        return (*own, *_SETTINGS, *(_SCHEDULE if cycled else _SCHEDULE[:1]))
    return (*own, *_SETTINGS)


# ---- which of a program's differences each choice of its `Resume` is for


class Choices:
    """A choice is for what is different and has it for an answer. If nothing is, it is for all that
    it names, the first time that it is given."""

    def __init__(
        self, resume: Resume, noted: dict[str, str], differences: Iterable[Difference]
    ) -> None:
        """noted: what was chosen at the attach before."""
        self._resume = resume
        self._chosen = resume.chosen()
        self._differences = list(differences)
        self.first: set[str] = {
            field for field, value in self._chosen.items() if noted.get(field) != value
        }

    @property
    def partial(self) -> bool:
        """Tensors are taken by name."""
        return "model" in self._chosen

    @property
    def regrouped(self) -> bool:
        """The optimizers' groups are the program's."""
        return self._chosen.get("optimizer") == "settings"

    @property
    def by_name(self) -> bool:
        """Whether any state is."""
        return self.partial or self.regrouped

    @property
    def unanswered(self) -> list[Difference]:
        return [one for one in self._differences if self.answer(one) is None]

    def answer(self, difference: Difference) -> tuple[str, str] | None:
        return difference.answer(self._resume)

    def told(self) -> list[list[str]]:
        """Returns the differences as texts: what, the stored and the given value, the choice."""
        return [
            [
                one.what[:_TOLD],
                str(one.stored)[:_TOLD],
                str(one.given)[:_TOLD],
                f'{field}="{value}"',
            ]
            for one in self._differences[:CHANGES_MAX]
            for field, value in (self.answer(one) or ("", ""),)
        ]

    def answered(self, piece: str) -> list[Difference]:
        """Returns the differences of that piece that have an answer."""
        return [
            one for one in self._differences if one.piece == piece and self.answer(one) is not None
        ]

    def hit(self, field: str, value: str, piece: str, group: int | None = None) -> bool:
        """Whether that choice was made for the piece (for the optimizer's group)."""
        if self._chosen.get(field) != value:
            return False
        mine = [one for one in self._differences if self.answer(one) == (field, value)]
        if not mine:
            return field in self.first
        return any(one.piece == piece and (group is None or one.group == group) for one in mine)

    def takes_rate(self, piece: str, group: int) -> bool:
        """Whether the group's learning rate is the program's."""
        return self.hit("lr", "program", piece, group) or any(
            (one.group, one.key) == (group, "lr")
            and self.answer(one) in (("optimizer", "settings"), ("lr", "program"))
            for one in self.answered(piece)
        )

    def differs_in_rate(self, piece: str, group: int) -> bool:
        return any((one.group, one.key) == (group, "lr") for one in self.answered(piece))
