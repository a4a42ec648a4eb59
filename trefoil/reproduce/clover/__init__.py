"""CLOVER (SC 23) played again: ten A100s, three applications, 48 h of carbon."""
