"""Checks of what comes from outside: ranges of numbers, values in streams."""
