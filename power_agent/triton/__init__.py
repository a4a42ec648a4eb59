"""Triton: its client, its installation, and how one is started on a slice."""
