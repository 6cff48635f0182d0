"""The rule about the arithmetic of matrix products (`matmul`, docs/techniques.md): FP8, INT8, float16 sums."""

from collections.abc import Sequence

from foretrain.advice.rules.base import Change, Rule, State
from foretrain.base.errors import UserError
from foretrain.config.checks import EIGHT_BITS, LEAST_CAPABILITY, check_matmul
from foretrain.hardware.catalogue import MatmulMode

MODES: tuple[MatmulMode, ...] = ("fp16_accumulation", "fp8", "int8")
# Beside the toll of what rounds otherwise: how a long run ends in such products nobody has measured here.
TOLL = 0.05
# In narrower models quantizing costs more than 8-bit matmuls save: GPT-2 124M (768) took 1.6 times as long in FP8 on an
# H100 (docs/trust.md), and nanochat's d12 was slower there, too, where its d26 gained 17% (its dev/LOG.md).
LEAST_WIDTH = 1024


def matmul(state: State) -> Sequence[Change]:
    """Every mode that this card and these sizes take. Nothing on a CPU, which only tries them, and in float32."""
    c = state.effective
    if state.gpu.kind != "cuda" or not state.half or c.matmul != "dtype":
        return []
    found = []
    for mode in MODES:
        if mode in EIGHT_BITS and c.n_embd < LEAST_WIDTH:
            continue
        options = {"matmul": mode} | ({"dtype": "float16"} if mode == "fp16_accumulation" else {})
        after = Change(options).applied(state)
        try:
            check_matmul(after.config, after.gpu, after.dtype)
        except UserError:
            continue
        found.append(Change({k: v for k, v in options.items() if getattr(state.config, k) != v}))
    return found


def matmul_idle(state: State) -> str:
    c = state.effective
    if c.matmul != "dtype":
        return "already_on"
    if state.gpu.kind != "cuda":
        return "on_cpu" if state.gpu.kind == "cpu" else "old_card"
    if not state.half:
        return "float32"
    return "old_card" if state.gpu.capability < min(LEAST_CAPABILITY.values()) else "not_here"


MATMUL = Rule(
    "matmul", "speed", "rounding", "docs/techniques.md; benchmarks/precision_modes.py", matmul, matmul_idle, ours=True,
    toll=TOLL,
)  # fmt: skip
