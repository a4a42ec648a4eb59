"""Dispatcher: one Triton endpoint for all slices. `worker` wires it; a `core/` is pure."""
