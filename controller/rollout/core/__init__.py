"""Path and pace of a rollout, pure."""
