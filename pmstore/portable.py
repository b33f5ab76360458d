"""A whole store as one file, and back."""

from pmstore.formats.portable import dump, load

__all__ = ["dump", "load"]
