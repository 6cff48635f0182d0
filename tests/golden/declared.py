"""Changes of answers that were meant. An entry that allows nothing is an error, so that none outlives its change."""

from .compare import Declared

PLAN = "one schema of a plan for every kind of run, foretrain.plan/1, with its kind, verdict and needed_bytes; its memory is phases"
ADVICE = "a fine-tuning plan has its changes as `advice`, as every plan has"
LINE = "one line of a plan for every kind of run: of generating text, batch and context are parts of it"
CHECK = "--check has one sentence for every kind of run, and exit code 2 where there is no verdict"
FACTS = (
    "one description of a model: ModelFacts for generating text, too, which count a latent attention and know a format"
)
WORDS = "one parser of words: the last value of an option counts, with a note; a value that cannot be is refused as in pretraining"
SHARDED = "fine-tuning on several cards has a strategy, as pretraining has"
DECLARED: tuple[Declared, ...] = (
    Declared("", r"\.strategy$", SHARDED, old=r"^\(nothing\)$"),
    Declared("inference", r"stdout.*\.(model|facts)", FACTS),
    Declared("^python inference", r"stdout:\d+", FACTS, new='"facts": '),
    Declared("", r"facts\.(latent|published)$", FACTS, old=r"^\(nothing\)$"),
    Declared("--bf16 --fp16", "", WORDS),
    Declared(
        "file: .*show-config",
        "stdout:",
        "options of fine-tuning are shown as those of pretraining are, with unit and help",
    ),
    Declared("^error: (finetune|inference)", "stderr", WORDS, new="must be|needs a value"),
    Declared("", r"fields\[\d+\]\.(least|most|limits)$", WORDS),
    Declared(
        "",
        r"\.(kind|needed_bytes|verdict|step|compiled|obstacle|paged_bytes|timing|available_bytes)$",
        PLAN,
        old=r"^\(nothing\)$",
    ),
    Declared("finetune|inference|cluster", r"schema$", PLAN),
    Declared("inference", r"memory", PLAN),
    Declared("finetune", r"(advice|changes|largest)", ADVICE),
    Declared("cluster|inference", r"stdout\.advice$", ADVICE, old=r"^\(nothing\)$"),
    Declared("^python", r"stdout:\d+", PLAN, new='plan of|"kind"|available_bytes'),
    Declared("inference", "stdout", LINE, new="tokens"),
    Declared("check", "stderr", CHECK),
    Declared("^languages", "stdout", LINE),
)
