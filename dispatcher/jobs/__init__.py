"""Jobs: items that may wait, in files of a folder, answered by slices that nobody else waits for."""
