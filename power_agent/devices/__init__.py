"""Everything that touches a GPU driver: the typed wrapper over pynvml, and the simulated node it can run on."""
