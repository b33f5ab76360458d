"""Gives torch.distributed.checkpoint pmstore as its storage."""

from pmstore.extras import optional

with optional:
    from pmstore.dcp._read.storage_reader import StoreReader
    from pmstore.dcp._write.storage_writer import StoreWriter

__all__ = ["StoreReader", "StoreWriter"]
