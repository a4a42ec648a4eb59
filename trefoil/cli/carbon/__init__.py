"""Commands of `trefoil carbon`."""
