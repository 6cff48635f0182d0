"""Changes of answers that were meant. An entry that allows nothing is an error, so that none outlives its change."""

from .compare import Declared

DECLARED: tuple[Declared, ...] = (
    Declared("^python (finetune|cluster|inference)$", "", "one plan and one advise answer for every kind of run"),
    Declared("explain", r"stdout\.(phases?|sums|tensors|step|compiled|other_mode_bytes|timeline|because|remedies)\b",
             "one record explains the memory of every kind of run"),
)  # fmt: skip
