"""Makes a new array or tensor in a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pmstore._engine.constants import ROOT
from pmstore.errors import NameExistsError
from pmstore.objects import array
from pmstore.objects.array import Descriptor
from pmstore.objects.core import Core
from pmstore.objects.names import in_the_way


class NewArray(NamedTuple):
    """Describes an array or tensor that is to be made. fill: what its bytes are, one of `FILL_...`;
    pattern: the element that `FILL_PATTERN` repeats."""

    descriptor: Descriptor
    itemsize: int
    fill: int
    pattern: bytes = b""

    def put(self, core: Core, parts: Sequence[bytes], name: str) -> Any:
        """Puts the new array at the path, as one step, and finds it: see `Pool.get`. REQUIRES: the
        lock.

        Raises: NameExistsError, StoreFullError, ValueError.
        """
        path, source = b"\0".join(parts), np.frombuffer(self.pattern or b"\0", np.uint8)
        try:
            core.pool.put_array(
                ROOT,
                path,
                self.descriptor.pack(),
                array.bytes_of_new(self.descriptor, self.itemsize),
                fill=self.fill,
                source=array.address(source),
                source_bytes=len(self.pattern),
                must_be_new=True,
            )
        except NameExistsError as error:
            if core.pool.find(ROOT, path) is None:
                raise in_the_way(core.pool, parts, error) from None
            raise NameExistsError(
                f"{core.path}: {name!r} is in the store already: use store.require(name, shape, "
                "dtype), which returns what is there or creates it, or store[name] = array to "
                "replace it"
            ) from None
        found = core.pool.get(ROOT, path, False)
        if found is None:
            # another thread's block rolled back in this very moment, or a signal handler removed it
            raise KeyError(name)
        return found
