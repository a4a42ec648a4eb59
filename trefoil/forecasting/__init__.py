"""Forecasts of load away from a running system: what a forecaster is trained on, and what it would have been worth."""
