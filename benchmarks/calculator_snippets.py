"""One calculator asked about one config; started by calculators.py inside that calculator's own environment.

    python -I benchmarks/calculator_snippets.py deepspeed

prints one JSON value: {"version": …, "torch": …, "answers": [{"label", "bytes", "counts", "parts"}]}. Needs nothing of
foretrain. Every figure in it comes out of the calculator's code; `counts` says in words what its author counts.
"""

# pyright: reportMissingImports=false

import contextlib
import json
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

LAYERS, HEADS, WIDTH, BLOCK, VOCAB, BATCH = 12, 12, 768, 1024, 50304, 12  # nanoGPT's GPT-2 124M
STEPS, MICRO_STEPS = 2, 2  # Adam's states appear after the first step, accumulated gradients in the second micro-step
Answer = dict[str, Any]


def gpt2() -> Any:
    """GPT-2 124M as nanoGPT writes it: tied head, no biases, forward(idx, targets) returns (logits, loss)."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            B, T, C = x.shape
            q, k, v = (p.view(B, T, HEADS, C // HEADS).transpose(1, 2) for p in self.c_attn(x).split(C, dim=2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_fc = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
            self.gelu = nn.GELU()
            self.c_proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.c_proj(self.gelu(self.c_fc(x)))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.attn = nn.LayerNorm(WIDTH, bias=False), Attention()
            self.ln_2, self.mlp = nn.LayerNorm(WIDTH, bias=False), MLP()

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
            self.h = nn.ModuleList([Block() for _ in range(LAYERS)])
            self.ln_f = nn.LayerNorm(WIDTH, bias=False)
            self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
            self.wte.weight = self.lm_head.weight

        def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
            for block in self.h:
                x = block(x)
            x = self.ln_f(x)
            if targets is None:
                return self.lm_head(x[:, [-1], :]), None
            logits = self.lm_head(x)
            return logits, F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=-1)

    return GPT()


def n_params() -> int:
    return sum(p.numel() for p in gpt2().parameters())  # a tied weight is counted once


def answer(label: str, nbytes: float, counts: str, **parts: Any) -> Answer:
    return {"label": label, "bytes": round(nbytes), "counts": counts, "parts": parts}


def accelerate() -> list[Answer]:
    """What `accelerate estimate-memory` does after it has built the model from the Hub (commands/estimate.py)."""
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with init_empty_weights():
        model = gpt2()
    model.wte.weight = model.lm_head.weight  # the empty weights lost the tie; the command's models are tied again, too
    total, _ = calculate_maximum_sizes(model)
    found = []
    for dtype in ("float16", "float32"):
        usage = estimate_training_usage(total, dtype)
        found.append(
            answer(
                dtype, max(usage.values()), "the largest of weights, gradients, Adam; no batch, no activations", **usage
            )
        )
    return found


def deepspeed() -> list[Answer]:
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs, model_to_params

    total = model_to_params(gpt2())
    _, gpu = estimate_zero2_model_states_mem_needs(total, num_gpus_per_node=1, num_nodes=1, cpu_offload=False)
    return [answer("ZeRO-2, 1 GPU", gpu, "weights, gradients, Adam; no activations, no logits", total_params=total)]


def kitsune() -> list[Answer]:
    from kitsune.predict import predict_memory

    found = predict_memory(gpt2(), (BLOCK,), BATCH, "float16", "adamw", training=True, gpu="rtx-4070")
    return [
        answer(
            "float16", found.total_bytes, "model states, a tied weight twice, layer outputs by a rule for plain networks, 15 % on top",
            summary=found.summary(), parameters=found.param_bytes, gradients=found.gradient_bytes,
            optimizer=found.optimizer_bytes, activations=found.activation_bytes, overhead=found.overhead_bytes,
        )
    ]  # fmt: skip


def llm_analysis() -> list[Answer]:
    from llm_analysis.analysis import LLMAnalysis
    from llm_analysis.config import (
        ModelConfig,
        ParallelismConfig,
        get_dtype_config_by_name,
        get_gpu_config_by_name,
    )

    model = ModelConfig("gpt2-124m", LAYERS, HEADS, WIDTH, VOCAB, max_seq_len=BLOCK, model_type="gpt2")
    gpu, dtype = get_gpu_config_by_name("a100-sxm-40gb"), get_dtype_config_by_name("w16a16e16")
    analysis = LLMAnalysis(model, gpu, dtype, ParallelismConfig(), flops_efficiency=0.5)
    found = analysis.training(
        batch_size_per_gpu=BATCH, gradient_accumulation_steps=MICRO_STEPS, seq_len=BLOCK, flash_attn=True
    )
    parts = {name: found[name] for name in (
        "weight_memory_per_gpu", "gradient_memory_per_gpu", "optimizer_state_memory_per_gpu", "activation_memory_per_gpu",
        "activation_memory_embedding_output_per_gpu",
    )}  # fmt: skip
    total = found["(weight+op_state+grad+act)_memory_per_gpu"]
    return [answer("w16a16e16, flash", total, "model states, saved activations, one copy of the logits", **parts)]


def megatron_core() -> list[Answer]:
    names = [str(file) for file in distribution("megatron-core").files or () if "theoretical_memory" in file.name]
    if not names:
        raise LookupError(
            "the wheel has no theoretical_memory_usage: that file belongs to Megatron-LM's training scripts"
        )
    raise LookupError(f"this wheel has {names[0]}, which this script does not know how to ask")


def megatron_bridge() -> list[Answer]:
    """Its copy of Megatron-LM's theoretical_memory_usage, loaded alone: the package imports CUDA-only dependencies."""
    import importlib.util
    from types import ModuleType, SimpleNamespace

    import torch.nn.functional as F

    config_module, vocab_module = (ModuleType(f"megatron.bridge.{n}") for n in ("training.config", "utils.vocab_utils"))
    config_module.ConfigContainer = object  # type: ignore[attr-defined]  # the formula uses it as an annotation only
    vocab_module.calculate_padded_vocab_size = None  # type: ignore[attr-defined]  # not called: should_pad_vocab is off
    sys.modules |= {m.__name__: m for m in (config_module, vocab_module)}
    file = next(f for f in distribution("megatron-bridge").files or () if f.name == "theoretical_memory_utils.py")
    spec = importlib.util.spec_from_file_location("theoretical_memory_utils", str(file.locate()))
    assert spec is not None
    assert spec.loader is not None
    formula = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(formula)
    model = SimpleNamespace(
        num_layers=LAYERS, num_attention_heads=HEADS, kv_channels=WIDTH // HEADS, hidden_size=WIDTH,
        ffn_hidden_size=4 * WIDTH, num_query_groups=None, num_moe_experts=None, gated_linear_unit=False,
        activation_func=F.gelu, share_embeddings_and_output_weights=True, vocab_size=VOCAB, should_pad_vocab=False,
        seq_length=BLOCK, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
    )  # fmt: skip
    config = SimpleNamespace(
        model=model, train=SimpleNamespace(micro_batch_size=BATCH), data_parallel_size=1,
        optimizer=SimpleNamespace(use_distributed_optimizer=False),
    )  # fmt: skip
    states = formula.compute_weight_and_optimizer_memory(config)
    saved = formula.compute_activation_memory(config, num_microbatches=MICRO_STEPS)
    counts = "18 bytes a weight, 16-bit activations, one fp32 copy of the logits; its formula file loaded alone"
    return [answer("Megatron's formula", states + saved, counts, weight_and_optimizer=states, activations=saved)]


