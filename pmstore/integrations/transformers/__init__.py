"""Hugging Face's `Trainer`: training that is kept by a callback.

    from pmstore.integrations.transformers import PmstoreTrainerCallback

    callback = PmstoreTrainerCallback("run.pm")
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.folder())

Killed at any moment and started again, the same program goes on after the last step, bit for bit.
See docs/INTEGRATIONS.md.
"""

from __future__ import annotations

from pmstore.extras import optional
from pmstore.integrations.versions import tested

with optional:
    import transformers as _  # noqa: F401  # before what it depends on: it is named if it is missing

    from pmstore.integrations.transformers.trainer_callback import PmstoreTrainerCallback

tested("transformers", "5.23", "5.23")
tested("accelerate", "1.15", "1.15")

__all__ = ["PmstoreTrainerCallback"]
