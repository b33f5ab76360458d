"""A training loop with a bug that only a crash shows: parameters and momentum are committed one
after the other.

    # finds trials that resume silently with a different state
    pmstore crashtest -- python crashtest_two_commits.py
    # both in one transaction: every trial is a clean resume
    pmstore crashtest -- python crashtest_two_commits.py --fixed

A kill between the two commits leaves parameters of step n+1 beside the momentum and step count of
step n, and the resumed run applies step n twice.
"""

import sys

import numpy as np

import pmstore

STEPS = 40
FIXED = "--fixed" in sys.argv


def gradient(parameters: np.ndarray, step: int) -> np.ndarray:
    return parameters - np.sin(np.arange(parameters.size) + step)


with pmstore.open("run.pm", size="4MiB") as store:
    parameters = store.require("parameters", (4096,), "float64")
    momentum = store.require("momentum", (4096,), "float64")
    for step in range(store.get("step", 0), STEPS):
        if FIXED:
            with store.transaction():
                momentum *= 0.9
                momentum += gradient(parameters, step)
                parameters -= 0.01 * momentum
                store["step"] = step + 1
        else:
            new = 0.9 * momentum + gradient(parameters, step)
            parameters -= 0.01 * new
            store.commit()  # the bug: a kill from here on ...
            momentum[:] = new
            store["step"] = step + 1
            store.commit()  # ... to here resumes with half a step
