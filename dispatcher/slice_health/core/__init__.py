"""Ejection, outliers and service times, pure."""
