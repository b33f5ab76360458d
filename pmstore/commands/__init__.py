"""The commands of `pmstore`, with typer and rich.

Exit codes: 0 well; 1 the answer is bad news (a damaged store, a run that differs); 2 the question was wrong (no such
store, a missing package, bad options). Errors are one message without a traceback.
"""

from __future__ import annotations

# Importing a module of commands registers them.
from pmstore.commands import demo, inspect, schedule
from pmstore.commands.app import app

__all__ = ["app", "demo", "inspect", "schedule"]
