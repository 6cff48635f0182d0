"""Fuzzing of everything that reads a file of somebody else's. `make fuzz`; targets.py says what is read."""
