"""Papers played again in the simulator: the same levers, the same figures, at equal load, with every number printed."""
