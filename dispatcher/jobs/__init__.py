"""Jobs: items that may wait. They lie in files; idle slices answer them."""
