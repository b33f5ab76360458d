"""Random programs of steps, killed and ended at random moments: each write is done exactly once.

    python -m crashtests --kind steps                        400 of them: some 2,000 ends
    python -m crashtests --kind steps --cases 20 --seed 7    others
    pytest tests/training/test_random_steps.py               a short choice

A program is drawn from a seed (`drawing.py`): some loops of a run, of all kinds, and what it runs
on (one process or a job of two ranks, memory or a disk, a policy, mirrors, slots, a guard, workers
that load). Its time is a list of tiles: what stands before a loop, the head of an epoch, the body
of a batch or a step, the tail of an epoch. Each tile writes to some of what a run keeps
(`writes.py`): the model, the optimizer, a schedule, the store, `run.state`, the log, generators.
Some tiles end with an event: an error that the program catches outside its loops, a roll back,
`run.stop`, `run.commit`, a `break`.

The model of a program is its list of tiles: each is done once, in their order. That is what the
program does on plain torch (`tests/programs/plain.py`). It has to come out with the same bits as
there if it runs undisturbed, and if its lives end at drawn moments, each going on where the last
one ended: by SIGKILL, at a statement, in a call or at a primitive of persistence; by an error,
`sys.exit`, Ctrl-C, or a notice to its guard. `life.py` is one life, `harness.py` compares.
"""

import sys
from pathlib import Path

# `programs` and `jobs` lie beside this package, whether that is called `steps` or `tests.steps`.
_beside = str(Path(__file__).resolve().parents[1])
if _beside not in sys.path:
    sys.path.insert(0, _beside)
