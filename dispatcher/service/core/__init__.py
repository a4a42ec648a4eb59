"""Fallbacks: what stands in for what is away, pure."""
