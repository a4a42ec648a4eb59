"""Energy meter and attribution, pure."""
