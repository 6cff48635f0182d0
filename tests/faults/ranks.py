"""kill -9 of one of several ranks, or of all at once, while they train and save beside it; then they start again."""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch

from foretrain.base import files
from foretrain.config.options import RunConfig
from foretrain.model.peers import Peers
from foretrain.training import checkpoint
from foretrain.training.checkpoint import Progress
from foretrain.training.saver import Saver
from tests.faults.harness import random_of
from tests.kit.gloo import on_ranks, started, state_of, steps
from tests.kit.tiny import tiny, write_dataset

STEPS = 12
CONFIG = tiny(n_embd=33, n_head=3, vocab_size=97, block_size=17, batch_size=1, dropout=0.1)
MOST_CALLS = 60  # on files, of a rank in a few saves
GRACE_S = 3.0
MOST_KILLS = 6  # of one run; then it is let go on to its end


def train(peers: Peers, config: RunConfig, strategy: str, data: str, folder: str, rank: int, call: int) -> None:
    """Go on from the newest checkpoint to the end, with a save at each step; `rank` dies before its `call`-th call on a
    file."""
    state, calls = state_of(config, strategy, peers), iter(range(10**6))
    if peers.first:
        checkpoint.sweep(Path(folder))
    loaded = checkpoint.load(Path(folder), state, peers=peers)
    if rank == peers.rank:
        files.watch(lambda *_: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == call else None)
    with Saver(Path(folder), 2, lambda id, **values: None, peers=peers) as saver:
        for step in range(loaded.progress.step if loaded else 0, STEPS):
            steps(state, peers, data, step, step + 1)
            saver.poll()
            saver.save(state, Progress(step=step + 1), wait=step + 1 == STEPS)


def _digest(folder: Path) -> dict[str, Any]:
    found: dict[str, torch.Tensor] = {}
    path, skipped = checkpoint.newest_valid(folder)
    assert path == checkpoint.path_of(folder, STEPS)
    assert not skipped
    for kind in checkpoint.KINDS:
        with checkpoint.tensors_in(path, kind) as tensors:
            found |= {f"{kind}/{name}": split.whole().clone() for name, split in tensors.items()}
    return found


def killed_ranks(count: int, seed: int) -> dict[str, Any]:
    """Kills before random calls on files and at random times, of a random rank and of all; 2, 3 and 4 ranks."""
    data = str(write_dataset(Path("ranks-data")))
    found = {"kills": 0, "in_a_save": 0, "runs": 0, "equal": 0, "unreadable": 0}
    whole: dict[tuple[str, int], tuple[dict[str, Any], float]] = {}
    while found["kills"] < count:
        out, killed = Path(f"ranks-{found['runs']}"), 0
        kind = ("ddp", "zero1", "fsdp")[found["runs"] % 3], 2 + found["runs"] // 3 % 3
        if kind not in whole:
            before = time.monotonic()
            on_ranks(train, kind[1], CONFIG, kind[0], data, "ranks-whole", -1, 0)
            whole[kind] = _digest(Path("ranks-whole")), time.monotonic() - before
            shutil.rmtree("ranks-whole")
        while True:
            chance = random_of(seed, out, killed)
            last = killed >= MOST_KILLS or found["kills"] >= count
            by_call = chance.random() < 0.5
            rank = chance.randrange(kind[1]) if by_call and not last else -1
            ranks = started(train, kind[1], CONFIG, kind[0], data, str(out), rank, chance.randrange(MOST_CALLS))
            if not by_call and not last:
                time.sleep(chance.uniform(0, whole[kind][1]))
                chosen = ranks if chance.random() < 0.4 else [chance.choice(ranks)]
                for process, _ in chosen:
                    process.kill()
            _ended(ranks)
            killed_now = any(process.exitcode == -signal.SIGKILL for process, _ in ranks)
            paths = [checkpoint.path_of(out, step) for step in checkpoint.steps_in(out)]
            found["unreadable"] += sum(checkpoint.problem_of(path) is not None for path in paths)
            if not killed_now:
                break
            killed, found["kills"] = killed + 1, found["kills"] + 1
            found["in_a_save"] += any(out.glob(".staging-*"))
        found["runs"] += 1
        end = _digest(out)
        found["equal"] += all(torch.equal(end[name], tensor) for name, tensor in whole[kind][0].items())
        shutil.rmtree(out)
    return found | {"ok": found["equal"] == found["runs"] and not found["unreadable"]}


def _ended(ranks: list[Any]) -> None:
    """Wait for all. Once one was killed the others have a while to end by themselves, then they are killed as torchrun
    would do it: who was still waiting for the dead one to join hears nothing of it."""
    end = None
    while any(process.exitcode is None for process, _ in ranks):
        if end is None and any(process.exitcode == -signal.SIGKILL for process, _ in ranks):
            end = time.monotonic() + GRACE_S
        if end is not None and time.monotonic() > end:
            for process, _ in ranks:
                process.kill()
        time.sleep(0.02)
