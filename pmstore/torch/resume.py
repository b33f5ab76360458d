"""What a program says to `attach` when it is not the one that the stored run was made by."""

from __future__ import annotations

from dataclasses import dataclass, fields

_ACCEPTED = {
    "lr": ("program", "store"),
    "weight_decay": ("program", "store"),
    "optimizer": ("settings", "program", "store"),
    "lr_scheduler": ("settings", "program", "store"),
    "trainable": ("program", "store"),
    "attributes": ("program", "store"),
    "batch_size": ("samples",),
    "data": ("next epoch",),
    "model": ("partial",),
    "pieces": ("program",),
    "loops": ("program",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What to do where the program differs from the stored run: `attach(..., resume=Resume(...))`.

    A difference that is not answered here is refused. "program" takes the program's, "store" goes
    on with the stored. What was chosen is committed when `attach` returns, and counts from then on
    as what the program gives. So a `Resume` can stay in the program: where nothing is different it
    does nothing, but the first time that it is given.

    Args:
        lr: learning rate. With a scheduler "program" takes the program's base rate, at the stored
            place in the schedule.
        weight_decay: as it says.
        optimizer: "settings": all that is different of hyperparameters and parameter groups is the
            program's; the state is kept, by the parameters' names. "program": the program's
            optimizer as it is, without the stored state; under a stored scheduler its learning rate
            goes on.
        lr_scheduler: "settings": what is different of its settings (T_max, step_size, ...) is the
            program's; its place is kept. "program": the program's scheduler as it is, from its
            beginning, with the learning rate that it set.
        trainable: which parameters have `requires_grad`.
        attributes: plain attributes of modules that the run has changed and the program gives
            another value than before.
        batch_size: "samples": the place in the data epoch is kept in samples. If it is none where a
            batch of the new size begins, the first batch is the rest of that batch.
        data: "next epoch": what is left of the data epoch is skipped, if any of it was trained.
        model: "partial": tensors are taken by their names. Those that the program adds are as it
            initialised them, those it has no more are dropped. One that has more rows (its first
            dimension) keeps the stored ones, and the others are the program's; one that has fewer
            loses the last. Another dtype is converted. The optimizer's state follows: of new rows
            it is zeros for the optimizers of torch.optim whose state begins so, else the
            parameter's state begins anew.
        pieces: "program": what is given now and was not before (scheduler, loader, stateful, ...)
            begins as the program gives it; what is no longer given is dropped from the store.
        loops: "program": the loops of the run are others than before, or stand in another order.
            Each counts as one that begins now: what stands before it is done, once.

    Raises:
        ValueError: a value that the field does not take.
    """

    lr: str | None = None
    weight_decay: str | None = None
    optimizer: str | None = None
    lr_scheduler: str | None = None
    trainable: str | None = None
    attributes: str | None = None
    batch_size: str | None = None
    data: str | None = None
    model: str | None = None
    pieces: str | None = None
    loops: str | None = None

    def __post_init__(self) -> None:
        for name, value in self.chosen().items():
            if value not in _ACCEPTED[name]:
                takes = " or ".join(f'"{one}"' for one in _ACCEPTED[name])
                raise ValueError(f"Resume({name}={value!r}): it takes {takes}")

    def __repr__(self) -> str:
        chosen = ", ".join(f'{name}="{value}"' for name, value in self.chosen().items())
        return f"Resume({chosen})"

    def chosen(self) -> dict[str, str]:
        """What is answered, by field; plain data."""
        answers = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in answers.items() if value is not None}
