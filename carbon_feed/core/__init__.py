"""What a reading is worth, and when to ask for another: pure, without clock, logs or I/O."""
