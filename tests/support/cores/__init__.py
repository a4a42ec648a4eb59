"""The cores of a controller on the simulated shell, struck by drawn faults: a history in some tens of milliseconds."""
