"""Power agent: builds slices, runs Tritons, sets clocks, meters energy. `__main__` wires it; a `core/` is pure."""
