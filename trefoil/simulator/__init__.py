"""A shell without hardware: the live brains in simulated time."""
