"""Rules of clocks and of a device's governor, pure."""
