"""Which of a program's differences each choice of its `Resume` is for."""

from __future__ import annotations

from collections.abc import Iterable

from pmstore.torch._migrate.differences import Difference
from pmstore.torch.resume import Resume


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

    def answered(self, piece: str) -> list[Difference]:
        """With an answer, of that piece."""
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
