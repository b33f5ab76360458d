"""The steps of a run: they tile its time, and each is kept whole or taken back whole.

state.py            the state of the open step: a table of states and events
loops.py            the loops that hand out steps, and their order in the store
by_hand.py          `with run.next_step():`
steps.py            the end of a step, and the way back: store and Python agree
commit_schedule.py  which ends of steps are committed
progress.py         where the run is, in this process and by the last commit
log.py              what the program logs of its steps
foreign_trainers.py optimizers and schedules that the run was not given

A step that ends without a commit writes nothing beyond its tensors. A commit first captures what
Python holds (`pmstore/torch/parts.py`, the place in the data, the log), and is then one commit of
the store. The store asks the run before each commit whether what is pending is half of something
(`pmstore/objects/guards.py`). docs/TRAINING.md has the rules. `tests/programs/` and `tests/steps/`
kill programs at drawn moments and compare bits.
"""
