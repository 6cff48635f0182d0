"""SIGTERM to one of several ranks, or to all at once, at random moments of whole runs; then they start again."""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch

from foretrain.base.errors import ExitCode
from foretrain.runs.folder import RunDirectory
from foretrain.training import checkpoint
from tests.faults.harness import random_of
from tests.kit import train_ranks as kit

STEPS = 60
MOST_STOPS = 6  # of one run; then it is let go on to its end
KINDS = ((2, "ddp"), (3, "zero1"), (2, "fsdp"))


def stopped_ranks(count: int, seed: int) -> dict[str, Any]:
    """Exit code 75 from every rank, the step it stopped at saved, and the rest of the run as ever; 2 and 3 ranks."""
    folder = Path("stopped-ranks")
    folder.mkdir()
    config = kit.config(dropout=0.1, max_iters=STEPS, lr_decay_iters=STEPS, eval_interval=20)
    kit.prepared(folder, config)
    found: dict[str, Any] = {"signals": 0, "exit_75": 0, "durable": 0, "runs": 0, "equal": 0, "slowest_s": 0.0}
    whole: dict[tuple[int, str], tuple[dict[str, torch.Tensor], list[float], float]] = {}
    while found["signals"] < count:
        kind = world, strategy = KINDS[found["runs"] % len(KINDS)]
        words = f"--strategy={strategy}", "--resume=auto"
        if kind not in whole:
            before = time.monotonic()
            assert kit.run(folder, world, *words, "--out_dir=whole") == [0] * world, kit.said(folder)
            took_s = time.monotonic() - before
            whole[kind] = kit.state(folder / "whole"), kit.losses(folder / "whole"), took_s
            shutil.rmtree(folder / "whole")
        out, stops = f"r{found['runs']}", 0
        while True:
            chance = random_of(seed, folder / out, stops)
            ranks = kit.started(folder, world, *words, f"--out_dir={out}")
            if stops < MOST_STOPS and found["signals"] < count and _listens(folder / out, ranks):
                time.sleep(chance.uniform(0, whole[kind][2] / MOST_STOPS))
                before = time.monotonic()
                for process in ranks if chance.random() < 0.4 else [chance.choice(ranks)]:
                    if process.exitcode is None:
                        os.kill(process.pid, signal.SIGTERM)
                codes = kit.ended(ranks)
            else:
                before, codes = 0.0, kit.ended(ranks)
            if codes == [0] * world:
                break
            found["signals"], stops = found["signals"] + 1, stops + 1
            found["slowest_s"] = max(found["slowest_s"], time.monotonic() - before)
            found["exit_75"] += codes == [ExitCode.STOPPED] * world
            record = RunDirectory(folder / out).read_record()
            path, _ = checkpoint.newest_valid(folder / out / "checkpoints")
            saved = checkpoint.read_progress(path).step if path else None
            found["durable"] += (record.status, saved) == ("interrupted", record.steps_done)
        found["runs"] += 1
        state, losses, _ = whole[kind]
        mine = kit.state(folder / out)
        same = all(torch.equal(mine[name], tensor) for name, tensor in state.items())
        found["equal"] += same and kit.losses(folder / out) == losses
        shutil.rmtree(folder / out)
    every = found["exit_75"] == found["durable"] == found["signals"]
    return {**found, "ok": every and found["equal"] == found["runs"]}


def _listens(run: Path, ranks: list[Any]) -> bool:
    before, end = _lines(run), time.monotonic() + kit.MOST_S
    while time.monotonic() < end and all(process.exitcode is None for process in ranks):
        if _lines(run) > before:
            return True
        time.sleep(0.01)
    return False


def _lines(run: Path) -> int:
    return len(RunDirectory(run).read_lines("metrics")) if run.exists() else 0
