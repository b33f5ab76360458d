"""The commands of `pmstore`, with typer and rich.

Exit codes: 0 well; 1 the answer is bad news (a damaged store, a run that differs, a repair declined); 2 the question was
wrong (no such store or name, a store that is in use, a missing package, bad options). Errors are one line without a traceback.
"""

from __future__ import annotations

# Importing a module of commands registers them.
from pmstore.commands import change, crashtest, demo, exchange, inspect, portable, repair, schedule, show, tiers
from pmstore.commands.app import app

__all__ = ["app", "change", "crashtest", "demo", "exchange", "inspect", "portable", "repair", "schedule", "show", "tiers"]

_ORDER = (  # noqa: SIM905
    "create info ls show set rm check repair dump load compact export import flush trust epochs restore export-tier crashtest "
    "demo"
).split()
# In the help, as a person meets them.
app.registered_commands.sort(key=lambda command: _ORDER.index(str(command.name or getattr(command.callback, "__name__", ""))))
