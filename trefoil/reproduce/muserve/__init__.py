"""mu-Serve played again: its models, its cluster, what its offline half and its clocks are worth."""
