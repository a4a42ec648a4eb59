"""Jobs: items that may wait. They are in files; idle slices answer them."""
