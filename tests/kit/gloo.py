"""Ranks as processes on this machine that talk over gloo, and what they are made to do: train a tiny model, save it,
and go on from what others have saved. Their parent has imported torch once and forks them."""

import errno
import functools
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from foretrain.base import files
from foretrain.base.errors import UserError
from foretrain.config.options import RunConfig
from foretrain.config.sharing import Sharing
from foretrain.data.batches import TokenFile, train_starts
from foretrain.data.dataset import read_info
from foretrain.model.parallel import Share
from foretrain.model.parts import reshard, states_of
from foretrain.model.peers import ALONE, Peers
from foretrain.model.step import TrainState, build, evaluation_loss, train_step
from foretrain.training import checkpoint
from foretrain.training.checkpoint import Progress
from foretrain.training.ranks import seeded
from foretrain.training.saver import Saver
from tests.kit.batches import train_batches

MICRO_BATCHES = 12  # of a step: 1, 2, 3 and 4 ranks can share them
MOST_S = 120


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.kit.gloo"])
    return context


def started(work: Callable[..., Any], world: int, *words: Any) -> list[tuple[Any, Any]]:
    """(process, pipe with its answer) of each of `world` ranks that run work(peers, *words)."""
    store = Path(tempfile.mkdtemp(prefix="ranks-"), "store")
    ranks = []
    for rank in range(world):
        ours, theirs = _context().Pipe(duplex=False)
        process = _context().Process(target=_rank, args=(theirs, str(store), work, rank, world, words), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    return ranks


def on_ranks(work: Callable[..., Any], world: int, *words: Any) -> list[Any]:
    """What each rank gave. Raises AssertionError with the traceback of one that failed."""
    ranks, found = started(work, world, *words), []
    for _, pipe in ranks:
        found.append(pipe.recv() if pipe.poll(MOST_S) else (False, "no answer"))
        if not found[-1][0]:
            break
    for process, _ in ranks:
        if len(found) < world or not all(done for done, _ in found):
            process.kill()
        process.join()
    for done, answer in found:
        assert done, answer
    return [answer for _, answer in found]


def _rank(pipe: Any, store: str, work: Callable[..., Any], rank: int, world: int, words: tuple[Any, ...]) -> None:
    try:
        torch.set_num_threads(1)
        if world > 1:
            own = dist.FileStore(store, world)
            dist.init_process_group("gloo", store=own, rank=rank, world_size=world, timeout=timedelta(seconds=MOST_S))
        answer = work(Peers.joined() if world > 1 else ALONE, *words)
        pipe.send((True, answer))
    except BaseException:
        pipe.send((False, f"rank {rank} of {world}: {traceback.format_exc()}"))
    os._exit(0)


# -- what they do --------------------------------------------------------------------------------------------


def state_of(config: RunConfig, strategy: Any, peers: Peers) -> TrainState:
    share = None
    if peers.world > 1:
        per_node = peers.world // 2 if strategy == "hsdp" else peers.world
        share = Share(Sharing(strategy, peers.world, per_node))
    own = config.model_copy(update={"gradient_accumulation_steps": MICRO_BATCHES // peers.world})
    return build(own, torch.device("cpu"), torch.float32, compile=False, share=share)


def steps(
    state: TrainState, peers: Peers, data: str, first: int, end: int
) -> tuple[list[str], list[tuple[int, int, list[int]]]]:  # fmt: skip
    """(the loss of each step as a hex number, (step, micro-batch, first tokens) of every micro-batch of this rank)."""
    config, losses, seen = state.config, [], []
    tokens = TokenFile(read_info(Path(data)), "train", config.vocab_size, verify=False)
    for step in range(first, end):
        cut: Any = {
            "batch_size": config.batch_size, "accumulation": config.gradient_accumulation_steps,
            "block": config.block_size, "rank": peers.rank, "world_size": peers.world,
        }  # fmt: skip
        for number, rows in enumerate(train_starts(tokens, config.seed, step, **cut)):
            seen.append((step, peers.rank + number * peers.world, rows.tolist()))
        batches = train_batches(tokens, config.seed, step, device=state.device, **cut)
        result = train_step(state, seeded(batches, config.seed, step, peers.rank, peers.world), 1e-2)
        losses.append(float(result.loss).hex())
    return losses, seen


def onward(state: TrainState) -> None:
    """One more step, of the same rows on every rank."""
    idx = torch.arange(state.config.block_size).repeat(1, 1)
    train_step(state, [(idx, idx)] * state.config.gradient_accumulation_steps, 1e-2)


def wholes(state: TrainState) -> dict[str, np.ndarray]:
    """Weights and moments as torch itself gathers them, of a sharded or a plain state; a rank's own of ZeRO-1's."""
    reshard(state.trained)
    found = {}
    states = states_of(state.optimizer).state
    for name, parameter in state.trained.named_parameters():
        own = {f"optimizer/{kind}/{name}": value for kind, value in states.get(parameter, {}).items()}
        for key, value in {f"model/{name}": parameter.detach(), **own}.items():
            found[key] = (value.full_tensor() if isinstance(value, DTensor) else value).numpy().copy()
    return found


def not_finite(peers: Peers, config: RunConfig, strategy: str) -> bool:
    """Whether a step whose loss is none on the last rank alone leaves what this one has as it was."""
    state = state_of(config, strategy, peers)
    onward(state)
    before, call = wholes(state), state.call
    if peers.rank == peers.world - 1:
        state.call = lambda *batch: call(*batch) * float("nan")
    onward(state)
    after = wholes(state)
    return before.keys() == after.keys() and all((before[name] == after[name]).all() for name in before)


def saved_beside_steps(peers: Peers, config: RunConfig, strategy: str, folder: str) -> dict[str, np.ndarray]:
    """Save in the background after an evaluation, with a slow disk, while steps go on; give the state as it was."""
    state, told = state_of(config, strategy, peers), []
    onward(state)
    idx = torch.arange(config.block_size).repeat(2, 1)
    evaluation_loss(state, (idx, idx))
    go = threading.Event()
    files.watch(lambda call, path, size: bool(go.wait(MOST_S)) if call == "open" else None)
    saver = Saver(Path(folder), 2, lambda id, **values: told.append(id), peers=peers)
    with saver:
        saver.save(state, Progress(step=1), wait=False)
        before = wholes(state)
        for _ in range(2):
            onward(state)
            saver.poll()
        assert told == []
        go.set()
    assert told == ["saved"]
    assert saver.verified == {1}
    return before


def misfortunes(peers: Peers, config: RunConfig, folder: str) -> dict[str, Any]:
    """What each rank hears of saves that fail on the second one alone, in the order of their steps."""
    state, found, path = state_of(config, "fsdp", peers), {}, Path(folder)
    onward(state)
    checkpoint.save(path, state, Progress(step=1), peers)

    def full(call: str, at: Path, size: int) -> None:
        if call == "write" and peers.rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    def hears(word: str, work: Callable[[], Any]) -> None:
        try:
            work()
            found[word] = "nothing"
        except UserError as error:
            found[word] = error.id, str(error)
        except RuntimeError as error:
            found[word] = "gone", str(error)

    files.watch(full)
    hears("full", lambda: checkpoint.save(path, state, Progress(step=2), peers))
    told: list[str] = []
    saver = Saver(path, 2, lambda id, **values: told.append(id), peers=peers)
    for step in (3, 4, 5):
        hears(f"save {step}", lambda step=step: saver.save(state, Progress(step=step), wait=False))
        while saver._thread is not None and saver._thread.is_alive():
            time.sleep(0.001)
        hears(f"poll {step}", saver.poll)  # at any step of this rank, so it raises nothing
    hears("last", saver.finish)
    found["told"] = told
    files.watch(None)
    elsewhere = path if peers.first else Path("elsewhere")
    hears("start", lambda: checkpoint.check_shared(elsewhere, peers))
    hears("unshared save", lambda: checkpoint.save(elsewhere, state, Progress(step=6), peers))
    hears("unshared load", lambda: checkpoint.load(elsewhere, state, peers=peers))
    weight: Any = state.trained.get_parameter(NORM).detach()
    if peers.rank == 1:
        weight.to_local().fill_(float("nan"))
    hears("nan", lambda: checkpoint.save(path, state, Progress(step=7), peers))
    weight.to_local().fill_(1.0)
    files.watch(lambda call, at, size: os._exit(9) if call == "fsync" and peers.rank == 1 else None)
    hears("gone", lambda: checkpoint.save(path, state, Progress(step=8), peers))
    return found


NORM = "transformer.h.0.ln_1.weight"


def loaded(peers: Peers, config: RunConfig, strategy: str, folder: str) -> tuple[int, Any]:
    """(the step of the checkpoint that was loaded, what was passed over and why)."""
    found = checkpoint.load(Path(folder), state_of(config, strategy, peers), peers=peers)
    return found.progress.step, found.skipped


def train_and_save(
    peers: Peers, config: RunConfig, strategy: str, data: str, first: int, end: int, saves: dict[int, str], before: str = ""
) -> dict[str, Any]:  # fmt: skip
    """Go on after step `first`, of the newest checkpoint in `before` unless that is 0, to `end`. `saves`: folders for
    the checkpoints of steps."""
    state, progress = state_of(config, strategy, peers), Progress(step=0)
    if first:
        loaded = checkpoint.load(Path(before), state, peers=peers)
        progress = loaded.progress
        assert progress.step == first
    losses, seen = [], []
    for step in range(first, end + 1):
        if step in saves:
            checkpoint.save(Path(saves[step]), state, progress.model_copy(update={"step": step}), peers)
        if step < end:
            losses_of_step, seen_in_step = steps(state, peers, data, step, step + 1)
            losses, seen = losses + losses_of_step, seen + seen_in_step
    return {"losses": losses, "seen": seen}
