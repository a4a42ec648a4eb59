"""Membership and shares of credits, pure."""
