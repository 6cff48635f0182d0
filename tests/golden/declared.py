"""Changes of answers that were meant. An entry that allows nothing is an error, so that none outlives its change."""

from .compare import Declared

DPO = "DPO is planned as TRL's trainer runs it, where it had a lower bound"
CLASSES = "a classifier of sequences is planned as the Trainer runs it, where it had an upper bound"
PRICE = "a price of a change has four digits in every kind of run"
PLANNED = "planned counts the estimates that a search took, of which halving takes one more or fewer"
FAMILIES = "answers about one thing share a schema, whose anchor the name has"
MIXTURES = "each tensor of a format of llama.cpp has the type that its code gives it; more formats, layers on the host"
DECLARED: tuple[Declared, ...] = (
    Declared("finetune|inference|text", r"(advised|partial)\[\d+\]\.price$", PRICE, figures=0.001),
    Declared("inference", "", MIXTURES),
    Declared("", r"\.planned$", PLANNED),
    Declared("", r"schema$", FAMILIES, new="#"),
    Declared("", r"tune\.precompute_reference$", DPO, old=r"^\(nothing\)$", new="False"),
    Declared("", r"tune\.labels$", CLASSES, old=r"^\(nothing\)$", new=r"^\d+$"),
    Declared("finetune file: .*seqcls_script.py", "", CLASSES),
    Declared("finetune file: .*(trl_dpo_full_15b.yaml|dpo_script.py)", "steps", DPO),
)
