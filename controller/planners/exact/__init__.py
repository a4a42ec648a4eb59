"""The default planner: a mixed-integer program over variants, MIG configurations and sleep. See `planner.py`."""

from controller.planners.exact.planner import ExactPlanner

__all__ = ["ExactPlanner"]
