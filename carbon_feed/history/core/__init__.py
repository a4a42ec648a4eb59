"""Pieces of the past and the ratio to their average, pure."""
