"""Exports and imports safetensors and npz: of stores and groups, and of runs (`*_run`). What a run
has logged is read as a data frame, and exported as CSV, as Parquet and for TensorBoard."""

from pmstore.formats.array_files import (
    export_npz,
    export_safetensors,
    import_npz,
    import_safetensors,
)
from pmstore.formats.run_log import export_log, export_tensorboard, read_log
from pmstore.formats.run_tensors import export_run, import_run

__all__ = [
    "export_log",
    "export_npz",
    "export_run",
    "export_safetensors",
    "export_tensorboard",
    "import_npz",
    "import_run",
    "import_safetensors",
    "read_log",
]
