"""Fewest steps from what is to what is planned, and drains, pure."""
