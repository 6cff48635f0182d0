"""Changes of answers that were meant. An entry that allows nothing is an error, so that none outlives its change."""

from .compare import Declared

CARDS = "generating text on several cards, whose options and words are those of fine-tuning"
ADVISED = "what to change when a model generates text is advice, as of every run, and not a field of the plan"
FLOW = "one flow of plan for every kind of run: its questions, --check of --largest and messages are the same"
PAGE = "the page asks of every kind of run in one way: one form, and jobs at one address"
SHARDED = "fine-tuning on several cards has a strategy, as pretraining has"
APPLIED = "--apply shows a change of every kind of run in full"
DECLARED: tuple[Declared, ...] = (
    Declared("", r"\.strategy$", SHARDED, old=r"^\(nothing\)$"),
    Declared("serve (start|plans|forms|advice|exact|finetune|cluster|text)", "answers", PAGE),
    Declared("inference", r"fitting$", ADVISED, new=r"^\(nothing\)$"),
    Declared("inference: llama-3.3-70b --inference --gpu 4090", "stdout:", ADVISED),
    Declared("error: inference: plan --inference", r"steps\[2\]", ADVISED),
    Declared("inference", r"asked\.(world|split|per_node|link|network)$", CARDS, old=r"^\(nothing\)$"),
    Declared("", "stderr", CARDS, new="is about several cards|run one model together|how many cards there are|--split"),
    Declared("inference.*largest", "stdout", FLOW),
    Declared("error: inference.*--json --full", "", FLOW),
    Declared("error: (cluster|finetune): advise .*--apply 1", r"steps\[[01]\]", APPLIED),
    Declared("python inference", r"stdout:\d+", CARDS, new='"world": 1'),
)
