from shelf_helpers import shelf

__all__ = ["shelf"]
