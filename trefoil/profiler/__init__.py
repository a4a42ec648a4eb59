"""Profiles: what an operating point costs. `law` and `fit` model them, the other modules measure them on a Triton."""
