"""Which runs are tried on the CUDA build: the GPU suite's cases but one, and a grid over options, drawn by a fixed seed.

Models are small: what counts is how allocation behaves, and a small temporary is a large part of a small model.
"""

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from foretrain.config.checks import check

REPO = Path(__file__).parent.parent.parent
SEED = 18
Tier = Literal["default", "large"]
COUNTS: dict[Tier, tuple[int, int]] = {"default": (48, 10), "large": (220, 80)}  # eager and compiled, of the grid


def _suite() -> Any:
    """benchmarks/gpu/cases.py, which is a script's and in no package."""
    spec = importlib.util.spec_from_file_location("gpu_suite_cases", REPO / "benchmarks" / "gpu" / "cases.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SUITE = _suite()
Case = SUITE.Case

ON_A_CARD_ONLY = {"1.5B"}  # it takes more than 32 GB of the host; "all offloads" has its options at a small size

# Runs that once were predicted wrongly, beside the suite's.
ONCE_WRONG = [
    Case("124M batch 12", {"batch_size": 12, "gradient_accumulation_steps": 5}, "float16", "nanogpt", False),
    Case("124M dropout 0.1", {"batch_size": 4, "gradient_accumulation_steps": 5, "dropout": 0.1}, "bfloat16", "nanogpt", False),
]  # fmt: skip

# Other families, beside the drawn ones, whose names and draws stay as they are.
LLAMA = {
    "recipe": "llama", "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 256, "block_size": 256, "batch_size": 4,
    "gradient_accumulation_steps": 2, "vocab_size": 4096,
}  # fmt: skip
NANOCHAT = {
    "recipe": "nanochat", "n_layer": 2, "n_head": 4, "n_embd": 256, "block_size": 256, "batch_size": 4,
    "gradient_accumulation_steps": 2, "vocab_size": 4096, "optimizer": "muon",
}  # fmt: skip
FAMILIES = [
    Case(f"family: {name}", settings, dtype, "foretrain", compiled)
    for compiled in (False, True)
    for name, settings, dtype in (
        ("Llama", LLAMA, "bfloat16"),
        ("Llama", {**LLAMA, "n_layer": 4, "batch_size": 3}, "float32"),
        ("Llama, tied, chunked loss", {**LLAMA, "tied_embeddings": True, "loss_chunk_size": 256}, "bfloat16"),
        ("Llama, checkpointing", {**LLAMA, "n_layer": 4, "activation_checkpointing": True}, "bfloat16"),
        ("Qwen3", {**LLAMA, "n_kv_head": 1, "head_dim": 96, "qk_norm": True, "tied_embeddings": True}, "bfloat16"),
        ("nanochat", NANOCHAT, "bfloat16"),
        ("nanochat, checkpointing", {**NANOCHAT, "n_layer": 4, "activation_checkpointing": True}, "bfloat16"),
    )
]

# (what it is called, its options); a value that is a list is drawn from.
EVERYWHERE: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("dropout", {"dropout": [0.1, 0.2]}),
    ("bias", {"bias": True}),
    ("dropout and bias", {"dropout": 0.1, "bias": True}),
    ("no clipping", {"grad_clip": 0.0}),
    ("evaluation only", {"eval_only": True}),
]
OWN: list[tuple[str, dict[str, Any]]] = [
    ("chunked loss", {"loss_chunk_size": [128, 200, 512, 1024]}),
    ("checkpointing", {"activation_checkpointing": True}),
    ("part checkpointed", {"activation_checkpointing": True, "checkpointed_blocks": 1}),
    ("checkpointing and dropout", {"activation_checkpointing": True, "dropout": 0.1}),
    ("norms and GELU recomputed", {"recompute_norm_gelu": True}),
    ("master weights", {"master_weights": True}),
    ("master weights, chunked loss", {"master_weights": True, "loss_chunk_size": [256, 1024]}),
    ("adamw8bit", {"optimizer": "adamw8bit"}),
    ("muon", {"optimizer": "muon"}),
    ("offload", {"optimizer_offload": True}),
    ("offload and master weights", {"optimizer_offload": True, "master_weights": True}),
    ("modern", {"recipe": "modern", "optimizer": "muon"}),
    ("modern, adamw", {"recipe": "modern"}),
    ("modern, chunked loss", {"recipe": "modern", "optimizer": "muon", "loss_chunk_size": [256, 1024]}),
    ("modern, checkpointing", {"recipe": "modern", "activation_checkpointing": True}),
    ("evaluation of other rows", {"eval_batch_size": [1, 2, 12, 16]}),
    ("evaluation of shorter blocks", {"eval_block_size": [32, 64, 96]}),
]
COMPILED_ONLY: list[tuple[str, dict[str, Any]]] = [
    ("auto chunker", {"auto_chunker": True}),
    ("memory budget", {"activation_memory_budget": [0.3, 0.5, 0.7]}),
    ("compiled blocks", {"compile_blocks": True}),
]
HEAD_WIDTHS = [64, 64, 64, 32, 128, 80, 50]
SIZES: dict[str, list[Any]] = {
    "n_layer": [1, 2, 2, 3, 4], "n_head": [1, 2, 3, 4, 6], "block_size": [97, 128, 256, 512, 1024],
    "batch_size": [1, 2, 3, 4, 8], "gradient_accumulation_steps": [1, 1, 2, 3, 4, 5, 8],
    "vocab_size": [256, 1000, 1013, 4096, 32000, 50257, 50304],
}  # fmt: skip
MOST_LOGITS = 8 * 1024 * 50304  # elements; what the host has to fill with zeros grows with them


