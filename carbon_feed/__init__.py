"""Carbon feed: reads, judges, forecasts and serves carbon intensities. `__main__` wires it; a `core/` is pure."""
