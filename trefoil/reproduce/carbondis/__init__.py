"""CARBONDIS played again: two sets of five jobs on low-end GPUs and A100s."""
