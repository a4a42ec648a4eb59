"""What a node is to become, and what its energy was spent on: pure, without clock, logs or I/O."""
