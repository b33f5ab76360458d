"""Gives Hugging Face's `Trainer` the name that it is looked for by: see
`pmstore.integrations.transformers`. Accelerate has a module of its own."""

from pmstore.integrations.transformers import PmstoreTrainerCallback

__all__ = ["PmstoreTrainerCallback"]
