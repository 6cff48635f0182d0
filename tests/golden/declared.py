"""Changes of answers that were meant. An entry that allows nothing is an error, so that none outlives its change."""

from .compare import Declared

PLAN = "one schema of a plan for every kind of run, foretrain.plan/1, with its kind, verdict and needed_bytes; its memory is phases"
ADVICE = "a fine-tuning plan has its changes as `advice`, as every plan has"
LINE = "one line of a plan for every kind of run: of generating text, batch and context are parts of it"
FACTS = (
    "one description of a model: ModelFacts for generating text, too, which count a latent attention and know a format"
)
CHECK = "--check has one sentence for every kind of run, and exit code 2 where there is no verdict"
DECLARED: tuple[Declared, ...] = (
    Declared(
        "",
        r"\.(kind|needed_bytes|verdict|step|compiled|obstacle|paged_bytes|timing|available_bytes)$",
        PLAN,
        old=r"^\(nothing\)$",
    ),
    Declared("finetune|inference|cluster", r"schema$", PLAN),
    Declared("inference", r"memory", PLAN),
    Declared("inference", r"stdout.*\.(model|facts)", FACTS),
    Declared("^python inference", r"stdout:\d+", FACTS),
    Declared("", r"facts\.(latent|published)$", FACTS, old=r"^\(nothing\)$"),
    Declared("finetune", r"(advice|changes|largest)", ADVICE),
    Declared("cluster|inference", r"stdout\.advice$", ADVICE, old=r"^\(nothing\)$"),
    Declared("^python", r"stdout:\d+", PLAN, new='plan of|"kind"|available_bytes'),
    Declared("inference", "stdout", LINE, new="tokens"),
    Declared("check", "stderr", CHECK),
    Declared("^languages", "stdout", LINE),
)
