"""Changes of answers that were meant. An entry that allows nothing is an error, so that none outlives its change."""

from .compare import Declared

DECLARED: tuple[Declared, ...] = (
    Declared(case="", path="", old=r"foretrain/gpus\.toml", new=r"foretrain/hardware/gpus\.toml", reason="it moved"),
    Declared(case="advise", path="", old="reference  docs/memory.md; ", new="", reason="a user needs no module's path"),
    Declared(
        case="",
        path="stderr",
        old=r"\(nothing\)",
        new="note: (min_lr|warmup_iters|lr_decay_iters) .* has no effect.* because decay_lr is False",
        reason="comparisons knew that nothing reads it then, and plans did not say so",
    ),
    Declared(
        case="",
        path="",
        old=r"\(nothing\)",
        new="cpu_threads.*it is the number of threads of a run on the CPU",
        reason="comparisons knew that a card has no use of it, and plans did not say so",
    ),
    Declared(
        case="plan with a trained config",
        path="stdout",
        old="1 note,",
        new="2 notes,",
        reason="cpu_threads on a card, as above",
    ),
    Declared(
        case="compare run and watched",
        path="stdout",
        old="47 settings|25 settings",
        new="43 settings|21 settings",
        reason="what the CPU, float32 or an uncompiled model makes idle is no difference",
    ),
    Declared(case="export nanogpt", path="ckpt.pt.sha256", reason="bias stands behind vocab_size in model_args"),
    Declared(
        case="python names",
        path="",
        old=r"^\(nothing\)$|^\['(Advices|Comparison)'",
        reason="more of the commands are public functions: advise, calibrate, explain, export, prepare, report, sample, train, "
        "tune; what compared a plan with its "
        "run is check_forecast, and compare does what the command does",
    ),
    Declared(case="error: data", path="", old="--lang|languages|--help", reason="-h is shown, which was always taken"),
    Declared(
        case=r"^(advise|compare|error|exact|plan|python plan|report|serve)\b",
        path="",
        reason="the operations of an eager step are those that PyTorch runs, counted in a real step: casts of inputs and of "
        "single weights, sums for biases and small kernels have to be launched, a chunked loss makes its gradient in an "
        "evaluation too, and the last addition of a checkpointed block is not recomputed; those of a compiled step are "
        "fused from these, which is within 1 % of the lists before for nanoGPT's model in half precision, and has biases",
    ),
    # recipe = llama: seven options and five presets more
    Declared(
        case="",
        path=r"\.(n_kv_head|head_dim|mlp_width|rope_theta|norm_eps|qk_norm|tied_embeddings)$",
        old=r"^\(nothing\)$",
        reason="options of the recipe llama",
    ),
    Declared(
        case="",
        path=r"\.toml|stdout",
        old=r"^\(nothing\)$",
        new="^ *(n_kv_head|head_dim|mlp_width|rope_theta|norm_eps|qk_norm|tied_embeddings) ",
        reason="options of the recipe llama",
    ),
    Declared(
        case="serve start",
        path=r"answer\.(fields|presets)",
        reason="options and presets of the recipe llama come between",
    ),
    Declared(case="", path="", new="llama-124m, smollm2-135m", reason="presets of the recipe llama"),
    Declared(case="languages", path=r"\.(texts|of)$", reason="texts of the recipe llama"),
    Declared(
        case="",
        path="",
        new="llama, nanochat|nanochat-d20|Qwen3 or nanochat|nanochat: its maths",
        reason="recipe = nanochat",
    ),
    Declared(case="", path="", new="with recipe = nanochat", reason="an option of nanochat's is told of its recipe"),
    Declared(case="python", path="stdout", new="n_kv_head|head_dim", reason="options of the recipe llama"),
)
