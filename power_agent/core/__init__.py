"""Cores of the power agent (reconciliation, drain, clocks, energy meter): pure, without clock, logs or I/O."""
