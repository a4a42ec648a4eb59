"""Scenario: what is played, from TOML to truth, arrivals and carbon."""
