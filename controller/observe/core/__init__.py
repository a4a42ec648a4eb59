"""View of the system as a pure function of what was read."""
