"""Changes of answers that were meant. An entry that allows nothing is an error, so that none outlives its change."""

from .compare import Declared

PAGE = "the page asks of every kind of run in one way: one form, and jobs at one address"
APPLIED = "--apply shows a change of every kind of run in full"
FACTS = "how heads are rotated and normed are facts of a model"
REWARD = "a reward model is planned, so the help of --training says when TRL's loop is meant"
DPO = "DPO is planned as TRL's trainer runs it, where it had a lower bound"
COUNT = "--gpus with a count plans as many of each card of --gpu"
DECLARED: tuple[Declared, ...] = (
    Declared("", r"facts\.(rotary|scaled_queries|qk_norm_after)$", FACTS, old=r"^\(nothing\)$"),
    Declared("", r"tune\.precompute_reference$", DPO, old=r"^\(nothing\)$", new="False"),
    Declared("python inference", r"stdout:\d+", FACTS, new='"qk_norm_after": "view"'),
    Declared("error: cluster", "stderr", COUNT, new="of each card of --gpu"),
    Declared("finetune file: .*(trl_dpo_full_15b.yaml|dpo_script.py)", "steps", DPO),
    Declared("finetune file: trl.yaml.*--show-config", "stdout", REWARD),
    Declared("serve (start|plans|forms|advice|exact|finetune|cluster|text)", "answers", PAGE),
    Declared("error: (cluster|finetune): advise .*--apply 1", r"steps\[[01]\]", APPLIED),
)
