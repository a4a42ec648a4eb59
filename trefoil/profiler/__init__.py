"""Profiles: what an operating point costs. `cost_law` and `cost_law_fit` model them, the others measure on a Triton."""