def cases(tier: Tier) -> list[Any]:
    """All cases of a tier, in the order in which they are run. A name is a case's for good: tiers share them."""
    eager, compiled = COUNTS[tier]
    drawn = [*_first(eager, compiled=False), *_first(compiled, compiled=True)]
    suite = [case for case in SUITE.CASES if case.name not in ON_A_CARD_ONLY]
    return [*_named([*suite, *ONCE_WRONG, *FAMILIES, *TECHNIQUES]), *drawn]


# Techniques that came after the draws.
SMALL_GPT2 = {
    "n_layer": 3, "n_head": 4, "n_embd": 256, "block_size": 256, "batch_size": 4, "gradient_accumulation_steps": 2,
    "vocab_size": 4096,
}  # fmt: skip
OFFLOADS = {
    "master_weights": True, "loss_chunk_size": 256, "optimizer_offload": True, "gradient_offload": True,
    "activation_checkpointing": True, "checkpoint_offload": True,
}  # fmt: skip
IN_BACKWARD = {"optimizer_in_backward": True, "gradient_accumulation_steps": 1, "grad_clip": 0.0}
TECHNIQUES = (
    [
        Case("technique: adamw4bit", {**SMALL_GPT2, "optimizer": "adamw4bit"}, dtype, "foretrain", compiled)
        for dtype, compiled in (("bfloat16", False), ("float16", False), ("bfloat16", True))
    ]
    + [
        Case(f"technique: in backward{name}", {**SMALL_GPT2, **IN_BACKWARD, **settings}, dtype, "foretrain", compiled)
        for name, settings, dtype, compiled in (
            ("", {}, "bfloat16", False),
            ("", {}, "float32", False),
            (", checkpointing", {"activation_checkpointing": True, "loss_chunk_size": 256}, "bfloat16", False),
            ("", {"compile_blocks": True}, "bfloat16", True),
        )
    ]
    + [
        Case(
            "technique: all offloads",
            {**SMALL_GPT2, **OFFLOADS, "compile_blocks": compiled},
            "bfloat16",
            "foretrain",
            compiled,
        )
        for compiled in (False, True)
    ]
    + [
        Case(
            f"technique: CUDA graph{name}", {**SMALL_GPT2, "cuda_graph": "on", **settings}, dtype, "foretrain", compiled
        )
        for name, settings, dtype, compiled in (
            ("", {}, "bfloat16", False),
            ("", {}, "float16", False),
            (", dropout and bias", {"dropout": 0.1, "bias": True, "gradient_accumulation_steps": 5}, "float32", False),
            (", master weights", {"master_weights": True, "loss_chunk_size": 256}, "bfloat16", False),
            (", checkpointing", {"activation_checkpointing": True}, "bfloat16", False),
            (", evaluation of other rows", {"eval_batch_size": 12}, "bfloat16", False),
            ("", {}, "bfloat16", True),
            (", Llama", {**LLAMA, "gradient_accumulation_steps": 1}, "bfloat16", True),
            (", compiled blocks", {"compile_blocks": True, "dropout": 0.2}, "bfloat16", True),
        )
    ]
)


