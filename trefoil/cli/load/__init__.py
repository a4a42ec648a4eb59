"""Load generator of `trefoil load` and of the demo."""
