"""Changes of answers that were meant. An entry that allows nothing is an error, so that none outlives its change."""

from .compare import Declared

DPO = "DPO is planned as TRL's trainer runs it, where it had a lower bound"
CLASSES = "a classifier of sequences is planned as the Trainer runs it, where it had an upper bound"
PRICE = "a price of a change has four digits in every kind of run"
PLANNED = "planned counts the estimates that a search took, of which halving takes one more or fewer"
FAMILIES = "answers about one thing share a schema, whose anchor the name has"
NO_MODEL = "what names no model is told apart"
MERGE = "adapters are merged where a run asks for it alone"
DECLARED: tuple[Declared, ...] = (
    Declared("finetune|inference|text", r"(advised|partial)\[\d+\]\.price$", PRICE, figures=0.001),
    Declared("", r"\.planned$", PLANNED),
    Declared("", r"schema$", FAMILIES, new="#"),
    Declared("", r"tune\.precompute_reference$", DPO, old=r"^\(nothing\)$", new="False"),
    Declared("", r"tune\.labels$", CLASSES, old=r"^\(nothing\)$", new=r"^\d+$"),
    Declared("", r"tune\.merge$", MERGE, old=r"^\(nothing\)$", new="False"),
    Declared("", r"phases\[\d+\]$", MERGE, old=r"'phase': 'merge'", new=r"^\(nothing\)$"),
    Declared("", r"stdout:\d+$", MERGE, old="^  merging ", new=r"^\(nothing\)$"),
    Declared(
        "show-config", r"stdout:\d+$", MERGE, old=r"^\(nothing\)$", new="merge +False|adapters into|the card, after"
    ),
    Declared("serve finetune|python finetune|--(snapshot|lang ar)|finetune.*--explain|torchtune", "", MERGE),
    Declared("finetune: (qwen3-8b|llama-3.2-1b) --method.full", "advised|stdout:7", MERGE),
    Declared("error: finetune: plan accelerate", r"stderr:1$", NO_MODEL, old="names no model", new="beside a model"),
    Declared("finetune file: .*seqcls_script.py", "", CLASSES),
    Declared("finetune file: .*(trl_dpo_full_15b.yaml|dpo_script.py)", "steps", DPO),
)
