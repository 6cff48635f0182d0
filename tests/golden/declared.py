"""Changes of answers that were meant. An entry that allows nothing is an error, so that none outlives its change."""

from .compare import Declared

DPO = "DPO is planned as TRL's trainer runs it, where it had a lower bound"
GRPO = "GRPO is planned as TRL's trainer runs it, where it had a lower bound"
CLASSES = "a classifier of sequences is planned as the Trainer runs it, where it had an upper bound"
PRICE = "a price of a change has four digits in every kind of run"
PLANNED = "planned counts the estimates that a search took, of which halving takes one more or fewer"
FAMILIES = "answers about one thing share a schema, whose anchor the name has"
DECLARED: tuple[Declared, ...] = (
    Declared("finetune|inference|text", r"(advised|partial)\[\d+\]\.price$", PRICE, figures=0.001),
    Declared("", r"\.planned$", PLANNED),
    Declared("", r"schema$", FAMILIES, new="#"),
    Declared("", r"tune\.precompute_reference$", DPO, old=r"^\(nothing\)$", new="False"),
    Declared("", r"tune\.labels$", CLASSES, old=r"^\(nothing\)$", new=r"^\d+$"),
    Declared("", r"tune\.(completion_len|num_\w+|steps_per_generation|beta|vllm\w*)$", GRPO, old=r"^\(nothing\)$"),
    Declared("", r"timing\.generation_s$", GRPO, old=r"^\(nothing\)$", new="None"),
    Declared("finetune file: .*grpo_script.py", "", GRPO),
    Declared("finetune file: .*show-config", "stdout", GRPO),
    Declared("finetune file: .*seqcls_script.py", "", CLASSES),
    Declared("finetune file: .*(trl_dpo_full_15b.yaml|dpo_script.py)", "steps", DPO),
)
