"""Plug-ins for training frameworks: a module for each, which imports the framework itself.

None of them is needed to import pmstore; none is imported here.

A plug-in attaches the run when the framework has made its optimizers. It ends a step where nothing
of the step is left to do: not at the framework's "step end", but where the framework asks for the
next batch (Lightning) or begins the next step (transformers). So hooks, schedulers and evaluations
that come in between are in the same commit. Plug-ins without a run (scikit-learn, JAX)
write values.
"""
