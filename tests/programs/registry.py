"""Which programs there are, and the moments between their statements."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

State = dict[str, Any]
STOPS = ("kill", "term", "raise", "break")


@dataclass(frozen=True)
class Program:
    """One program, or one variant of it."""

    name: str
    function: Callable[..., State]
    variant: tuple[str, ...]
    plain: str
    """Why plain torch gives another result; empty: it gives the same."""
    stops: tuple[str, ...]
    quick: bool

    @property
    def kind(self) -> str:
        """The name of the function: variants of it are of one kind."""
        return self.function.__name__


PROGRAMS: dict[str, Program] = {}


def program(
    *variants: str,
    plain: str = "",
    stops: tuple[str, ...] = STOPS,
    quick: bool | Collection[str] = False,
) -> Callable[[Callable[..., State]], Callable[..., State]]:
    """See the package's docstring. quick: True, or the variants that are in the short choice."""

    def register(function: Callable[..., State]) -> Callable[..., State]:
        made = _with_moments(function)
        for variant in variants or (None,):
            base = function.__name__.replace("_", "-")
            name = base if variant is None else f"{base}-{variant}"
            assert name not in PROGRAMS, name
            short = quick if isinstance(quick, bool) else variant in quick
            given = () if variant is None else (variant,)
            PROGRAMS[name] = Program(name, made, given, plain, stops, short)
        return made

    return register


def load() -> dict[str, Program]:
    """Imports every file of programs."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        if module.name != "__main__":
            importlib.import_module(f"{__package__}.{module.name}")
    return PROGRAMS


def _with_moments(function: Callable[..., State]) -> Callable[..., State]:
    """The function with a call of `__moment__` before each statement, which may kill or raise, and
    in a loop asks for a `break` by returning True. Its argument says whether a step is under way
    there."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    definition.body = _body(definition.body, breaks=False, begun=False)
    ast.increment_lineno(tree, first - 1)
    ast.fix_missing_locations(tree)
    space = function.__globals__
    space.setdefault("__moment__", lambda begun: False)
    code = compile(tree, inspect.getfile(function), "exec", dont_inherit=True)
    exec(code, space)
    made: Callable[..., State] = space[function.__name__]
    return made


def _body(statements: list[ast.stmt], *, breaks: bool, begun: bool) -> list[ast.stmt]:
    """breaks: a `break` may stand here. begun: statements of a step were executed before it."""
    out: list[ast.stmt] = []
    for statement in statements:
        if isinstance(statement, (ast.Nonlocal, ast.Global, ast.Import, ast.ImportFrom)):
            out.append(statement)
            continue
        out.append(_moment(statement, breaks, begun))
        _inside(statement, breaks, begun)
        out.append(statement)
        begun = (begun or breaks) and not _ends_a_step(statement)
    if breaks and statements and not isinstance(statements[-1], (ast.Break, ast.Continue)):
        out.append(_moment(statements[-1], breaks, begun))
    return out


def _inside(statement: ast.stmt, breaks: bool, begun: bool) -> None:
    if isinstance(statement, (ast.For, ast.While)):
        statement.body = _body(statement.body, breaks=True, begun=begun)
    elif isinstance(statement, ast.If):
        statement.body = _body(statement.body, breaks=breaks, begun=begun)
        statement.orelse = _body(statement.orelse, breaks=breaks, begun=begun)
    elif isinstance(statement, ast.With):
        # a `break` out of a transaction block would commit what was done so far: it means it
        breaks = breaks and "transaction" not in ast.unparse(statement.items[0])
        statement.body = _body(statement.body, breaks=breaks, begun=begun)
    elif isinstance(statement, ast.FunctionDef):
        statement.body = _body(statement.body, breaks=False, begun=begun)
    elif isinstance(statement, ast.Try):
        statement.body = _body(statement.body, breaks=breaks, begun=begun)


def _ends_a_step(statement: ast.stmt) -> bool:
    text = ast.unparse(statement)
    return ".commit(" in text or (isinstance(statement, ast.With) and "transaction(" in text)


def _moment(statement: ast.stmt, breaks: bool, begun: bool) -> ast.stmt:
    call = f"__moment__({begun})"
    made = ast.parse(f"if {call}: break" if breaks else call).body[0]
    for node in ast.walk(made):
        if isinstance(node, (ast.stmt, ast.expr)):
            node.lineno = node.end_lineno = statement.lineno
            node.col_offset = node.end_col_offset = 0
    return made
