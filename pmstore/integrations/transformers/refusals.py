"""Refuses what a Trainer cannot be kept with, and settings that are not what they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import Trainer, TrainerCallback

from pmstore.integrations.transformers.data import TrainerData
from pmstore.torch.run_errors import AttachError, ChangedError
from pmstore.torch.settings import plain, same

_SETTINGS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "world_size"),
    *("max_steps", "num_train_epochs", "seed", "data_seed", "train_sampling_strategy"),
    *("dataloader_drop_last", "max_grad_norm", "label_smoothing_factor", "fp16", "bf16"),
)
"""Arguments of the Trainer that a training depends on, beside those of optimizer and scheduler,
which attach compares."""


def refuse(trainer: Trainer, callback: TrainerCallback) -> None:
    """Refuses a Trainer that does what the callback cannot keep. Raises: AttachError."""
    kind = type(callback)
    if sum(isinstance(one, kind) for one in trainer.callback_handler.callbacks) > 1:
        raise AttachError(f"the Trainer has two {kind.__name__}s: give it one")
    if why := _unfit(trainer):
        raise AttachError(f"PmstoreTrainerCallback cannot keep a training with {why}")


def _unfit(trainer: Trainer) -> str:
    args = trainer.args
    if args.ignore_data_skip:
        return (
            "ignore_data_skip=True: after each resume the data epoch begins anew, so that batches "
            "are trained on twice. Leave it out: batches that are skipped are not loaded, but for "
            "those of an IterableDataset"
        )
    if trainer.is_deepspeed_enabled:
        return (
            "DeepSpeed, which keeps its state itself: leave out the callback, use its checkpoints"
        )
    if trainer.is_fsdp_enabled:
        return (
            "TrainingArguments(fsdp=...), whose checkpoints the Trainer loads itself. Write the "
            "loop with pmstore.torch.attach (docs/DISTRIBUTED.md), or save by pmstore.dcp"
        )
    if args.auto_find_batch_size:
        return "auto_find_batch_size=True, which begins anew in mid-training: give the batch size"
    if trainer.state.is_hyper_param_search:
        return "hyperparameter_search, which trains several times: keep the training that follows"
    if args.n_gpu > 1:
        return "nn.DataParallel: start a process for each device, with torchrun"
    return ""


def settings_of(trainer: Trainer, data: TrainerData) -> dict[str, Any]:
    found = {name: plain(getattr(trainer.args, name, None)) for name in _SETTINGS}
    return {**found, **data.description}


def compare_settings(
    stored: Mapping[str, Any], given: Mapping[str, Any], accept: Sequence[str]
) -> None:
    """Compares the Trainer's settings with the stored ones. Raises: ChangedError: a setting is not
    what it was, and not among those accepted; AttachError: what is accepted is no setting."""
    if unknown := [name for name in accept if name not in given]:
        raise AttachError(f"accept={unknown[0]!r} is none of the settings: {', '.join(given)}")
    told = [
        f"{name}: stored {stored[name]!r}, given {value!r}"
        for name, value in given.items()
        if name in stored and name not in accept and not same(stored[name], value)
    ]
    if told:
        names = [line.partition(":")[0] for line in told]
        raise ChangedError(
            "the Trainer has other settings than the stored training. Where they are meant, name "
            f"them: PmstoreTrainerCallback(..., accept={names!r}). The Trainer then takes its "
            "place in the data from the number of steps, by the settings given",
            mismatched=told,
        )
