"""Energy: counters read, joules split between slices, samples written."""
