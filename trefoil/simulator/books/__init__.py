"""Books: joules, grams, requests and times of a run."""
