"""Training runs of torch in a store: `attach` and the `Run` that it returns."""

from pmstore.extras import optional

with optional:
    from pmstore.torch._job.process_group import Job
    from pmstore.torch._read.load import load
    from pmstore.torch.attach import attach
    from pmstore.torch.checkpoints import KeptState
    from pmstore.torch.resume import Resume
    from pmstore.torch.run import Run
    from pmstore.torch.run_errors import (
        AttachError,
        ChangedError,
        LookaheadError,
        MismatchError,
        NotKeptError,
        RolledBackError,
        TornStepError,
        UnfinishedStepError,
    )
    from pmstore.torch.run_stats import RunStats

__all__ = [
    "AttachError",
    "ChangedError",
    "Job",
    "KeptState",
    "LookaheadError",
    "MismatchError",
    "NotKeptError",
    "Resume",
    "RolledBackError",
    "Run",
    "RunStats",
    "TornStepError",
    "UnfinishedStepError",
    "attach",
    "load",
]
