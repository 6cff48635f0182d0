"""Faults put into runs on purpose, by hundreds: see harness.py. `make faults`, `make faults-long`."""
