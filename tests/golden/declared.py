"""Changes of answers that were meant. An entry that allows nothing is an error, so that none outlives its change."""

from .compare import Declared

DECLARED: tuple[Declared, ...] = ()
