"""Jobs in simulated time: what a commit policy costs, held against the exact optimum."""

from pmstore_lab.simulation.cells import COSTS, Cell, CostClass, cells
from pmstore_lab.simulation.curves import CURVES, Curve, noisy
from pmstore_lab.simulation.driver import Clock, Job, Outcome
from pmstore_lab.simulation.optimum import Metric, Segments, best_integer, optimum

__all__ = [
    "COSTS",
    "CURVES",
    "Cell",
    "Clock",
    "CostClass",
    "Curve",
    "Job",
    "Metric",
    "Outcome",
    "Segments",
    "best_integer",
    "cells",
    "noisy",
    "optimum",
]
