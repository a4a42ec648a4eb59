"""What people reported or bring, one row each: kind, source, input, expected. The inputs are made up in that layout."""
