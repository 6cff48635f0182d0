"""One driver for each program whose figures were published. `run` does on a traced card what its owner did on a real one.

A driver of another project's program imports that program from its checkout. Nothing of it is kept in this repository.
"""
