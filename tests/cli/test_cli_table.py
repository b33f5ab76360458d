"""Commands are imported when they are wanted: what the table says of them is so."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from typer.main import get_command

from pmstore.commands.application import app
from pmstore.commands.table import TABLE


def _made(name: str) -> Any:
    group: Any = get_command(app)
    return group.get_command(None, name)


@pytest.mark.parametrize("name", TABLE)
def test_the_table_says_what_the_command_says(name: str) -> None:
    command = _made(name)
    assert command.name == name
    assert TABLE[name].summary == command.get_short_help_str(limit=200)


def test_no_command_is_missing_from_the_table() -> None:
    for place in TABLE.values():
        __import__(f"pmstore.commands.{place.module}")
    registered = {
        one.name or getattr(one.callback, "__name__", "")
        for one in (*app.registered_commands, *app.registered_groups)
    }
    assert registered - {"demo", "schedule"} == set(TABLE)  # these are of pmstore_lab


def test_one_command_does_not_import_the_others() -> None:
    code = (
        "import sys; from pmstore.commands.application import app;"
        "from typer.testing import CliRunner;"
        "r = CliRunner().invoke(app, ['create', '--help']); assert r.exit_code == 0;"
        "print([m for m in ('inspect', 'crashtest', 'tiers', 'exchange')"
        " if f'pmstore.commands.{m}' in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
