"""The commands of `pmstore`, with typer and rich.

Exit codes: 0 well; 1 the answer is bad news (a damaged store, a run that differs, a repair
declined); 2 the question was wrong (no such store or name, a store that is in use, a missing
package, bad options). Errors are one line without a traceback.
"""

from __future__ import annotations

from importlib.metadata import entry_points

# Importing a module of commands registers them.
from pmstore.commands import (  # noqa: F401
    change,
    crashtest,
    exchange,
    inspect,
    portable,
    repair,
    resolve,
    show,
    tiers,
)
from pmstore.commands.app import app as app

for _other in entry_points(group="pmstore.commands"):  # of other packages: pmstore_lab's
    _other.load()

_ORDER = (  # noqa: SIM905
    "create info ls show set rm check repair resolve dump load compact export import flush trust "
    "epochs restore export-tier crashtest demo"
).split()
_PLACE = {name: place for place, name in enumerate(_ORDER)}
# In the help, as a person meets them.
app.registered_commands.sort(
    key=lambda command: _PLACE.get(
        str(command.name or getattr(command.callback, "__name__", "")), len(_ORDER)
    )
)
