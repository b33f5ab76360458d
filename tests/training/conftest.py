from needs_torch import one_thread, path, pytest_pycollect_makemodule, server, store

__all__ = ["one_thread", "path", "pytest_pycollect_makemodule", "server", "store"]
