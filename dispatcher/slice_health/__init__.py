"""Slice health: probes, ejection of what hangs, sticks or is late, and slow start afterwards."""
