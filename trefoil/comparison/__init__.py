"""Comparison of policies in simulated time at equal load: policies, combinations of values, seeds, side by side."""
