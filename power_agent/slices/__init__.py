"""Slices: from a node plan to MIG instances and Tritons, step by step, and what is adopted at start."""
