"""Lightning: training that is kept by a callback, and checkpoints that are stores.

    from pmstore.integrations.lightning import PmstoreCallback

    trainer = Trainer(max_epochs=10, callbacks=[PmstoreCallback("run.pm")])
    trainer.fit(model, loader)

Killed at any moment and started again, the same program goes on after the last step, bit for bit.
See docs/INTEGRATIONS.md.
"""

from __future__ import annotations

from pmstore.extras import optional
from pmstore.integrations.versions import tested

with optional:
    from pmstore.integrations.lightning.callback import PmstoreCallback
    from pmstore.integrations.lightning.checkpoint_io import PmstoreCheckpointIO

tested("lightning", "2.6", "2.6")

__all__ = ["PmstoreCallback", "PmstoreCheckpointIO"]
