"""Engines: requests one by one or as a flow, on simulated hardware."""
