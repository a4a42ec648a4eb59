"""Exploration core: which candidate is measured, when it is left, and what it showed."""
