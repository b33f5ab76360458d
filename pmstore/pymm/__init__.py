"""PyMM's interface over a store: a PyMM program runs after changing `import pymm` to
`from pmstore import pymm`.

    from pmstore import pymm

    shelf = pymm.shelf("run", "/mnt/pmem0", size_mb=1024)
    shelf.w = np.zeros((100, 100))   # copied in; committed when the statement is done
    shelf.w += 1                     # in place, committed
    shelf.tx_begin([shelf.w])        # all that follows happens as a whole
    shelf.w *= 2
    shelf.count = 5
    shelf.tx_end()
    del shelf                        # closes the file

Outside `tx_begin`/`tx_end` every operation on a member is a transaction of its own: it happened as
a whole, and is durable as far as the domain goes, when it returns; one that raises has changed
nothing. What is written past the member (through `x.asndarray()`, `x.flat`, a tensor made of it) is
committed with the next operation on the shelf, `persist()`, or at the close.

The arithmetic of members follows PyMM's casting rules: a member with anything gives a plain result;
an in-place operation leaves a member. Where PyMM differs from Python (negative integers, `i /= 2`,
`s + "x"` that changes s, strides, dtypes), Python's rules hold.

A tensor that was computed from others keeps its autograd graph when it is assigned, as in PyMM:
`shelf.y = a * shelf.x; shelf.y.sum().backward()` reaches a. The graph is this process's, and goes
with the member: with the next assignment to the name, a rollback, or the process.
docs/howto/from_pymm.md is for those who come from PyMM.

Source: A. Wood et al., "PyMM: Heterogeneous Memory Programming for Python Data Science" (HPEC
    2022), and IBM's PyMM.
"""

from pmstore.extras import optional
from pmstore.pymm import pymmcore
from pmstore.pymm.arrays import dlpack_array, ndarray, shelved_ndarray
from pmstore.pymm.linked_list import linked_list
from pmstore.pymm.pymmcore import disable_transient_memory, enable_transient_memory
from pmstore.pymm.scalars import bytes, float_number, integer_number, string
from pmstore.pymm.shelf import shelf
from pmstore.pymm.shelf_memory import MemoryResource
from pmstore.pymm.shelf_names import Shadow, ShelvedCommon

__all__ = [
    "MemoryResource",
    "Shadow",
    "ShelvedCommon",
    "bytes",
    "disable_transient_memory",
    "dlpack_array",
    "enable_transient_memory",
    "float_number",
    "integer_number",
    "linked_list",
    "ndarray",
    "pymmcore",
    "shelf",
    "shelved_ndarray",
    "string",
    "torch_tensor",
]


def __getattr__(name: str) -> object:
    # needs torch, which only programs with tensors have
    if name in ("torch_tensor", "shelved_torch_tensor"):
        with optional:
            from pmstore.pymm import tensors

        return getattr(tensors, name)
    raise AttributeError(f"module 'pmstore.pymm' has no attribute {name!r}")
