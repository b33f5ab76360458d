"""A stress test: programs that do everything at once to a store, are killed again and again, and an
oracle beside the store.

    python -m crashtests.stress --seconds 60
    python -m crashtests.stress --kills 10000 --seconds 3600

Parts, each with one job:

    board.py       what a program acknowledges, in memory that outlives it
    content.py     what an object holds: a function of its name and a generation, so that each
                   read can be checked by itself
    unit.py        several objects that change together, in a block
    life.py        one program from its fork to its kill: opens, checks what it finds, and lets
                   actors run
    actors.py      what threads do outside of blocks; actors_blocks.py: in blocks;
                   actors_moved.py: to tensors
    scenarios.py   which actors meet
    lane.py        forks lives, kills them, judges and keeps what failed
    __main__.py    the command, and its report
"""
