"""Trainings by Hugging Face's Trainer, as children that may be killed: see test_trainer_kills."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

# which the first optimizer of a process imports: here once, in the fork server
import torch._dynamo
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from pmstore.integrations.transformers import PmstoreTrainerCallback
from pmstore.scheduler import EveryN
from pmstore.testing import primitives_seen

ROWS, WORDS, LENGTH = 26, 40, 6


def tokens() -> torch.Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def llama() -> torch.nn.Module:
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, attention_dropout=0.1))


def gpt2() -> torch.nn.Module:
    """Its head is tied to its embeddings."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    )


def bert() -> torch.nn.Module:
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_hidden_layers": 2, "num_labels": 3}
    return BertForSequenceClassification(BertConfig(**sizes, **heads))


class Plain(torch.nn.Module):
    """No model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Embedding(WORDS, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, WORDS)
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.net(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())}


def language() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row} for row in tokens()]


def classes() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row.sum() % 3} for row in tokens()]


def uneven() -> list[dict[str, list[int]]]:
    """Of different lengths; those of a batch are cut alike."""
    rows = tokens().tolist()
    return [{"input_ids": row[: 2 + at % 5]} for at, row in enumerate(rows)]


def cut(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    least = min(len(sample["input_ids"]) for sample in samples)
    rows = torch.tensor([sample["input_ids"][:least] for sample in samples])
    return {"input_ids": rows, "labels": rows}


class Masked:
    """A collate function that draws, as those for masked language models do; its generator is made
    when it is first called."""

    def __init__(self, own: bool) -> None:
        self.own = own
        self.generator: torch.Generator | None = None

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        if self.own and self.generator is None:
            self.generator = torch.Generator().manual_seed(5)
        rows = torch.stack([sample["input_ids"] for sample in samples])
        labels = torch.stack([sample["labels"] for sample in samples])
        drawn = torch.rand(rows.shape, generator=self.generator)
        return {"input_ids": rows.masked_fill(drawn < 0.2, 0), "labels": labels}


class Stream(IterableDataset[Any]):
    def __init__(self, forever: bool = True) -> None:
        self.forever = forever

    def __iter__(self) -> Iterator[Any]:
        yield from language()
        while self.forever:
            yield from language()


class Kill(TrainerCallback):
    """Dies at a step's end, before it is committed."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


class Acknowledge(TrainerCallback):
    def __init__(self, ack: Callable[[int], None], callback: PmstoreTrainerCallback) -> None:
        self.ack, self.callback = ack, callback

    def on_substep_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        assert self.callback.run is not None
        self.ack(self.callback.run.committed)

    on_step_end = on_substep_end


Case = dict[str, Any]
CASES: dict[str, Case] = {
    # evaluation, checkpoints of the Trainer's own, the best model at the end, stopping early
    "stops_early": {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "load_best_model_at_end": True,
        "learning_rate": 0.3,
        "num_train_epochs": 8,
        "save_total_limit": 2,
        "patience": 2,
        "eval_on_start": True,
        "include_num_input_tokens_seen": "all",
    },
    "accumulates": {
        "gradient_accumulation_steps": 3,
        "label_smoothing_factor": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "model": gpt2,
        "max_steps": 7,
    },
    "plateau": {
        "eval_strategy": "epoch",
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
        "learning_rate": 0.2,
        "model": bert,
        "data": classes,
        "bf16": True,
    },
    "masks": {"collator": lambda: Masked(False), "model": Plain},
    "masks_of_its_own": {"collator": lambda: Masked(True), "policy": EveryN(3)},
    "groups_lengths": {
        "train_sampling_strategy": "group_by_length",
        "data": uneven,
        "collator": lambda: cut,
        "accelerator_config": {"use_seedable_sampler": False},
        "remove_unused_columns": False,
    },
    "shuffles_unseeded": {"accelerator_config": {"use_seedable_sampler": False}, "max_steps": 16},
    "streams": {"data": Stream, "max_steps": 12},
    # plain torch, and the Trainer too, give other numbers after a resume
    "workers": {
        "collator": lambda: Masked(False),
        "dataloader_num_workers": 2,
        "max_steps": 10,
        "differs": True,
    },
    "streams_by_worker": {
        "data": Stream,
        "collator": lambda: Masked(False),
        "dataloader_num_workers": 1,
        "max_steps": 9,
    },
}


def make(case: str | Case, folder: Path, callbacks: list[Any], **more: Any) -> Trainer:
    torch.manual_seed(7)
    given = {**(CASES[case] if isinstance(case, str) else case), **more}
    for name in ("policy", "differs"):
        given.pop(name, None)
    model = given.pop("model", llama)()
    data = given.pop("data", language)()
    collator = given.pop("collator", lambda: None)()
    if patience := given.pop("patience", 0):
        callbacks = [*callbacks, EarlyStoppingCallback(patience)]
    plain = {
        "output_dir": str(folder / "out"),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.02,
        "logging_steps": 4,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        "dataloader_pin_memory": False,
    }
    asked = {"eval_dataset": data[:5]} if given.get("eval_strategy") else {}
    return Trainer(
        model,
        model_init=given.pop("model_init", None),
        args=TrainingArguments(**{**plain, **given}),
        train_dataset=data,
        data_collator=collator,
        callbacks=callbacks,
        **asked,
    )


def found(trainer: Trainer, loss: float) -> dict[str, Any]:
    """What a training came to, in bits."""
    digest = hashlib.sha256()
    for tensor in trainer.model.state_dict().values():
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    optimizer = hashlib.sha256()
    for state in trainer.optimizer.state_dict()["state"].values():
        for value in state.values():
            optimizer.update(torch.as_tensor(value).detach().contiguous().numpy().tobytes())
    lines = [
        {key: value for key, value in line.items() if "runtime" not in key and "per_sec" not in key}
        for line in trainer.state.log_history
    ]
    return {
        "model": digest.hexdigest(),
        "optimizer": optimizer.hexdigest(),
        "log": lines,
        "steps": trainer.state.global_step,
        "best": trainer.state.best_metric,
        "flos": trainer.state.total_flos,
        "loss": loss,
        "scheduler": str(trainer.lr_scheduler.state_dict().get("_last_lr")),
        "next": torch.rand(1).item(),
    }


def reference(ack: Callable[[int], None], case: str, folder: str) -> None:
    """The training without pmstore."""
    torch.set_num_threads(1)
    trainer = make(case, Path(folder), [])
    write(folder, found(trainer, trainer.train().training_loss))


def write(folder: str, result: dict[str, Any]) -> None:
    Path(folder, "found.json").write_text(json.dumps(result))


def train(ack: Callable[[int], None], case: str, folder: str, kill_at_step: int = 0) -> None:
    """One process's life: goes on where the store is."""
    torch.set_num_threads(1)
    policy = CASES[case].get("policy")
    path = Path(folder, "run.pm")
    callback = PmstoreTrainerCallback(path, policy=policy, opening={"size": "8MiB"})
    callbacks = [callback, Acknowledge(ack, callback), Kill(kill_at_step)]
    trainer = make(case, Path(folder), callbacks)
    loss = trainer.train(resume_from_checkpoint=callback.folder()).training_loss
    write(folder, found(trainer, loss))


def the_example(ack: Callable[[int], None], folder: str) -> None:
    """A life of examples/trainer.py. Acknowledges how many primitives it took."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from examples.trainer import train as of_the_example

    Path(folder).mkdir(exist_ok=True)
    of_the_example(folder, 1)
    ack(primitives_seen())
