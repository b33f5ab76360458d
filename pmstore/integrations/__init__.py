"""Plug-ins for training frameworks: a module for each, which imports the framework itself.

None of them is needed to import pmstore; none is imported here.

A plug-in attaches the run when the framework has made its optimizers. It ends a step where nothing
of the step is left to do: not at the framework's "step end", but where the framework asks for the
next batch (Lightning) or begins the next step (transformers). So hooks, schedulers and evaluations
that come in between are in the same commit. Plug-ins without a run (scikit-learn, JAX)
write values.

A new one builds on `pmstore.torch.attach`, `Run.next_step` and `Stateful`, or on a store's values.
What plug-ins share:

versions.py           warns of a framework's version that is not tested
state_errors.py       names what differs between a framework's objects and the stored ones
unfinished_writes.py  keeps commits out while a plug-in writes, and its half writes out of commits
array_writes.py       writes an array where one of that shape is, or makes it
trees.py              nested dicts and lists of arrays, as JAX has them
"""
