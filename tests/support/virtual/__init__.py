"""Trefoil in virtual time: an event loop without waiting, Redis in this process, a whole system from a seed."""
