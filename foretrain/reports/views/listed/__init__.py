"""Lists of runs as Documents."""
