"""The application with all its commands, each imported when it is wanted (table.py).

Exit codes: 0 well; 1 the answer is bad news (a damaged store, a run that differs, a repair
declined); 2 the question was wrong (no such store or name, a store that is in use, a missing
package, bad options). Errors are one line without a traceback.
"""

from __future__ import annotations

from pmstore.commands.app import app as app
