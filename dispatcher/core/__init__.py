"""Where requests go, and what is known of slices: pure, without clock, logs or I/O."""