def vram_check() -> list[Answer]:
    from vram_check.estimator import estimate
    from vram_check.inspector import inspect

    params = inspect(gpt2()).total_params
    found = estimate(params, batch_size=BATCH, dtype="fp16", optimizer="adamw", training=True, seq_len=BLOCK)
    counts = "model states; activations = twice the weights, times the batch; the context is not used"
    return [answer("fp16", found.total_bytes, counts, **found.breakdown_gb)]


def gpu_estimator() -> list[Answer]:
    from gpu_estimator import GPUEstimator

    found = GPUEstimator().estimate_from_architecture(
        LAYERS, WIDTH, HEADS, VOCAB, batch_size=BATCH, sequence_length=BLOCK, precision="fp16", optimizer="adamw",
        gpu_type="RTX4090",
    )  # fmt: skip
    counts = "model states, two embeddings; activations = batch x context x the root of the parameters; 20 % on top"
    parts = {k: v for k, v in found.to_dict().items() if k.endswith("_gb")}
    return [answer("fp16", found.total_memory_gb * 2**30, counts, **parts)]  # it divides by 1024^3 and calls it GB


def qmemcalc() -> list[Answer]:
    from qmemcalc import estimate_memory

    config = {"model_type": "gpt2", "n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "n_positions": BLOCK,
              "vocab_size": VOCAB}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), "utf-8")
        found = estimate_memory(
            folder, BATCH, BLOCK, precision="fp16", optimizer="adamw", num_trainable_params=n_params()
        )
    counts = "weights by a rule (4 x width² x layers, no embedding), Adam, one 16-bit tensor a layer, 10 % on top"
    return [answer("fp16, all weights trained", found["total_MB"] * 1e6, counts, **found)]  # its MB are 1e6 bytes


