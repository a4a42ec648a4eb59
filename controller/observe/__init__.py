"""Observation: what Redis says of nodes, load, carbon and energy, and the planner's view of it."""
