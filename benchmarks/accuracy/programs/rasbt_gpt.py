"""rasbt/LLMs-from-scratch, ch05/10_llm-training-speed: a GPT-2 of 163M parameters made fast in ten steps.

The first and the last script are the owner's. Those between are put together from both as the owner's list says, with
our own lines for what is in neither. One epoch of few steps: reserved memory no longer grows after it.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy.programs import theirs

STEPS = {"00_orig": 16, "01_opt_single_gpu": 11}  # to the second evaluation of each script, and the sample of text


class Letters:
    """A tokenizer of one token a character."""

    def encode(self, text: str, **options: object) -> list[int]:
        return [1] * len(text)

    def decode(self, ids: list[int]) -> str:
        return "a" * len(ids)


def _mask_on_the_fly(module: Any) -> None:
    """The first script's attention without its stored mask."""
    attention = module.MultiHeadAttention
    made = attention.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        del self.mask

    def forward(self: Any, x: Tensor) -> Tensor:
        b, t, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(b, t, self.num_heads, self.head_dim).transpose(1, 2)

        k, q, v = self.W_key(x), self.W_query(x), self.W_value(x)
        k, v, q = heads(k), heads(v), heads(q)
        scores = q @ k.transpose(2, 3)
        scores.masked_fill_(torch.triu(torch.ones(t, t, dtype=torch.bool, device=x.device), diagonal=1), -torch.inf)
        weights = self.dropout(torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1))
        return self.out_proj((weights @ v).transpose(1, 2).reshape(b, t, self.d_out))

    attention.__init__, attention.forward = init, forward


def run(on: Any, settings: dict[str, Any], checkouts: list[Path]) -> dict[str, int]:
    script, batch, vocab = settings["script"], settings["batch_size"], settings["vocab_size"]
    theirs.no_plots()
    theirs.stand_in("tiktoken", get_encoding=lambda name: Letters())
    theirs.stand_in("requests")
    changes = {"num_workers=4": "num_workers=0"}
    if script == "01_opt_single_gpu" and not settings.get("compile", True):
        changes["model = torch.compile(model)"] = ""
    module: Any = theirs.load(checkouts[0] / "ch05" / "10_llm-training-speed" / f"{script}.py", "their_script", changes)
    steps = set(settings.get("steps", ()))
    if "mask on the fly" in steps:
        _mask_on_the_fly(module)
    if "tensor cores" in steps:
        torch.set_float32_matmul_precision("high")
    if "fused AdamW" in steps:
        adamw = torch.optim.AdamW
        module.torch.optim.AdamW = lambda *args, **kwargs: adamw(*args, fused=True, **kwargs)
    if "bfloat16" in steps:
        model = module.GPTModel
        module.GPTModel = lambda config: model(config).to(torch.bfloat16)
    if "torch's classes" in steps:
        module.LayerNorm = nn.LayerNorm
        module.GELU = lambda: nn.GELU(approximate="tanh")
    readings: dict[str, int] = {}
    sample = module.generate_and_print_sample

    def sample_and_read(*args: Any, **kwargs: Any) -> None:
        sample(*args, **kwargs)
        readings.update(rest=torch.cuda.memory_allocated(), reserved=torch.cuda.memory_reserved())

    module.generate_and_print_sample = sample_and_read
    tokens = batch * 1024 * STEPS[script]
    with tempfile.TemporaryDirectory() as folder:
        book = Path(folder) / "middlemarch.txt"
        book.write_text("a" * int((tokens + 1) / 0.9 + 100), "utf-8")
        exists, opened = module.os.path.exists, open
        module.os.path.exists = lambda path: path == book.name or exists(path)
        module.__dict__["open"] = lambda path, *args, **kwargs: opened(
            book if path == book.name else path, *args, **kwargs
        )
        module.main(
            {"vocab_size": vocab, "context_length": 1024, "emb_dim": 768, "n_heads": 12, "n_layers": 12,
             "drop_rate": 0.1, "qkv_bias": False},
            {"learning_rate": 5e-4, "num_epochs": 1, "batch_size": batch, "weight_decay": 0.1},
        )  # fmt: skip
        module.os.path.exists = exists
    return readings
