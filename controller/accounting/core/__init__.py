"""Receipts' rates and totals, pure."""
