"""Brain of the watch: what proves that a GPU was reset."""
