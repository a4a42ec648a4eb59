"""Where Tritons run: a process of this host, a container, or a process of a simulated node."""
