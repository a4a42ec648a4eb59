"""Rollout: from the plan in force to the next one, never below the capacity that the load needs."""
