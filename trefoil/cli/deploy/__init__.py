"""Deployments by Docker Compose: what of this machine the file at the top of the checkout has to know."""
