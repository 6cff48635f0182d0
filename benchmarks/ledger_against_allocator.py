"""The memory estimate against PyTorch's real CPU allocator, phase by phase, on a list of configs.

python benchmarks/ledger_against_allocator.py

Each config trains two steps and evaluates twice under PyTorch's profiler; the peak of the allocator's live blocks is
measured. The estimate knows only the config. Errors are signed: predicted / measured - 1.
"""

from statistics import median

import torch
from common import arguments, report
from torch.profiler import ProfilerActivity, profile

from foretrain.config.options import RunConfig
from foretrain.config.resolve import from_values
from foretrain.hardware.cpu import cpu_device
from foretrain.model.step import build, evaluation_loss, train_step
from foretrain.predict.memory import predict
from foretrain.predict.spec import StepSpec
from foretrain.training.meter import Meter, allocator_peak

PHASES = ("evaluate_first", "first_step", "steady_step", "evaluate_steady")
SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 128, "vocab_size": 256, "batch_size": 16}
CONFIGS: list[tuple[str, dict[str, object]]] = [
    ("baby", {**SMALL, "gradient_accumulation_steps": 1}),
    ("baby, accumulation 4", {**SMALL, "gradient_accumulation_steps": 4}),
    ("baby, bias", {**SMALL, "bias": True, "gradient_accumulation_steps": 2}),
    ("baby, dropout 0.1", {**SMALL, "dropout": 0.1, "gradient_accumulation_steps": 2}),
    ("baby, checkpointing", {**SMALL, "activation_checkpointing": True, "gradient_accumulation_steps": 2}),
    ("baby, bfloat16", {**SMALL, "dtype": "bfloat16", "gradient_accumulation_steps": 2}),
    ("6 x 384, 65 characters", {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "vocab_size": 65,
                                "batch_size": 8, "gradient_accumulation_steps": 2}),
    ("6 x 384, vocabulary 50,304", {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 4,
                                    "gradient_accumulation_steps": 2}),
    ("6 x 384, 50,304, bfloat16", {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 4,
                                   "gradient_accumulation_steps": 2, "dtype": "bfloat16"}),
    ("GPT-2 124M, 2 x 512", {"block_size": 512, "batch_size": 2, "gradient_accumulation_steps": 2}),
    ("baby, compiled", {**SMALL, "gradient_accumulation_steps": 2, "compile": True}),
    ("6 x 384, 50,304, bfloat16, compiled", {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256,
                                             "batch_size": 4, "gradient_accumulation_steps": 2, "dtype": "bfloat16",
                                             "compile": True}),
    ("GPT-2 124M, 2 x 512, compiled", {"block_size": 512, "batch_size": 2, "gradient_accumulation_steps": 2,
                                       "compile": True}),
    ("own evaluation batch", {**SMALL, "eval_batch_size": 40, "gradient_accumulation_steps": 2}),
]  # fmt: skip


def measure(config: RunConfig, dtype: torch.dtype) -> dict[str, int]:
    device = torch.device("cpu")
    state, meter = build(config, device, dtype, compile=config.compile), Meter(device)
    eval_shape, train_shape = (config.eval_batch, config.eval_block), (config.batch_size, config.block_size)

    def batch(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)

    def evaluate() -> None:
        for _ in range(2):
            evaluation_loss(state, batch(eval_shape))

    def train() -> None:
        train_step(state, (batch(train_shape) for _ in range(config.gradient_accumulation_steps)), 1e-3)

    found = {}
    for phase, run in zip(PHASES, (evaluate, train, train, evaluate), strict=True):
        standing = meter.weights(state) + meter.optimizer(state)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            run()
        found[phase] = standing + allocator_peak(prof)
    return found


def main() -> None:
    options = arguments("ledger_against_allocator", __doc__ or "")
    cases, worst = [], []
    for name, values in CONFIGS:
        config = from_values({"device": "cpu", "compile": False, **values}).config
        dtype = "bfloat16" if config.dtype == "bfloat16" else "float32"
        memory = predict(StepSpec.of(config, cpu_device(), dtype=dtype))
        measured = measure(config, getattr(torch, dtype))
        worst.append(abs(memory.worst.allocated_bytes / max(measured.values()) - 1))
        predicted = {p: memory.phase(p).allocated_bytes for p in PHASES}
        cases.append({"name": name, "config": values, "predicted_bytes": predicted, "measured_bytes": measured})
    summary = {"median_abs_error_of_peak": median(worst), "worst_abs_error_of_peak": max(worst)}
    report(options.out, {"what": (__doc__ or "").splitlines()[0], **summary, "cases": cases})


if __name__ == "__main__":
    main()
