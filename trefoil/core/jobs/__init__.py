"""Jobs: work with a deadline of hours, which runs when it costs the fewest grams."""