def _named(suite: list[Any]) -> Iterator[Any]:
    for case in suite:
        mode = "compiled" if case.compiled else "eager"
        yield case._replace(name=f"{case.name}, {case.step}, {case.dtype}, {mode}")


def _first(count: int, *, compiled: bool) -> Iterator[Any]:
    """The first cases of an endless list: it goes through techniques in turn, and all else is drawn."""
    draw = random.Random(f"{SEED} {compiled}")
    number = 0
    for technique, options, own in _in_turn(compiled):
        if number == count:
            return
        case = _drawn(draw, technique, options, own=own, compiled=compiled)
        if case is not None:
            number += 1
            yield case._replace(name=f"{'compiled' if compiled else 'eager'} {number:03}: {case.name}")


def _in_turn(compiled: bool) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """(technique, its options, whether only foretrain's step has it), for ever."""
    own = [*OWN, *(COMPILED_ONLY if compiled else [])]
    while True:
        for i, (technique, options) in enumerate(own):
            yield technique, options, True
            yield (*EVERYWHERE[i % len(EVERYWHERE)], False)


def _drawn(draw: random.Random, technique: str, options: dict[str, Any], *, own: bool, compiled: bool) -> Any:
    """A case, or None where these options do not go together."""
    settings = {name: draw.choice(values) for name, values in SIZES.items()}
    settings["n_embd"] = settings["n_head"] * draw.choice(HEAD_WIDTHS)
    dtype = draw.choice(["float32", "bfloat16", "float16"])
    step = draw.choice(["foretrain", "nanogpt"])
    options = {name: draw.choice(value) if isinstance(value, list) else value for name, value in options.items()}
    while (
        settings["batch_size"] > 1
        and settings["batch_size"] * settings["block_size"] * settings["vocab_size"] > MOST_LOGITS
    ):
        settings["batch_size"] //= 2
    if compiled:
        settings["n_layer"] = min(settings["n_layer"], 2)  # each layer is compiled; more of them tell nothing new
    if own:
        step = "foretrain"
    settings |= options
    config, _ = check({**settings, "compile": compiled}, {})
    if config is None or ("master_weights" in settings and dtype == "float32"):
        return None
    return Case(f"{technique}, {step}, {dtype}", settings, dtype, step, compiled)


# What stands for a case where only the path through the program counts: benchmarks of a second, not of minutes.
SMALL = {
    "n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32, "vocab_size": 128, "batch_size": 2,
    "gradient_accumulation_steps": 2,
}  # fmt: skip


def shrunk(settings: dict[str, Any]) -> dict[str, Any]:
    """The same program at a size that a CPU does at once."""
    small = {**settings, **SMALL}
    small["gradient_accumulation_steps"] = min(2, settings.get("gradient_accumulation_steps", 2))
    for name, value in (
        ("loss_chunk_size", 16),
        ("checkpointed_blocks", 1),
        ("eval_batch_size", 3),
        ("eval_block_size", 16),
        ("n_kv_head", 1),
        ("cuda_graph", "off"),
    ):
        if small.get(name):
            small[name] = value
    return small
