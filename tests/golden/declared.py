"""Changes of answers that were meant. An entry that allows nothing is an error, so that none outlives its change."""

from .compare import Declared

DPO = "DPO is planned as TRL's trainer runs it, where it had a lower bound"
GRPO = "GRPO is planned as TRL's trainer runs it, where it had a lower bound"
CLASSES = "a classifier of sequences is planned as the Trainer runs it, where it had an upper bound"
PRICE = "a price of a change has four digits in every kind of run"
PLANNED = "planned counts the estimates that a search took, of which halving takes one more or fewer"
LOOPS = "files of litgpt and ms-swift are read, where a command was named"
FAMILIES = "answers about one thing share a schema, whose anchor the name has"
NO_MODEL = "what names no model is told apart"
MERGE = "adapters are merged where a run asks for it alone"
MIXTURES = "each tensor of a format of llama.cpp has the type that its code gives it; more formats, layers on the host"
LARGEST = "--largest tries fewer values: outwards from where a line through two estimates meets the room"
DECLARED: tuple[Declared, ...] = (
    Declared("finetune|inference|text", r"(advised|partial)\[\d+\]\.price$", PRICE, figures=0.001),
    Declared("inference", "", MIXTURES),
    Declared("", r"\.planned$", PLANNED),
    Declared("largest", r"probes|stdout:\d+$", LARGEST),
    Declared("", r"schema$", FAMILIES, new="#"),
    Declared("", r"tune\.precompute_reference$", DPO, old=r"^\(nothing\)$", new="False"),
    Declared("", r"tune\.labels$", CLASSES, old=r"^\(nothing\)$", new=r"^\d+$"),
    Declared(".*(litgpt_lora|swift_sft).yaml", "", LOOPS),
    Declared("", r"tune\.merge$", MERGE, old=r"^\(nothing\)$", new="False"),
    Declared("", r"phases\[\d+\]$", MERGE, old=r"'phase': 'merge'", new=r"^\(nothing\)$"),
    Declared("", r"stdout:\d+$", MERGE, old="^  merging ", new=r"^\(nothing\)$"),
    Declared("", r"tune\.(completion_len|num_\w+|steps_per_generation|beta|vllm\w*)$", GRPO, old=r"^\(nothing\)$"),
    Declared("", r"timing\.generation_s$", GRPO, old=r"^\(nothing\)$", new="None"),
    Declared("finetune file: .*grpo_script.py", "", GRPO),
    Declared(
        "show-config", r"stdout:\d+$", MERGE, old=r"^\(nothing\)$", new="merge +False|adapters into|the card, after"
    ),
    Declared("serve finetune|python finetune|--(snapshot|lang ar)|finetune.*--explain|torchtune", "", MERGE),
    Declared("finetune: (qwen3-8b|llama-3.2-1b) --method.full", "advised|stdout:7", MERGE),
    Declared("finetune file: .*show-config", "stdout", GRPO),
    Declared("error: finetune: plan accelerate", r"stderr:1$", NO_MODEL, old="names no model", new="beside a model"),
    Declared("finetune file: .*seqcls_script.py", "", CLASSES),
    Declared("finetune file: .*(trl_dpo_full_15b.yaml|dpo_script.py)", "steps", DPO),
)
