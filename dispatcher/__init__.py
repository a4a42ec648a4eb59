"""Dispatcher: one Triton endpoint for all slices. `__main__` wires it; a `core/` is pure."""
