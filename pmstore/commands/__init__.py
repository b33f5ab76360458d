"""The command `pmstore`: cli.py starts it, app.py is the application, application.py has all
its commands. A file of commands has the name of one of them.

All but cli.py need the extra `cli`. Nothing is imported here, so that cli.py can say what is
missing.
"""
