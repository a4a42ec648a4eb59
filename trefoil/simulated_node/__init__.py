"""Simulated node: a model of driver and GPUs in a process of its own, on which unmodified pynvml works."""
