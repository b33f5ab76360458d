"""Which programs there are, and the moments between their statements."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
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
    needs: str
    """Modules that it imports itself, since not everybody has them; spaces between them."""
    memory: bool
    """Its store has to lie in memory."""
    faulty: bool
    """It is wrong by itself, and the harness must find it."""
    refused: str
    """What the error says by which it is refused; `a|b`: one of them. Empty: it is right."""

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
    needs: str = "",
    memory: bool = False,
    faulty: bool = False,
    refused: str = "",
) -> Callable[[Callable[..., State]], Callable[..., State]]:
    """See the package's docstring. quick: True, or the variants that are in the short choice."""

    def register(function: Callable[..., State]) -> Callable[..., State]:
        made = with_moments(function)
        for variant in variants or (None,):
            base = function.__name__.replace("_", "-")
            name = base if variant is None else f"{base}-{variant}"
            assert name not in PROGRAMS, name
            short = quick if isinstance(quick, bool) else variant in quick
            given = () if variant is None else (variant,)
            PROGRAMS[name] = Program(
                name, made, given, plain, stops, short, needs, memory, faulty, refused
            )
        return made

    return register


def load() -> dict[str, Program]:
    """Imports every file of programs. Returns those that must be right."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        if module.name not in ("__main__", "extras"):
            importlib.import_module(f"{__package__}.{module.name}")
    return {name: one for name, one in PROGRAMS.items() if not one.faulty}


def with_moments(function: Callable[..., State]) -> Callable[..., State]:
    """The function with a call of `__moment__` before each statement, which may kill or raise, and
    in a loop asks for a `break` by returning True. Its argument says whether a step is under way
    there."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    definition.body = _body(definition.body, _Place())
    ast.increment_lineno(tree, first - 1)
    ast.fix_missing_locations(tree)
    space = function.__globals__
    space.setdefault("__moment__", lambda begun: False)
    code = compile(tree, inspect.getfile(function), "exec", dont_inherit=True)
    exec(code, space)
    made: Callable[..., State] = space[function.__name__]
    return made


@dataclass(frozen=True)
class _Place:
    """loop: it is in a loop. block: in a transaction block, or a step by hand; a `break` out of it
    would say that what was done so far is complete, and mean it. breaks: a `break` may stand there.
    begun: after other statements of the loop, and not after a step's end."""

    loop: bool = False
    block: bool = False
    breaks: bool = False
    begun: bool = False


def _body(statements: list[ast.stmt], place: _Place) -> list[ast.stmt]:
    out: list[ast.stmt] = []
    for statement in statements:
        if not isinstance(statement, (ast.Nonlocal, ast.Global, ast.Import, ast.ImportFrom)):
            out.append(_moment(statement, place))
            _inside(statement, place)
        out.append(statement)
        place = replace(place, begun=place.loop and not _ends_a_step(statement))
    if place.breaks and not isinstance(statements[-1], (ast.Break, ast.Continue, ast.Return)):
        out.append(_moment(statements[-1], place))
    return out


def _inside(statement: ast.stmt, place: _Place) -> None:
    if isinstance(statement, (ast.For, ast.While)):
        place = replace(place, loop=True, breaks=not place.block)
    elif isinstance(statement, ast.With) and _is_block(statement):
        place = replace(place, block=True, breaks=False)
    elif isinstance(statement, ast.FunctionDef):
        place = replace(place, loop=True, breaks=False)  # it is called in steps
    elif isinstance(statement, ast.ClassDef):
        for method in statement.body:
            _inside(method, place)
        return
    elif isinstance(statement, ast.If) and statement.orelse:
        statement.orelse = _body(statement.orelse, place)
    elif not isinstance(statement, (ast.If, ast.With, ast.Try)):
        return
    statement.body = _body(statement.body, place)


def _ends_a_step(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.With):
        return _is_block(statement)
    return ".commit(" in ast.unparse(statement)


def _is_block(statement: ast.With) -> bool:
    what = ast.unparse(statement.items[0])
    return "transaction(" in what or "next_step(" in what


def _moment(statement: ast.stmt, place: _Place) -> ast.stmt:
    call = f"__moment__({place.begun})"
    made = ast.parse(f"if {call}: break" if place.breaks else call).body[0]
    for node in ast.walk(made):
        if isinstance(node, (ast.stmt, ast.expr)):
            node.lineno = node.end_lineno = statement.lineno
            node.col_offset = node.end_col_offset = 0
    return made
