"""Doctor of a node: what a power agent needs of a machine, looked at without an agent and without changing anything."""
