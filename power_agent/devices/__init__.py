"""Real devices: typed wrappers over pynvml, DCGM, GPM, RAPL and CPUs."""
