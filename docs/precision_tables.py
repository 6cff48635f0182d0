"""The generated tables of docs/precision.md."""

from results import result

from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import find
from foretrain.predict.memory import predict
from foretrain.predict.plan import plan, timing
from foretrain.predict.spec import StepSpec

MODELS = {
    "124M": {},
    "350M": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "1.5B": {"n_layer": 48, "n_head": 24, "n_embd": 1536},
    "8 blocks of width 4096": {"n_layer": 8, "n_head": 32, "n_embd": 4096},
}  # fmt: skip
CARDS = ("RTX 3090", "RTX 4070", "RTX 4090")
MODES = (("fp8", "bfloat16"), ("int8", "bfloat16"), ("fp16_accumulation", "float16"))


def losses() -> str:
    """What benchmarks/precision_modes.py measured."""
    runs = result("precision_modes")["runs"]
    plain = next(run["val_loss"] for run in runs if run["run"] == "bfloat16")
    lines = [
        "| run | validation loss | against bfloat16 | cosine, first step | cosine, last step |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for run in runs:
        cosines = [f"{run[key]['cosine']:.4f}" if run[key] else "" for key in ("agreement_before", "agreement_after")]
        lines.append(
            f"| {run['run']} | {run['val_loss']:.4f} | {run['val_loss'] - plain:+.4f} | {cosines[0]} | {cosines[1]} |"
        )
    return "\n".join(lines)


def _step_s(knobs: dict[str, int], card: str, mode: str, dtype: str) -> float | None:
    values = {"batch_size": 8, "gradient_accumulation_steps": 40, **knobs, "matmul": mode, "dtype": dtype}
    gpu = find(card)
    if mode == "fp8" and gpu.capability < (8, 9):
        return None
    config = RunConfig.model_validate(values)
    made = timing(StepSpec.of(config, gpu))
    return made.step_s.expected_s if made else None


def speeds() -> str:
    """Predicted step time of the plain dtype over that of a mode, compiled, 8 x 1024 tokens, 40 micro-batches."""
    lines = [
        "| model | card | " + " | ".join(f"`{mode}`" for mode, _ in MODES) + " |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for name, knobs in MODELS.items():
        for card in CARDS:
            cells = []
            for mode, dtype in MODES:
                plain, low = (_step_s(knobs, card, m, dtype) for m in ("dtype", mode))
                cells.append(f"{plain / low:.2f} ×" if plain and low else "-")
            lines.append(f"| {name} | {card} | {' | '.join(cells)} |")
    return "\n".join(lines)


def moments() -> str:
    """Predicted states and step of adamw8bit against adamw, for an RTX 4070."""
    gpu = find("RTX 4070")
    lines = ["| model | states, adamw | states, adamw8bit | step longer by |", "| --- | ---: | ---: | ---: |"]
    for knobs in list(MODELS.values())[:3]:
        rows, times = [], []
        for optimizer in ("adamw", "adamw8bit"):
            config = RunConfig.model_validate({**knobs, "optimizer": optimizer})
            memory = predict(StepSpec.of(config, gpu, dtype="bfloat16", compiled=True))
            size = next(row.size_bytes for row in memory.phase("evaluate_steady").components if row.id == "optimizer")
            rows.append(f"{size / 2**20:,.0f} MiB")
            timing = plan(config, gpu).timing
            times.append(timing.step_s.expected_s if timing else 0.0)
        params = ModelShape.of(RunConfig.model_validate(knobs)).n_params
        lines.append(f"| {params / 1e6:,.0f}M | {rows[0]} | {rows[1]} | {(times[1] - times[0]) * 1e3:,.0f} ms |")
    return "\n".join(lines)
