"""Runs while they go on, seen from outside: who is alive, what each does now, and what it takes of the machine."""
