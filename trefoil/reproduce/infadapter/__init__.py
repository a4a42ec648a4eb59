"""InfAdapter played again: its published capacities, its two loads, its figures."""
