"""torch.distributed.checkpoint with pmstore as its storage."""

from pmstore.extras import optional

with optional:
    from pmstore.dcp.reader import StoreReader
    from pmstore.dcp.writer import StoreWriter

__all__ = ["StoreReader", "StoreWriter"]
