"""Simulated node: a model of driver and GPUs in a separate process, on which unmodified pynvml works."""
