"""Serving: the feed's RPCs, watchers, and the forecasts that it serves."""
