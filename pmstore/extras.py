"""Names the packages that only some uses of pmstore need. Where one is missing, the error says what
to install."""

from __future__ import annotations

_BY = {
    "torch": "'pmstore[torch]'",
    "safetensors": "'pmstore[export]'",
    "pandas": "'pmstore[pandas]'",
    "pyarrow": "'pmstore[parquet]'",
    "tensorboard": "'pmstore[tensorboard]'",
    **dict.fromkeys(("jinja2", "markupsafe"), "'pmstore[cli]'"),
    "sklearn": "scikit-learn",
    "ray": "'ray[train]'",
    "prometheus_client": "'pmstore[prometheus]'",
    **{name: name for name in ("lightning", "transformers", "accelerate", "jax")},
}
"""What brings a package; 'pmstore[all]' brings the others."""


def missing(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Returns the error for a missing package, which says what to install."""
    name = (error.name or "").partition(".")[0]
    by = _BY.get(name, "'pmstore[all]'")
    return ModuleNotFoundError(f"this needs {name}: pip install {by}", name=name)


class _Optional:
    """Wraps the import of a package that may be missing. It is a class, not a generator: loading a
    tensor passes through it, and is to cost no more for that."""

    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ModuleNotFoundError):
            raise missing(error) from None


optional: _Optional = _Optional()
"""`with optional: import torch`: ModuleNotFoundError says what to install."""
