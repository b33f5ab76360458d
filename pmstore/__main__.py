"""`python -m pmstore`: the command line."""

from pmstore.commands.cli import main

main()
