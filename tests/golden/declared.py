"""Changes of answers that were meant. An entry that allows nothing is an error, so that none outlives its change."""

from .compare import Declared

DECLARED: tuple[Declared, ...] = (
    Declared(case="", path="", old=r"foretrain/gpus\.toml", new=r"foretrain/hardware/gpus\.toml", reason="it moved"),
    Declared(case="advise", path="", old="reference  docs/memory.md; ", new="", reason="a user needs no module's path"),
)
