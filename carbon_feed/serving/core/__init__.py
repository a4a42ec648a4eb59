"""Queries and change filters, pure."""
