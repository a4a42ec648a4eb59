"""CLOVER (SC 23): simulated annealing over configuration graphs, by measuring or on profiles."""

from controller.planners.clover.planner import CONSTANTS, CloverPlanner

__all__ = ["CONSTANTS", "CloverPlanner"]
