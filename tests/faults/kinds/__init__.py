"""The faults, one kind a file; each is drawn from a random state."""
