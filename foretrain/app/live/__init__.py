"""Use cases that look at what goes on now."""
