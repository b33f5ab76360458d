"""Gives torch.distributed.checkpoint pmstore as its storage."""

from pmstore.extras import optional

with optional:
    from pmstore.dcp._read.reader import StoreReader
    from pmstore.dcp._write.writer import StoreWriter

__all__ = ["StoreReader", "StoreWriter"]
