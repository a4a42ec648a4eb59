"""Clocks: leases, locks and who governs a device."""
