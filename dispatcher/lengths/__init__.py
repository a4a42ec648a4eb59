"""Lengths of generated answers, predicted before they begin, by a separate process and its client."""
