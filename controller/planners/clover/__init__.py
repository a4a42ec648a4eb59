"""CLOVER (SC 23): simulated annealing over configuration graphs, by measuring or on profiles."""

from controller.planners.clover.planner import CloverPlanner

__all__ = ["CloverPlanner"]
