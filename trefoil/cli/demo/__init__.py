"""The demo: policies played one after the other on this machine, and their report."""
