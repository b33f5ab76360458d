"""PyMM's interface over a store: a PyMM program runs after changing `import pymm` to
`from pmstore import pymm`.

    from pmstore import pymm

    shelf = pymm.shelf("run", size_mb=1024, pmem_path="/mnt/pmem0")
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

Source: A. Wood et al., "PyMM: Heterogeneous Memory Programming for Python Data Science" (HPEC
    2022), and IBM's PyMM.
"""

from pmstore.extras import optional
from pmstore.pymm.arrays import ndarray, shelved_ndarray
from pmstore.pymm.common import Shadow, ShelvedCommon
from pmstore.pymm.linked_list import linked_list
from pmstore.pymm.scalars import bytes, float_number, integer_number, string
from pmstore.pymm.shelf import shelf

__all__ = [
    "Shadow",
    "ShelvedCommon",
    "bytes",
    "float_number",
    "integer_number",
    "linked_list",
    "ndarray",
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
