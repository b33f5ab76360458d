"""safetensors and npz, in and out."""

from pmstore.formats.exchange import export_npz, export_safetensors, import_npz, import_safetensors

__all__ = ["export_npz", "export_safetensors", "import_npz", "import_safetensors"]
