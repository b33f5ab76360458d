"""The command `pmstore`. The commands themselves are in `pmstore.commands`, which needs the extra `cli`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the command line."""
    try:
        from pmstore.commands import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        print(f"pmstore: the command line needs {error.name}: pip install 'pmstore[cli]'", file=sys.stderr)
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()
