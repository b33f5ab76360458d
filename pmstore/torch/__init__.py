"""Training runs of torch in a store: `attach` and the `Run` it returns. See `pmstore.torch.attach`."""

from pmstore.torch.attach import attach
from pmstore.torch.errors import AttachError, MismatchError, TornStepError
from pmstore.torch.policy import CommitPolicy, EverySteps
from pmstore.torch.run import Run, RunStats, RunTransaction

__all__ = [
    "AttachError",
    "CommitPolicy",
    "EverySteps",
    "MismatchError",
    "Run",
    "RunStats",
    "RunTransaction",
    "TornStepError",
    "attach",
]
