"""Says which command is in which module. A module is imported when one of its commands is wanted,
so that nothing waits for what it does not use. It has the name of one of them."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Says where a command is: its module of `pmstore.commands`, and its line in the help.

    plain: the module is imported without typer. It has a function of the command's name, which
    answers plain words at once: to import typer takes as long as such an answer.
    """

    module: str
    summary: str
    plain: bool = False


SECTIONS: dict[str, dict[str, Place]] = {  # of the help; commands as a person meets them
    "Look": {
        "info": Place(
            "info", "Says how far the runs in a store are, and what the store is.", plain=True
        ),
        "ls": Place(
            "info", "Lists the names of a store or group, with what they hold.", plain=True
        ),
        "show": Place(
            "show", "Shows what a name holds, with a small picture of arrays.", plain=True
        ),
        "top": Place("top", "Shows runs while they train, in the terminal."),
        "report": Place("report", "Writes a report of training runs as one HTML file."),
        "check": Place(
            "info", "Checks every invariant of a store, and changes nothing.", plain=True
        ),
    },
    "Change": {
        "create": Place("create", "Makes an empty store."),
        "set": Place("create", "Stores a value under a name, replacing what was there."),
        "rm": Place("create", "Removes names: all of them, or none if one is wrong."),
        "compact": Place("create", "Gives free space back: writes the store anew, and small."),
        "repair": Place("repair", "Says what can be mended of a store, and mends it."),
    },
    "Move": {
        "dump": Place("dump", "Writes all that a store holds into one portable file."),
        "load": Place("dump", "Makes a store of a dump."),
        "export": Place("export", "Writes arrays as safetensors or npz, or a log for others."),
        "import": Place("export", "Copies arrays of a safetensors or npz file into a store."),
        "flush": Place("epochs", "Flushes the last commit of a store to a tier."),
        "epochs": Place("epochs", "Lists the epochs of a tier, newest first."),
        "restore": Place("epochs", "Makes a store of an epoch in a tier."),
        "trust": Place("epochs", "Makes the tiers that a store remembers its own here."),
    },
    "Several ranks": {
        "job": Place("job", "Says what the ranks of a job can go on from."),
        "resolve": Place("resolve", "Goes back to the held version, or lets go of it."),
    },
    "Test": {
        "crashtest": Place(
            "crashtest", "Kills a training program, resumes it, and says what was lost."
        )
    },
}
TABLE: dict[str, Place] = {
    name: place for section in SECTIONS.values() for name, place in section.items()
}
