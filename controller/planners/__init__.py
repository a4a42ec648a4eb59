"""Planners: brains that turn a `PlanView` into a `Decision`. `table.PLANNERS` names them."""
