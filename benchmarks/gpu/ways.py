"""Ways to run GPT-2 124M and a few other models on one card: time and memory of each, beside nanoGPT's own step.

    python benchmarks/gpu/ways.py --out ways.json           (six minutes on a card of 40 GB or more, no network)
    python benchmarks/gpu/ways.py --device cpu --small      (does the script itself work?)

Every way is a process of its own that stays: they compile side by side, then train blocks of steps in turn, three
rounds, so that a card that grows warm is warm for all. A block of a way that waits costs the card nothing. Ratios are
between nanoGPT's compiled block and the way's in the same round. Tokens are drawn from 50,304 with a text's few
frequent and many rare ones; both sides read them from the same file.
"""

import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
from at_once import error_of, head, import_compiler, parser_of
from cases import MOVED, SENDS

ROUNDS, WARM = 3, 3
TRIES, WAIT_S = 20, 4  # where ways that start have taken the card's memory
GPT2 = {"batch_size": 12, "gradient_accumulation_steps": 5}
MEDIUM = {"n_layer": 24, "n_head": 16, "n_embd": 1024, "batch_size": 4, "gradient_accumulation_steps": 4}
NARROW = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12}
ONE = {"gradient_accumulation_steps": 1}
CHARACTERS = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 64}
HALF = {"master_weights": True, "loss_chunk_size": 1024}
WIDE = {**MEDIUM, "batch_size": 16, "gradient_accumulation_steps": 2}


class Way(NamedTuple):
    """A model, and how its step is run."""

    model: str
    name: str
    settings: dict[str, Any]
    step: str = "foretrain"
    compiled: bool = True
    dtype: str = "bfloat16"

    @property
    def title(self) -> str:
        mode = "" if self.compiled else ", eager"
        return f"{self.model}: {self.name}{mode}{', fp16' if self.dtype == 'float16' else ''}"


def of(model: str, base: dict[str, Any], ways: dict[str, dict[str, Any]], **more: Any) -> list[Way]:
    """Return nanoGPT's compiled step and these variants of ours."""
    rival = Way(model, "nanoGPT", base, "nanogpt", **more)
    return [rival, *(Way(model, name, {**base, **settings}, **more) for name, settings in ways.items())]


WAYS = [
    *of("124M", GPT2, {
        "plain": {},
        "master weights": {"master_weights": True},
        "masters, chunks": HALF,
        "masters, chunks, norms and GELU again": {**HALF, "recompute_norm_gelu": True},
        "masters, chunks, checkpointing": {**HALF, "activation_checkpointing": True},
        "masters, budget 0.7": {"master_weights": True, "activation_memory_budget": 0.7},
        "masters, fp8": {"master_weights": True, "matmul": "fp8"},
        "modern, Muon": {"recipe": "modern", "optimizer": "muon"},
        "masters, chunks of 4096": {"master_weights": True, "loss_chunk_size": 4096},
        "masters, blocks": {"master_weights": True, "compile_blocks": True},
        "masters, max-autotune": {"master_weights": True, "compile_mode": "max-autotune-no-cudagraphs"},
        "auto chunker": {"auto_chunker": True},
        "masters, adamw8bit": {"master_weights": True, "optimizer": "adamw8bit"},
        "masters, adamw4bit": {"master_weights": True, "optimizer": "adamw4bit"},
        "masters, chunks, gradients offloaded": {**HALF, **SENDS},
        "masters, chunks, checkpoints offloaded": {**HALF, **MOVED},
        "masters, chunks, all offloaded": {**HALF, **SENDS, **MOVED},
    }),
    Way("124M", "one graph", GPT2, "graphed"),
    Way("124M", "one graph, masters", {**GPT2, "master_weights": True}, "graphed"),
    Way("124M", "nanoGPT", GPT2, "nanogpt", compiled=False),
    Way("124M", "plain", GPT2, compiled=False),
    *of("4 × 128", {**NARROW, **ONE}, {
        "plain": {}, "CUDA graphs": {"compile_mode": "reduce-overhead"},
        "masters, CUDA graphs": {"compile_mode": "reduce-overhead", "master_weights": True},
    }),
    Way("4 × 128", "one graph", {**NARROW, **ONE}, "graphed"),
    Way("4 × 128", "one graph", {**NARROW, **ONE}, "graphed", compiled=False),
    Way("4 × 128", "one graph, masters", {**NARROW, **ONE, "master_weights": True}, "graphed"),
    *of("6 × 384", {**CHARACTERS, **ONE}, {
        "plain": {}, "masters": {"master_weights": True},
        "masters, CUDA graphs": {"compile_mode": "reduce-overhead", "master_weights": True},
    }),
    Way("6 × 384", "one graph", {**CHARACTERS, **ONE}, "graphed"),
    Way("6 × 384", "one graph, masters", {**CHARACTERS, **ONE, "master_weights": True}, "graphed"),
    *of("350M", MEDIUM, {"masters, chunks, norms and GELU again": {**HALF, "recompute_norm_gelu": True}}),
    *of("350M, 16 × 1024", WIDE, {
        "masters, chunks, norms and GELU again, gradients offloaded, blocks": {
            **HALF, **SENDS, "recompute_norm_gelu": True, "compile_blocks": True,
        },
    }),
    *of("124M in fp16", GPT2, {"plain": {}, "masters": {"master_weights": True}}, dtype="float16"),
]  # fmt: skip
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_size": 4, "gradient_accumulation_steps": 1}
SMALL = [
    Way("tiny", "nanoGPT", TINY, "nanogpt", compiled=False, dtype="float32"),
    Way("tiny", "plain", TINY, compiled=False, dtype="float32"),
]
PROFILED = {
    "nanoGPT",
    "plain",
    "master weights",
    "masters, chunks, norms and GELU again",
    "one graph",
    "one graph, masters",
}
BLOCKS = {"4 × 128": 100, "6 × 384": 50, "tiny": 3}  # per block, 4 by default