def torchinfo() -> list[Answer]:
    import torch
    from torchinfo import summary

    idx = torch.zeros((BATCH, BLOCK), dtype=torch.long, device="meta")
    found = summary(gpt2(), input_data={"idx": idx, "targets": idx}, device="meta", mode="train", verbose=0)
    total = found.total_input + found.total_output_bytes + found.total_param_bytes
    counts = (
        "fp32: weights, a tied one twice; twice the output of each layer that has weights; no Adam, no cross-entropy"
    )
    return [
        answer(
            '"Estimated Total Size"', total, counts, input=found.total_input, parameters=found.total_param_bytes,
            forward_backward=found.total_output_bytes,
        )
    ]  # fmt: skip


def mem_tracker() -> list[Answer]:
    """PyTorch's MemTracker without a card: fake CPU tensors, so CPU autocast's rules and CPU kernels' choices."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.utils._python_dispatch import TorchDispatchMode

    attention: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "attention" in str(func):
                attention.add(str(func))
            return func(*args, **(kwargs or {}))

    tracker = MemTracker()
    with FakeTensorMode():
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        idx = torch.zeros((BATCH, BLOCK), dtype=torch.long)
        tracker.track_external(model, optimizer, idx)
        with Watch(), tracker:
            for _ in range(STEPS):
                for _ in range(MICRO_STEPS):
                    tracker.reset_mod_stats()  # it refuses a second forward pass without this
                    with torch.autocast("cpu", dtype=torch.float16):
                        _logits, loss = model(idx, idx)  # nanoGPT keeps the logits, too
                    assert loss is not None
                    (loss / MICRO_STEPS).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    parts = {getattr(kind, "value", kind): nbytes for kind, nbytes in peak.items()}
    counts = "every tensor of the step under CPU autocast on fake CPU tensors: casts and kernels are the CPU's"
    return [answer("MemTracker, fake CPU tensors", peak["Total"], counts, **parts, attention=sorted(attention))]


SNIPPETS = {
    "accelerate": accelerate, "deepspeed": deepspeed, "torch-kitsune": kitsune, "llm-analysis": llm_analysis,
    "megatron-core": megatron_core, "megatron-bridge": megatron_bridge, "vram-check": vram_check,
    "gpu-estimator": gpu_estimator, "qmemcalc": qmemcalc, "torchinfo": torchinfo, "torch": mem_tracker,
}  # fmt: skip


def main() -> None:
    name = sys.argv[1]
    with contextlib.redirect_stdout(sys.stderr):  # what a library prints must not stand beside the JSON
        answers = SNIPPETS[name]()
    found: dict[str, Any] = {"version": version(name), "torch": None, "answers": answers}
    with contextlib.suppress(PackageNotFoundError):
        found["torch"] = version("torch")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
