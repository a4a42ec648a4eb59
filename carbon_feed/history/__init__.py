"""History: what was read, in Redis and on disk."""
