"""foretrain's own trainer on the fake card against `plan --exact`: by the phases of its run record, resume among them."""

import json
import random
import shutil
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cuda_build.environment import HOME, PYTHON, on_the_card
from tests.cuda_build.grid import REPO

BASE: dict[str, Any] = {
    "n_layer": 3, "n_head": 4, "n_embd": 256, "block_size": 256, "vocab_size": 4096, "batch_size": 4,
    "gradient_accumulation_steps": 2, "compile": False, "dtype": "bfloat16",
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16, accumulation 8": {"dtype": "float16", "gradient_accumulation_steps": 8},
    "fp32, dropout, bias": {"dtype": "float32", "dropout": 0.1, "bias": True},
    "checkpointing, loss by 512": {"activation_checkpointing": True, "loss_chunk_size": 512},
    "adamw8bit": {"optimizer": "adamw8bit"},
    "adamw4bit": {"optimizer": "adamw4bit"},
    "optimizer in backward": {"optimizer_in_backward": True, "gradient_accumulation_steps": 1, "grad_clip": 0.0},
    "modern, muon": {"recipe": "modern", "optimizer": "muon"},
    "offload": {"optimizer_offload": True},
    "compiled": {"compile": True},
    "no CUDA graph": {"cuda_graph": "off"},
}
RUN = {"max_iters": 8, "eval_interval": 4, "eval_iters": 2, "log_interval": 1, "warmup_iters": 1, "lr_decay_iters": 8}
RESUMED = "bf16"  # the case that is resumed, too
Row = dict[str, Any]


def rows(say: Callable[[str], None]) -> list[Row]:
    folder = HOME / "trainer"
    shutil.rmtree(folder, ignore_errors=True)
    _tokens(folder / "data")
    found = []
    for name, change in CASES.items():
        say(f"trainer: {name}")
        out = folder / f"run{len(found)}"
        words = [f"--{key}={value}" for key, value in {**BASE, **change}.items()]
        try:
            planned = _planned(words)
            found.append(_row(name, planned, _trained([*words, f"--out_dir={out}"], folder)))
            if name == RESUMED:
                more = ["--max_iters=12", f"--out_dir={out}", "--init_from=resume"]
                found.append(_row(f"{name}, resumed", planned, _trained([*words, *more], folder)))
        except (RuntimeError, KeyError, StopIteration, ValueError) as error:
            found.append({"name": name, "error": f"{type(error).__name__}: {str(error)[-400:]}"})
    return found


def _tokens(folder: Path) -> None:
    folder.mkdir(parents=True)
    draw = random.Random(0)
    for name, count in (("train", 60_000), ("val", 20_000)):
        tokens = array("H", (draw.randrange(BASE["vocab_size"]) for _ in range(count)))
        (folder / f"{name}.bin").write_bytes(tokens.tobytes())


def _last_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(done.stderr.strip() or f"it ended with {done.returncode} and said nothing")
    return json.loads(lines[-1])


def _trained(words: list[str], folder: Path) -> dict[str, Any]:
    settings = {key: value for key, value in RUN.items() if not any(word.startswith(f"--{key}=") for word in words)}
    command = [
        PYTHON, "-m", "foretrain", "train", *words, *(f"--{key}={value}" for key, value in settings.items()),
        f"--dataset={folder / 'data'}", "--device=cuda", "--json",
    ]  # fmt: skip
    # A kernel that is known from before is not tried out, which takes less memory than is planned.
    environment = {**on_the_card(), "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = subprocess.run(command, env=environment, cwd=REPO, capture_output=True, text=True)
    said = _last_json(done)
    if "memory" not in said:
        raise RuntimeError(said.get("message", f"it ended with {done.returncode}"))
    return {phase["phase"]: phase for phase in said["memory"]["phases"]}


def _planned(words: list[str]) -> dict[str, Any]:
    """{phase: peaks} of the plan of foretrain's step."""
    command = [sys.executable, "-m", "foretrain", "plan", *words, "--gpu=RTX 4070", "--exact", "--json"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    step = next(each for each in _last_json(done)["memory"] if each["step"] == "foretrain")
    return {phase["phase"]: phase for phase in step["phases"]}


def _row(name: str, planned: dict[str, Any], trained: dict[str, Any]) -> Row:
    row: Row = {"name": name}
    both = sorted(planned.keys() & trained.keys())
    for what in ("allocated_bytes", "reserved_bytes"):
        ours, real = (max(side[phase][what] for phase in both) for side in (planned, trained))
        row[what] = {"predicted": ours, "real": real, "error": ours / real - 1}
    return row
