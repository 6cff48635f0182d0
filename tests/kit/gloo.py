"""Ranks as processes on this machine that talk over gloo, and what they are made to do: train a tiny model, save it,
and go on from what others have saved. Their parent has imported torch once and forks them."""

import functools
import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from foretrain.config.options import RunConfig
from foretrain.data.batches import TokenFile, train_batches, train_starts
from foretrain.data.dataset import read_info
from foretrain.model.ranks.parallel import sharer
from foretrain.model.ranks.peers import ALONE, Peers
from foretrain.model.ranks.sharing import Sharing
from foretrain.model.ranks.streams import seeded
from foretrain.model.step import TrainState, build, train_step
from foretrain.training import checkpoint
from foretrain.training.checkpoint import Progress

MICRO_BATCHES = 12  # of a step: 1, 2, 3 and 4 ranks can share them
MOST_S = 120


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.kit.gloo"])
    return context


def started(work: Callable[..., Any], world: int, *words: Any) -> list[tuple[Any, Any]]:
    """(process, pipe with its answer) of each of `world` ranks that run work(peers, *words)."""
    store = Path(f".store-{os.urandom(6).hex()}").absolute()
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
        share = sharer(Sharing(strategy, peers.world, per_node))
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


def train_and_save(
    peers: Peers, config: RunConfig, strategy: str, data: str, folder: str, first: int, at: int, end: int, to: str = ""
) -> dict[str, Any]:
    """Go on from the newest checkpoint in `folder`, where `first` is not 0; save after step `at` to `to` or the same
    folder; train until `end`."""
    state = state_of(config, strategy, peers)
    if first:
        loaded = checkpoint.load(Path(folder), state, peers=peers)
        assert loaded
        assert loaded.progress.step == first
    losses, seen = steps(state, peers, data, first, at)
    checkpoint.save(Path(to or folder), state, Progress(step=at), peers)
    after, later = steps(state, peers, data, at, end)
    return {"losses": losses + after, "seen": seen + later, "scale": state.scaler.get_scale()}
