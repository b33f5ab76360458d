"""Jobs in simulated time: what a commit policy costs, held against the exact optimum."""

from pmstore.simulation.cells import COSTS, Cell, CostClass, cells
from pmstore.simulation.curves import CURVES, Curve, noisy
from pmstore.simulation.driver import Clock, Job, Outcome
from pmstore.simulation.optimum import Metric, Segments, best_integer, optimum

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
