"""The group of all commands, each imported when it is wanted."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_type_hints

import typer
from typer.core import TyperGroup

from pmstore.commands.table import SECTIONS, TABLE


def _strangers() -> dict[str, EntryPoint]:
    """Returns commands of other packages by name. To import what a name stands for registers its
    command."""
    return {one.name: one for one in entry_points(group="pmstore.commands")}


class Commands(TyperGroup):
    """Knows the names of all commands, and builds those that are asked for."""

    application: typer.Typer
    """What the modules register their commands with."""
    types: dict[str, Any]
    """The types of arguments, by which plain commands name them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(dict.fromkeys([*TABLE, *_strangers(), *self.commands]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            if cmd_name in TABLE:
                module = importlib.import_module(f"pmstore.commands.{TABLE[cmd_name].module}")
                if TABLE[cmd_name].plain:
                    command = getattr(module, cmd_name)
                    hints = get_type_hints(command, localns=self.types, include_extras=True)
                    command.__annotations__ = hints
                    known = self.application.registered_commands
                    if all(one.callback is not command for one in known):
                        self.application.command(cmd_name)(command)
            elif stranger := _strangers().get(cmd_name):
                stranger.load()
            else:
                return None
            self._take_in(cmd_name)
        return self.commands.get(cmd_name)

    def _take_in(self, name: str) -> None:
        """Makes the command that a module has registered."""
        registered = self.application
        only = typer.Typer(
            add_completion=False,
            pretty_exceptions_enable=registered.pretty_exceptions_enable,
            rich_markup_mode=registered.rich_markup_mode,
            context_settings=registered.info.context_settings,
        )
        only.registered_groups = [one for one in registered.registered_groups if one.name == name]
        only.registered_commands = [
            one
            for one in registered.registered_commands
            if name == (one.name or getattr(one.callback, "__name__", None))
        ]
        made: Any = typer.main.get_command(only)
        self.commands[name] = made.commands[name] if only.registered_groups else made

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            for name in self.list_commands(ctx):  # typer looks among those for one that was meant
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the help's sections. Those of other packages are the last one."""
        rows = {
            title: [(name, place.summary) for name, place in section.items()]
            for title, section in SECTIONS.items()
        }
        others = [name for name in self.list_commands(ctx) if name not in TABLE]
        if others:
            rows["Others"] = [(name, self._told(ctx, name)) for name in others]
        widest = max(map(len, TABLE))
        for title, section in rows.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(widest), told) for name, told in section])

    def _told(self, ctx: Any, name: str) -> str:
        """Returns the line of the help for a command of another package, which may be broken."""
        try:
            return str(self.get_command(ctx, name).get_short_help_str(limit=100))
        except Exception as error:
            return f"cannot be loaded: {type(error).__name__}: {error}"
