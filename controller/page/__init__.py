"""The live page: one read-only page of the running system, for a browser."""
