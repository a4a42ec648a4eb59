"""Families: import, check, profile."""
