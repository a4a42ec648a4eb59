"""Lengths of generated answers, predicted before they begin: a process of its own, and who asks it."""
