"""Reproductions of papers in the simulator: the same levers, the same figures at equal load, every number printed."""
