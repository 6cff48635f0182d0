"""Changes of answers that were meant. An entry that allows nothing is an error, so that none outlives its change."""

from .compare import Declared

RESERVED = "the estimate replays small requests as the allocator serves them, so reserved memory moves by some MiB"
RANKS = "several ranks can share a step: new options, and what a run on several has"
DECLARED: tuple[Declared, ...] = (
    Declared("", "", RESERVED, figures=0.01),
    Declared("serve plans", r"answers\[1\]", f"{RESERVED}; here by 1.2 %"),
    Declared("advise|plan drawn 65", "saved", f"{RESERVED}; what a change saves is a difference of two such figures"),
    Declared("advise drawn 2", "needed_bytes", f"{RESERVED}; here by 2.6 %"),
    Declared("compare others", r"verdicts\[6\]", f"{RESERVED}; shares of differences"),
    Declared("plan shakespeare-char json", r"phases\[4\]", f"{RESERVED}; of a small phase by 1.5 %"),
    Declared("plan drawn (2|76) ", "size_bytes", f"{RESERVED}; 'rounding' holds what is left of blocks"),
    Declared("plan drawn 1[68]|advise nothing fits|serve advice", "", f"{RESERVED}; the largest model that fits is another"),
    Declared("report plan hi|exact report", "text:", f"{RESERVED}; points of a picture are in another order"),
    Declared("report modern|plan drawn 41", "", "the modern recipe's compiled kernels are fused as far as Inductor does"),
    Declared("small-memory", "", "checkpointed blocks, compiled, keep what Inductor keeps (2.57 to 2.62 GiB)"),
    Declared("show-config|serve start", "", "the family nanochat", new="nanochat|docs/recipes|a run|Qwen3 or"),
    Declared("python errors|serve start|serve plans", "", "the preset nanochat-d20", new="nanochat|shakespeare-char|baby"),
    Declared("error: plan nanogpt.py", "stderr", "options of nanochat are known now"),
    Declared(r"^serve ", "", "the page: pictures as draw.js draws them, texts made by the server, a run's report apart"),
    Declared(r"^(report|compare plans)", r"html", "pictures carry their texts and ticks; speed and MFU have ranges"),
    Declared("plan drawn (17|51) ", "", "one writing of rotary positions: modern's first evaluation asks in another order"),
    Declared(r"^(report|compare plans)", "size_bytes", "pictures carry their texts and ticks"),
    Declared("exact chunked|plan drawn 44", "components", "the low-precision copy of a chunked head is a weight copy"),
    Declared("", "components|explain", "positions are activations, as in the trace, not a batch", old=r"batch|activations|B·T|^$"),
    Declared("", r"stdout:\d+|text:\d+", "positions are activations, not a batch", old="  (batch|activations|other)|8·T"),
    Declared(
        "^(exact cpu|plan calibrated|plan baby|plan stdin|plan two files|python plan)", "size_bytes|stdout:85",
        "positions are activations, not a batch",
    ),
    Declared("error: explain", "stderr", "explain says what it reads, not only logs"),
    Declared(
        "", r"\.(world|per_node|ranks|worlds|cards|card_tokens_per_s|scalings|dropout_by_number|seconds_before)$",
        f"{RANKS}; on one card these are one, or empty", old=r"^\(nothing\)$",
    ),
    Declared("", r"\.(strategy|hold_gradients|collective_timeout)$", RANKS, old=r"^\(nothing\)$"),
    Declared("", "text:|stdout:", RANKS, new="strategy|hold_gradients|collective_timeout"),
    Declared("^help ", "stdout", RANKS),
    Declared("^languages", "", RANKS),
)  # fmt: skip
