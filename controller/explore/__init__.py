"""Exploration: candidates of a planner that measures, deployed and measured one after the other."""
