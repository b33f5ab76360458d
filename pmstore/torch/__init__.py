"""Training runs of torch in a store: `attach` and the `Run` that it returns."""

from pmstore.extras import optional

with optional:
    from pmstore.torch.attach import attach
    from pmstore.torch.errors import (
        AttachError,
        ChangedError,
        LookaheadError,
        MismatchError,
        NotKeptError,
        TornStepError,
    )
    from pmstore.torch.job import Job
    from pmstore.torch.kept import KeptState
    from pmstore.torch.load import load
    from pmstore.torch.resume import Resume
    from pmstore.torch.run import Run
    from pmstore.torch.stats import RunStats
    from pmstore.torch.transaction import RunTransaction

__all__ = [
    "AttachError",
    "ChangedError",
    "Job",
    "KeptState",
    "LookaheadError",
    "MismatchError",
    "NotKeptError",
    "Resume",
    "Run",
    "RunStats",
    "RunTransaction",
    "TornStepError",
    "attach",
    "load",
]
