"""Makes packages whose names are imported when they are first used, so that nobody waits for what
he does not use."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable, Mapping


def is_there(package: str) -> bool:
    """Returns whether the package can be imported. Does not import it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # somebody's stand-in for it, without a spec
        return True


def door(
    package: str, homes: Mapping[str, Iterable[str]], modules: Collection[str] = ()
) -> Callable[[str], object]:
    """Makes the `__getattr__` of a package.

    homes: modules, each with the names of it that the package has. modules: of the package, that
        are its own names.
    """
    where = {name: module for module, names in homes.items() for name in names}

    def find(name: str) -> object:
        if name in where:
            found = getattr(importlib.import_module(where[name]), name)
        elif name in modules:
            found = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, found)  # the next use does not come here
        bind_loaded()
        return found

    def bind_loaded() -> None:
        """Binds all names of modules that are loaded: a finalizer that runs while the interpreter
        shuts down can import nothing."""
        for name, module in where.items():
            there = vars(sys.modules[module]) if module in sys.modules else {}  # no door of its own
            if name in there:
                setattr(sys.modules[package], name, there[name])

    return find


def brief(find: Callable[[str], object], public: list[str]) -> Callable[[str], object]:
    """Makes a `__getattr__` that also answers what `__all__` is, to all but pydoc. pydoc would
    describe every name in it: `help` of the package had thousands of lines. Without `__all__` it
    shows the docstring, which says where the rest is.

    find: the package's `__getattr__` for all other names.
    """

    def get(name: str) -> object:
        if name != "__all__":
            return find(name)
        if sys._getframe(1).f_code.co_name == "docmodule":
            raise AttributeError(name)
        return public

    return get
