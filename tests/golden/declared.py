"""Changes of answers that were meant. An entry that allows nothing is an error, so that none outlives its change."""

from .compare import Declared

RANKS = "several ranks can share a step: new options, and what a run on several has"
MODERN = "recipe = modern: a share of the token before, a momentum of 0.85; Muon iterates four times"
SPLIT = "what a split gives is no view to the partition of a compiled step, so another tensor of that size may be kept"
EVAL = "`foretrain eval` is new: a command, its texts, and what it found of a run"
LAZY = "advice estimates memory only of what it may take, so fewer estimates are counted"
GENERATION = (
    "sample keeps keys and values, says what it needs and takes --top-p; a full context drops its oldest quarter"
)
INFERENCE = "plan --inference and chat: an option, a command, a function, and their texts"
TRACKERS = "a run can be reported to trackers: report_to is a new option, and wandb_log has an effect"
APPLE = "plans for Apple GPUs are of what trains there: bfloat16, uncompiled, attention that saves its scores"
CLICK = (
    "help is drawn for click's own parameters: a flag shows no <bool>, an argument stands in the usage as it is typed, and "
    "the column of types is as wide as it has to be; one text, of values that click refuses, is gone"
)
SENSORS = "a report says that foretrain reads the sensors of NVIDIA cards only: an Apple GPU is no CPU"
TIMING = "one Timing for every kind of run: fields that only some have"
FORECAST = "--within and --largest have one answer for every kind of run, and several cards are asked them, too"
PRICE = "plan --inference takes --price; its speed is a Timing"
ADVICE = "one record of advice for one card and for several, whose own are in `shared`, `cluster`, `way` and `counts`"
RECORD = "one record of a run, run.json, whoever trained it: a watched run of an older tree is none, and lists are one"
PICTURES = "pictures are drawn in Python: the page gets their elements and what can be pointed at, not numbers to draw"
FACTS = (
    "one description of a model: ModelFacts for generating text, too, which count a latent attention and know a format"
)
WORDS = "one parser of words: the last value of an option counts, with a note; a value that cannot be is refused as in pretraining"
DECLARED: tuple[Declared, ...] = (
    Declared("^error: finetune", "stderr", ADVICE, new="fit, speed, cost"),
    Declared("^error: data", "stdout", "help is drawn for click's parameters"),
    Declared("inference", r"stdout.*\.(model|facts)", FACTS),
    Declared("^python inference", r"stdout:\d+", FACTS, new='"facts": '),
    Declared("", r"facts\.(latent|published)$", FACTS, old=r"^\(nothing\)$"),
    Declared("--bf16 --fp16", "", WORDS),
    Declared("^error: (finetune|inference)", "stderr", WORDS, new="must be|needs a value"),
    Declared("", r"fields\[\d+\]\.(least|most|limits)$", WORDS),
    Declared("^serve", r"pictures\[\d+\]\.(picture|source|small|figure)", PICTURES),
    Declared("(advise|plan).* finetune|finetune.*(advise|plan)|explain|page", r"(changes|remedies|advised|stdout\.(schema|plan|goal_given|name|"
             r"step|gpu|used_by_others_bytes|tokens_per_step|now|partial|useless|planned|now_confirmation|nothing_fits|cluster|way|"
             r"counts))", ADVICE),
    Declared("advise cluster", r"stdout\.(schema|advised|useless|step|gpu|used_by_others_bytes|now_confirmation)", ADVICE),
    Declared("^runs|watched", "", RECORD),
    Declared("^languages", "stdout", RECORD),
    Declared("", r"\.(source|last_loss)$", RECORD, old=r"^\(nothing\)$"),
    Declared(
        "", r"timing\.(steps|prices|hfu|(hardware_)?flops_per_step|flop_per_s|nanogpt_mfu|n_evaluations|evaluation_s|save_s|"
        r"compile_s|torch)$", TIMING, old=r"^\(nothing\)$",
    ),
    Declared("within", r"stdout\.(step|timing|asked_max_iters|config|verdict)$", FORECAST, new=r"^\(nothing\)$"),
    Declared("within", r"stdout\.(asked_steps|changed|plan)$", FORECAST, old=r"^\(nothing\)$"),
    Declared("largest|within", r"stdout\.(schema|step|value|plan|next_value|next_needed_bytes|positions|beyond_fits)$", FORECAST),
    Declared("largest", r"stdout\.(searched_all|available_bytes|probes|source|largest)", FORECAST),
    Declared("error: (cluster|finetune): plan .*--(largest|within)", "", FORECAST),
    Declared("inference", r"\.(speed|timing)$", PRICE),
    Declared("error: inference: .*--price", "", PRICE),
    Declared(
        "", r"\.(world|per_node|ranks|worlds|cards|card_tokens_per_s|scalings|dropout_by_number|seconds_before)$",
        f"{RANKS}; on one card these are one, or empty", old=r"^\(nothing\)$",
    ),
    Declared("", r"\.(strategy|hold_gradients|collective_timeout)$", RANKS, old=r"^\(nothing\)$"),
    Declared("", "text:|stdout:", RANKS, new="strategy|hold_gradients|collective_timeout"),
    Declared("^help |show-config$|^languages|^python names", "stdout", RANKS),
    Declared("", r"\.scores$", EVAL, old=r"^\(nothing\)$"),
    Declared("^help |^languages|^python names", "stdout", EVAL),
    Declared("^serve (start|forms|advice)", "", f"{RANKS}; the page has fields for them"),
    Declared("compare run and watched", "stdout:(9|43)", f"{RANKS}; a watched log says nothing of them"),
    Declared("plan drawn 30 ", "", "Inductor takes tangents to stay, which picks another order of kernels"),
    Declared("", r"\.report_to$", TRACKERS, old=r"^\(nothing\)$"),
    Declared("", "text:", TRACKERS, new="report_to"),
    Declared("", "stderr:", TRACKERS, old="wandb_log.*has no effect"),
    Declared("advise|^plan|python advise", r"\.planned$", LAZY),
    Declared("modern|plan drawn (2|71|76) |^serve plans|advise quality json", "", SPLIT),
    Declared("modern|muon|nanochat", "", MODERN),
    Declared("^sample", "", GENERATION),
    Declared("^help|^languages|^python names", "", INFERENCE),
    Declared("^help|^languages", "", CLICK),
    Declared("Apple M1 Max", "", APPLE),
    Declared("^report", "", SENSORS, new="NVIDIA"),
    Declared("^report run here", "size_bytes$", SENSORS),
)  # fmt: skip
