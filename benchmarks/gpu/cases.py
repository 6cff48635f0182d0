"""The cases of the GPU suite: every feature that moves memory, eager and compiled, our step and nanoGPT's."""

from typing import Any, NamedTuple


class Case(NamedTuple):
    name: str
    settings: dict[str, Any]
    dtype: str
    step: str
    compiled: bool


A = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 512, "batch_size": 16, "gradient_accumulation_steps": 4}
B1 = {"n_layer": 12, "n_head": 12, "n_embd": 384, "batch_size": 8, "gradient_accumulation_steps": 4}
C = {"n_layer": 12, "n_head": 12, "n_embd": 576, "batch_size": 16, "gradient_accumulation_steps": 4}
GPT2 = {"batch_size": 8, "gradient_accumulation_steps": 4}
CHARACTERS = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 64, "vocab_size": 65}

SENDS = {"optimizer_offload": True, "gradient_offload": True}
MOVED = {"activation_checkpointing": True, "checkpoint_offload": True}
LOW = {**GPT2, "master_weights": True, "loss_chunk_size": 1024}  # half-precision weights beside a chunked loss
XL = {  # examples/small-memory/gpt2-xl.toml with fewer micro-batches
    **LOW, **SENDS, **MOVED, "n_layer": 48, "n_head": 25, "n_embd": 1600, "batch_size": 32,
    "gradient_accumulation_steps": 2, "eval_iters": 2, "compile_blocks": True,
}  # fmt: skip
LLAMA = {**GPT2, "recipe": "llama", "n_kv_head": 4, "vocab_size": 32000}
NANOCHAT = {**GPT2, "recipe": "nanochat", "optimizer": "muon", "batch_size": 4, "vocab_size": 65536}
MODERN = {**GPT2, "recipe": "modern", "optimizer": "muon", "loss_chunk_size": 1024}

CASES = [
    Case("A", A, "float16", "nanogpt", True),
    Case("A", A, "float16", "foretrain", True),
    Case("A eager", A, "float16", "nanogpt", False),
    Case("A eager", A, "float16", "foretrain", False),
    Case("A bf16", A, "bfloat16", "nanogpt", True),
    Case("A fp32", A, "float32", "foretrain", False),
    Case("A fp32", A, "float32", "nanogpt", True),
    Case("B1", B1, "float16", "nanogpt", True),
    Case("B1", B1, "bfloat16", "foretrain", False),
    Case("C", C, "float16", "nanogpt", True),
    Case("C", C, "float16", "foretrain", True),
    Case("C eager", C, "float16", "nanogpt", False),
    Case("124M", GPT2, "bfloat16", "nanogpt", False),
    Case("124M", GPT2, "bfloat16", "nanogpt", True),
    Case("124M", GPT2, "bfloat16", "foretrain", False),
    Case("124M", GPT2, "bfloat16", "foretrain", True),
    Case("124M no accumulation", {**GPT2, "gradient_accumulation_steps": 1}, "float16", "nanogpt", False),
    Case("124M no accumulation", {**GPT2, "gradient_accumulation_steps": 1}, "float16", "foretrain", True),
    Case("124M checkpointing", {**GPT2, "activation_checkpointing": True}, "bfloat16", "foretrain", False),
    Case("124M checkpointing", {**GPT2, "activation_checkpointing": True}, "bfloat16", "foretrain", True),
    Case("124M chunked loss", {**GPT2, "loss_chunk_size": 2048}, "bfloat16", "foretrain", False),
    Case("124M chunked loss", {**GPT2, "loss_chunk_size": 2048}, "float16", "foretrain", True),
    Case("124M dropout bias", {**GPT2, "dropout": 0.1, "bias": True}, "bfloat16", "foretrain", False),
    Case("124M dropout bias", {**GPT2, "dropout": 0.1, "bias": True}, "bfloat16", "nanogpt", True),
    Case("124M vocab 50257", {**GPT2, "vocab_size": 50257}, "bfloat16", "foretrain", False),
    Case("124M vocab 50257", {**GPT2, "vocab_size": 50257}, "bfloat16", "nanogpt", True),
    Case("124M own evaluation", {**GPT2, "eval_batch_size": 24}, "bfloat16", "foretrain", False),
    *(
        Case(name, settings, "bfloat16", "foretrain", compiled)
        for name, settings in (
            ("124M master weights", LOW),
            ("124M norms and GELU again", {**LOW, "recompute_norm_gelu": True}),
            ("124M half checkpointed", {**LOW, "activation_checkpointing": True, "checkpointed_blocks": 6}),
            ("124M modern", MODERN),
            ("124M Llama", LLAMA),
            ("124M nanochat", NANOCHAT),
        )
        for compiled in (False, True)
    ),
    Case("124M adamw8bit", {**GPT2, "optimizer": "adamw8bit"}, "bfloat16", "foretrain", False),
    Case("124M offload", {**GPT2, "optimizer_offload": True}, "bfloat16", "foretrain", False),
    Case("124M gradients offloaded", {**LOW, **SENDS}, "bfloat16", "foretrain", False),
    Case("124M gradients offloaded, blocks", {**LOW, **SENDS, "compile_blocks": True}, "bfloat16", "foretrain", True),
    Case("124M checkpoints offloaded", {**LOW, **MOVED}, "bfloat16", "foretrain", False),
    Case("124M checkpoints offloaded", {**LOW, **MOVED}, "bfloat16", "foretrain", True),
    Case("124M blocks", {**LOW, "compile_blocks": True}, "bfloat16", "foretrain", True),
    Case("1.5B", XL, "bfloat16", "foretrain", True),
    Case("124M auto chunker", {**GPT2, "auto_chunker": True}, "bfloat16", "foretrain", True),
    Case("124M budget", {**GPT2, "activation_memory_budget": 0.7}, "bfloat16", "foretrain", True),
    Case("characters", CHARACTERS, "bfloat16", "foretrain", False),
    Case("characters dropout", {**CHARACTERS, "dropout": 0.2}, "float16", "nanogpt", True),
    Case("350M", {"n_layer": 24, "n_head": 16, "n_embd": 1024, "batch_size": 2}, "bfloat16", "foretrain", False),
    Case("350M", {"n_layer": 24, "n_head": 16, "n_embd": 1024, "batch_size": 2}, "bfloat16", "nanogpt", True),
]
SMALL = [
    Case("small", {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": 96, "batch_size": 4,
                   "gradient_accumulation_steps": 2}, "float32", step, False)
    for step in ("foretrain", "nanogpt")
]  # fmt: skip
