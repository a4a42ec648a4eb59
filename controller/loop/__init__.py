"""Control loop: when to plan, what is recorded and put in force, and who leads."""
