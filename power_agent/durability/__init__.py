"""Durability: the journal that survives the agent, and what it publishes."""