def chosen(ways: list[Way], pattern: str) -> list[Way]:
    """Return those whose title has the pattern, each model's with nanoGPT's compiled step for comparison."""
    found = [way for way in ways if re.search(pattern, way.title)]
    models = {way.model for way in found}
    return [way for way in ways if way in found or (way.step == "nanogpt" and way.compiled and way.model in models)]


def tokens(folder: Path) -> None:
    from nanogpt_step import tokens_like_text

    draw = np.random.default_rng(0)
    for split, count in (("train", 8_000_000), ("val", 500_000)):
        tokens_like_text(draw, count).tofile(folder / f"{split}.bin")


class Trainer:
    def __init__(self, way: Way, device: str, folder: Path) -> None:
        import torch
        from nanogpt_step import Foretrain, NanoGptTraining

        from foretrain.config.options import RunConfig
        from foretrain.data.dataset import read_info
        from foretrain.model.graphed import GraphedStep

        config = RunConfig.model_validate(
            {**way.settings, "device": device, "dataset": str(folder), "compile": way.compiled}
        )
        made: Any = NanoGptTraining if way.step == "nanogpt" else Foretrain
        self.on_card = device == "cuda"
        self.torch, self.number, self.config = torch, 0, config
        self.own = made(config, torch.device(device), way.dtype, read_info(folder), compiled=way.compiled)
        if way.step == "graphed":
            self.own.take = GraphedStep(self.own.state)

    def block(self, count: int) -> dict[str, Any]:
        """Return seconds per step of so many, torch's peaks, and the last loss."""
        torch = self.torch
        if self.on_card:
            torch.cuda.reset_peak_memory_stats()
            self.own.step(self.number)  # reallocate what the last block freed
            torch.cuda.synchronize()
        began, loss = time.perf_counter(), 0.0
        for _ in range(count):
            loss = self.own.step(self.number)
            self.number += 1
        found: dict[str, Any] = {"step_s": (time.perf_counter() - began) / count, "loss": loss}
        if self.on_card:
            found |= {
                "allocated_bytes": torch.cuda.max_memory_allocated(),
                "reserved_bytes": torch.cuda.max_memory_reserved(),
            }
            torch.cuda.empty_cache()
        return found

    def forget(self) -> None:
        """Free what an out-of-memory step has left."""
        model = self.own.state.model if hasattr(self.own, "state") else self.own.model
        for parameter in model.parameters():
            parameter.grad = None
        self.torch.cuda.empty_cache()

    def kernels(self, count: int) -> dict[str, Any]:
        """Return the profiler's view of so many steps: each kernel's runs and seconds per step, longest first.

        `busy_s`: seconds per step in which any kernel ran; `host_s`: of the step while it was watched.
        """
        import torch
        from torch.profiler import ProfilerActivity, profile

        self.own.step(self.number)
        began = time.perf_counter()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(count):
                self.own.step(self.number)
            torch.cuda.synchronize()
        took_s = (time.perf_counter() - began) / count
        events: Any = found.events()
        ran = [event for event in events if event.device_type.name == "CUDA"]
        spans = sorted((event.time_range.start, event.time_range.end) for event in ran)
        busy, until = 0.0, 0.0
        for start, end in spans:
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
        self.torch.cuda.empty_cache()
        return {
            "host_s": took_s, "busy_s": busy / 1e6 / count, "runs": sum(row.count for row in rows) / count,
            "kernels": [[row.key[:120], row.count / count, row.self_device_time_total / 1e6 / count] for row in rows[:40]],
        }  # fmt: skip


