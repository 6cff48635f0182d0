"""Small files of a run's folder beside its record: what the run does now, and what its user calls it."""
