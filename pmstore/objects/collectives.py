"""Captures what torch.distributed receives into a tensor of a store before it is written.

gloo has the kernel write into the memory it receives into. A protected page refuses that, and gloo
keeps the refusal to itself until its timeout. All communication of torch, DistributedDataParallel's
too, goes through operators of its dispatcher (`c10d::recv_`, ...), and what they write is their
first argument. A layer over them stores a byte of each page of it back to where it was, as any code
may: its page is captured then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from pmstore._engine.constants import PAGE_BYTES

_KEY = "AutogradCPU"
_once = threading.Lock()  # taken by the first `install`, for good
_library: Any = None


def _capture(written: Any, is_captured: Callable[[int], bool]) -> None:
    if not isinstance(written, torch.Tensor):
        for tensor in written:
            _capture(tensor, is_captured)
        return
    if written.device.type != "cpu" or written.layout != torch.strided or not written.numel():
        return
    if not is_captured(written.data_ptr()):
        return
    begin = written.storage_offset() * written.element_size()
    span = 1 + sum(
        (length - 1) * stride
        for length, stride in zip(written.shape, written.stride(), strict=True)
    )
    end = begin + span * written.element_size()
    # Not in the tensor's own type: -0.0 + 0 is another number. Nor through a view of it: autograd
    # reads its version.
    bytes_ = torch.empty(0, dtype=torch.uint8, device="cpu")
    for at, count in ((begin, (end - begin - 1) // PAGE_BYTES + 1), (end - 1, 1)):
        bytes_.set_(written.untyped_storage(), at, (count,), (PAGE_BYTES,)).bitwise_or_(0)


def install(is_captured: Callable[[int], bool]) -> None:
    """Puts the layer in, once a process. What happens under `torch.inference_mode()` does not pass
    through it.

    Where it cannot be put in, it is left out, whole: what is received is to be declared then. That
    is so where torch has other private names, and where another library has kernels in the same
    place.

    is_captured: whether a store at an address is one into a heap that is open for writing.
    """
    global _library
    if _once.acquire(blocking=False) and torch.distributed.is_available():
        with contextlib.suppress(Exception):  # tensors can be loaded without it
            _library = _layer(is_captured)


def _layer(is_captured: Callable[[int], bool]) -> Any:
    """Returns the library that holds the kernels, which are gone when nothing keeps it. Returns
    None if another library has registered some.

    Raises: what torch does.
    """
    below = torch._C._AutoDispatchBelowAutograd

    def kernel(name: str) -> Callable[..., Any]:
        def capture_first(*arguments: Any) -> Any:
            with below():
                _capture(arguments[0], is_captured)
                return getattr(torch.ops.c10d, name).default(*arguments)

        return capture_first

    # Those with a kernel for memory of the CPU. (All names of operators are three times as many,
    # and as long to list.)
    operators = [
        name
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
        if name.startswith("c10d::")
    ]
    receiving = [
        name[6:] for name in operators if name.endswith("_") and name != "c10d::monitored_barrier_"
    ]
    if any(
        torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", _KEY) for name in receiving
    ):
        return None
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name in receiving:
        library.impl(name, kernel(name), _KEY)
    return library
