"""Names the packages that only some uses of pmstore need. Where one is missing, the error says what
to install."""

from __future__ import annotations

_EXTRAS = {
    "torch": "torch",
    "safetensors": "export",
    "pandas": "pandas",
    "pyarrow": "parquet",
    "tensorboard": "tensorboard",
    "prometheus_client": "prometheus",
    **dict.fromkeys(("jinja2", "markupsafe"), "cli"),
}
"""What brings a package; `all` brings the others."""
_FRAMEWORKS = {
    "sklearn": "scikit-learn",
    "ray": "'ray[train]'",
    **{name: name for name in ("lightning", "transformers", "accelerate", "jax")},
}
"""What a program of a framework has by itself."""


def install(extra: str) -> str:
    """Returns what to type for an extra. pip takes it from the pmstore that is installed, also from
    one that was built in a clone, and downloads no pmstore.

    >>> install("torch")
    "pip install 'pmstore[torch]'"
    """
    return f"pip install 'pmstore[{extra}]'"


def missing(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Returns the error for a missing package, which says what to install."""
    name = (error.name or "").partition(".")[0]
    framework = _FRAMEWORKS.get(name)
    how = f"pip install {framework}" if framework else install(_EXTRAS.get(name, "all"))
    return ModuleNotFoundError(f"this needs {name}: {how}", name=name)


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
