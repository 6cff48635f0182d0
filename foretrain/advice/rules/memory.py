"""Rules that techniques are (model/techniques/), and those about the allocator, the compiler and matmuls."""

from collections.abc import Iterator, Sequence

from foretrain.advice.rules.base import Change, Rule, State, rule_of
from foretrain.base.errors import UserError
from foretrain.config.checks import EIGHT_BITS, LEAST_CAPABILITY, check_matmul
from foretrain.hardware.catalogue import MatmulMode
from foretrain.model.techniques import TECHNIQUES

MODES: tuple[MatmulMode, ...] = ("fp16_accumulation", "fp8", "int8")
# Beside the toll of what rounds otherwise: how a long run ends in such products nobody has measured here.
TOLL = 0.05
# In narrower models quantizing costs more than 8-bit matmuls save: GPT-2 124M (768) took 1.6 times as long in FP8 on an
# H100 (docs/trust.md), and nanochat's d12 was slower there, too, where its d26 gained 17% (its dev/LOG.md).
LEAST_WIDTH = 1024


def expandable(state: State) -> Sequence[Change]:
    """The allocator's setting; nanoGPT takes it from the environment."""
    on = "expandable_segments:true" in state.config.allocator_settings.lower()
    if on or state.gpu.kind != "cuda":
        return []
    others = [part for part in state.config.allocator_settings.split(",") if part and "expandable" not in part]
    return [Change({"allocator_settings": ",".join([*others, "expandable_segments:True"])})]


def compile_on(state: State) -> Sequence[Change]:
    """On cards that Triton has kernels for."""
    able = state.gpu.kind == "cuda" and state.gpu.has_triton
    return [Change({"compile": True})] if able and not state.config.compile else []


def compile_idle(state: State) -> str:
    if state.config.compile:
        return "already_on"
    return "old_card" if state.gpu.kind == "cuda" else ""


def one_graph(state: State) -> Sequence[Change]:
    """On a card, where it can be recorded; modes of the compiler other than default have no forecast."""
    c = state.effective
    able = state.gpu.kind == "cuda" and c.is_recordable and c.compile_mode == "default"
    return [Change({"cuda_graph": "on"})] if able and not state.spec.is_one_graph else []


def half_precision(state: State) -> Sequence[Change]:
    """bfloat16 where the card has it, else float16; on a CPU none is given, as a run measures it there."""
    if state.dtype != "float32" or state.gpu.kind != "cuda" or state.gpu.capability < (7, 0):
        return []
    return [Change({"dtype": "bfloat16" if state.gpu.supports_bf16 else "float16"})]


def half_idle(state: State) -> str:
    return "already_on" if state.dtype != "float32" else "old_card" if state.gpu.kind == "cuda" else ""


def right_half(state: State) -> Sequence[Change]:
    """float16 where the run is in bfloat16 and the card has no units for it."""
    wrong = state.gpu.kind == "cuda" and state.dtype == "bfloat16" and not state.gpu.supports_bf16
    return [Change({"dtype": "float16"})] if wrong else []


_OWN = (
    Rule(
        "expandable_segments", "memory", "exact", "pytorch/pytorch docs/source/notes/cuda.rst; docs/memory.md",
        expandable, usual=lambda found: -1, quick=True, place=30,
    ),
    Rule(
        "compile", "both", "rounding", "pytorch.org/docs/stable/torch.compiler.html; docs/memory.md", compile_on,
        compile_idle, redraws=True, drop_order=10, try_order=1, quick=True, place=50,
    ),
    Rule(
        "cuda_graph", "speed", "exact", "docs.pytorch.org/docs/stable/notes/cuda.html; docs/trust.md", one_graph,
        ours=True, place=55,
    ),
    Rule(
        "half_precision", "both", "rounding", "Micikevicius et al. 2017, arXiv:1710.03740", half_precision, half_idle,
        drop_order=20, try_order=4, quick=True, place=60,
    ),
    Rule(
        "right_half", "speed", "rounding", "foretrain gpus; NVIDIA's architecture whitepapers", right_half, quick=True,
        place=70,
    ),
)  # fmt: skip


def _of_techniques() -> Iterator[Rule]:
    for technique in TECHNIQUES:
        if technique.advised:
            names = (technique.id, technique.rule)
            covers = tuple(t.id for t in TECHNIQUES if t is technique or (t.rule and t.rule in names))
            yield rule_of(technique, covers)


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


_MATMUL = Rule(
    "matmul", "speed", "rounding", "docs/techniques.md; benchmarks/precision_modes.py", matmul, matmul_idle, ours=True,
    toll=TOLL,
)  # fmt: skip

RULES = (*sorted((*_OWN, *_of_techniques()), key=lambda rule: rule.place), _MATMUL)
