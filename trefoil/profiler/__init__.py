"""Profiles: what an operating point costs. `cost_law` models them, the others measure on a Triton."""
