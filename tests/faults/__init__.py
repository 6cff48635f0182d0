"""Faults put into runs on purpose, by hundreds: see harness.py. `make faults`, `make faults-long`."""

import os

# Threads that wait do not spin: forks train beside each other, on machines that are busy already. libgomp reads it once.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
