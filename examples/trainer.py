"""Hugging Face's Trainer, kept by a callback: kill it at any moment, and start it again.

python examples/trainer.py /dev/shm    # needs transformers; nothing is downloaded

torchrun --nproc-per-node=2 examples/trainer.py /dev/shm    # each rank has a store of its own
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from pmstore.integrations.transformers import PmstoreTrainerCallback


def train(folder: str, epochs: int) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    # sequences that count: 17, 18, 19, ...
    rows = (torch.randint(100, (500, 1)) + torch.arange(16)) % 100
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = TrainingArguments(
        output_dir=f"{folder}/trainer-output",
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        logging_steps=20,
        save_strategy="no",  # the store has every step
        report_to="none",
        use_cpu=True,
    )
    callback = PmstoreTrainerCallback(f"{folder}/trainer.pm")
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.folder())
    print(f"step {trainer.state.global_step} committed")
    print("a checkpoint for a Trainer without the callback:", callback.export())


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else ".", int(sys.argv[2]) if len(sys.argv) > 2 else 3)
