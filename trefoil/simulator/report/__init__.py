"""Results of a run, and what a forecast is worth."""
