"""Training runs of torch in a store: `attach` and the `Run` that it returns."""

from pmstore.extras import optional

with optional:
    from pmstore.torch.attach import attach
    from pmstore.torch.errors import AttachError, LookaheadError, MismatchError, TornStepError
    from pmstore.torch.run import Run, RunStats
    from pmstore.torch.transaction import RunTransaction

__all__ = [
    "AttachError",
    "LookaheadError",
    "MismatchError",
    "Run",
    "RunStats",
    "RunTransaction",
    "TornStepError",
    "attach",
]
