"""Decisions of the carbon feed: what a reading is worth, when to poll again. Pure: no clock, logs or I/O."""
