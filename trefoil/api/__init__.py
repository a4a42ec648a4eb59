"""Public Python API: `trefoil.plan`, `trefoil.simulate`, `trefoil.compare`, `trefoil.Client` (docs/python.md).

Every error is a `trefoil.core.errors.TrefoilError`: one line with field, value and remedy.
"""
