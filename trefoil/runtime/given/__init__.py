"""Files of model repositories: what others give is judged here before anything is read of it."""
