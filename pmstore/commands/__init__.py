"""The command `pmstore`: cli.py starts it, app.py is the application, program.py has all its
commands.

All but cli.py need the extra `cli`. Nothing is imported here, so that cli.py can say what is
missing.
"""
