"""Jobs: work with a deadline, planned over the next hours."""