def work(way: Way, device: str, folder: Path, connection: Connection) -> None:
    """Build and compile in a process, then train a block on request."""
    try:
        began = time.perf_counter()
        trainer = Trainer(way, device, folder)
        for left in reversed(range(TRIES)):
            try:
                trainer.block(WARM)
                break
            except Exception as error:
                if "out of memory" not in str(error) or not left:
                    raise
            trainer.forget()  # others that start have the card's memory for a moment
            time.sleep(WAIT_S)
        connection.send({"first_steps_s": time.perf_counter() - began, "tokens": trainer.config.tokens_per_step})
        while True:
            what, count = connection.recv()
            connection.send(getattr(trainer, what)(count))
    except EOFError:
        pass
    except Exception as error:  # one failing way must not cost the others their time on the card
        connection.send(error_of(error))
    os._exit(0)


def measure(ways: list[Way], device: str, folder: Path, at_once: int, end: float) -> list[dict[str, Any]]:
    """Start all, `at_once` side by side, then measure in turn."""
    fork = multiprocessing.get_context("fork")
    rows: list[dict[str, Any]] = [{**way._asdict(), "title": way.title, "blocks": []} for way in ways]
    pipes: dict[int, Any] = {}
    ready, starting = list[int](), dict[int, Any]()
    among = [[way.model for way in ways[:i]].count(way.model) for i, way in enumerate(ways)]
    waiting = sorted(range(len(ways)), key=among.__getitem__)  # large models not all at one time
    while (waiting or starting) and time.monotonic() < end:
        while waiting and len(starting) < at_once:
            index = waiting.pop(0)
            here, there = fork.Pipe()
            fork.Process(target=work, args=(ways[index], device, folder, there), daemon=True).start()
            there.close()
            starting[index] = here
        for index, pipe in list(starting.items()):
            if pipe.poll(0.02):
                del starting[index]
                rows[index] |= _heard(pipe)
                print(f"{rows[index].get('first_steps_s', 0):5.0f} s  {ways[index].title}: {rows[index].get('error', 'ready')}", flush=True)  # fmt: skip
                if "error" not in rows[index]:
                    ready.append(index)
                    pipes[index] = pipe
    for index in [*waiting, *starting]:
        rows[index]["error"] = "no time left"
    ready.sort()
    for turn in range(ROUNDS):
        for index in ready if turn % 2 == 0 else reversed(ready):
            if time.monotonic() > end + 60 or "error" in rows[index]:
                continue
            try:
                answer = asked(pipes[index], "block", BLOCKS.get(ways[index].model, 4))
            except OSError:
                answer = {"error": "the process ended"}
            if "error" in answer:
                rows[index] |= answer
            else:
                rows[index]["blocks"].append(answer)
    for index in ready:
        if (
            device == "cuda"
            and ways[index].name in PROFILED
            and "error" not in rows[index]
            and time.monotonic() < end + 60
        ):
            try:
                rows[index]["profile"] = asked(pipes[index], "kernels", 3)
            except OSError:
                rows[index]["profile"] = {"error": "the process ended"}
    return rows


def asked(pipe: Connection, what: str, count: int) -> dict[str, Any]:
    pipe.send((what, count))
    return _heard(pipe)


def _heard(pipe: Connection) -> dict[str, Any]:
    try:
        return pipe.recv()
    except EOFError:
        return {"error": "the process ended"}


def judged(rows: list[dict[str, Any]]) -> None:
    """Add medians, and ratios to the compiled step of nanoGPT for the same model."""
    rivals = {
        row["model"]: row for row in rows if row["step"] == "nanogpt" and (row["compiled"] or row["model"] == "tiny")
    }
    for row in rows:
        if not row["blocks"]:
            continue
        row["step_s"] = median(block["step_s"] for block in row["blocks"])
        row["tokens_per_s"] = row["tokens"] / row["step_s"]
        for key in ("allocated_bytes", "reserved_bytes"):
            row[key] = max(block.get(key, 0) for block in row["blocks"])
        rival = rivals.get(row["model"], {}).get("blocks", [])
        ratios = [a["step_s"] / b["step_s"] for a, b in zip(rival, row["blocks"], strict=False)]
        if ratios:
            row["ratio"], row["ratio_range"] = median(ratios), [min(ratios), max(ratios)]


def main() -> None:
    args = parser_of(__doc__, "gpu_ways.json", minutes=6.0, at_once=6).parse_args()
    end = time.monotonic() + args.minutes * 60
    import_compiler()
    ways = chosen(SMALL if args.small else WAYS, args.only)
    with tempfile.TemporaryDirectory() as folder:
        tokens(Path(folder))
        rows = measure(ways, args.device, Path(folder), args.at_once, end)
    judged(rows)
    args.out.write_text(json.dumps({**head(__doc__, args.device), "rows": rows}, indent=1) + "\n", "utf-8")
    for row in rows:
        took = (
            f"{row['step_s'] * 1e3:,.2f} ms, {row.get('ratio', 0):.2f} times nanoGPT"
            if row["blocks"]
            else row.get("error", "")
        )
        print(f"{row['title']}: {took}")


if __name__ == "__main__":
    main()
