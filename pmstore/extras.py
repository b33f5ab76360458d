"""Packages that only some uses of pmstore need: where one is missing, the error says what to
install."""

from __future__ import annotations

_EXTRAS = {"torch": "torch", "safetensors": "export"}


def missing(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error, with the extra of pmstore that brings the package."""
    extra = _EXTRAS.get((error.name or "").partition(".")[0], "all")
    return ModuleNotFoundError(
        f"this needs {error.name}: pip install 'pmstore[{extra}]'", name=error.name
    )


class _Optional:
    """A class, not a generator: loading a tensor passes through it, and is to cost no more for
    that."""

    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ModuleNotFoundError):
            raise missing(error) from None


optional = _Optional()
"""`with optional: import torch`: ModuleNotFoundError names the extra."""
