"""Controller: plans variants, slices, clocks, shares; rolls plans out. `__main__` wires it; a `core/` is pure."""
