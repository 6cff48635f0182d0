"""Whole runs on several ranks: `foretrain train` in processes that a fork server with torch in it makes, over gloo."""

import functools
import hashlib
import json
import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.cli import main
from foretrain.config.options import RunConfig
from foretrain.config.resolve import to_toml
from foretrain.data.batches import TRAIN, TokenFile
from foretrain.data.dataset import read_info
from foretrain.training import feed, trainer
from foretrain.training.checkpoint import newest_valid, tensors_in
from tests.kit.command import free_port
from tests.kit.tiny import tiny, write_dataset
from tests.kit.training import NO_MEMORY, fail_in_step

MOST_S = 60
Happens = Callable[[int], None]  # told the rank, in its process before it begins


@functools.cache
def context() -> Any:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["tests.kit.gloo", "tests.kit.train_ranks"])
    return found


def config(**changes: Any) -> RunConfig:
    """A run of twelve steps that 1, 2 and 3 ranks can share, with nothing left to be measured."""
    fixed = {"dtype": "float32", "attention": "sdpa", "cpu_threads": 1, "master_weights": False}
    return tiny(**{**fixed, "gradient_accumulation_steps": 6, "collective_timeout": MOST_S, **changes})


def prepared(folder: Path, made: RunConfig) -> None:
    if not (folder / "toy").exists():
        write_dataset(folder / "toy")
    (folder / "run.toml").write_text(to_toml(made))


def started(
    folder: Path, world: int, *words: str, happens: Happens | None = None, port: int = 0, last: tuple[str, ...] = ()
) -> list[Any]:
    port = port or free_port()
    found = []
    for rank in range(world):
        own = (*words, *last) if rank == world - 1 else words
        words_of = (str(folder), rank, world, port, own, happens)
        process = context().Process(target=_rank, args=words_of)
        process.start()
        found.append(process)
    return found


def ended(ranks: list[Any]) -> list[int | None]:
    for process in ranks:
        process.join(MOST_S)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in ranks]


def run(folder: Path, world: int, *words: str, happens: Happens | None = None) -> list[int | None]:
    return ended(started(folder, world, *words, happens=happens))


def said(folder: Path, rank: int = 0) -> str:
    """What a rank has said, without torch's own warnings."""
    lines = (folder / f"rank-{rank}.log").read_text().splitlines()
    return "\n".join(line for line in lines if line and not line.startswith(("[rank", "[W", "[E", "frame #")))


def errors(folder: Path, world: int) -> list[str]:
    return [line for rank in range(world) for line in said(folder, rank).splitlines() if line.startswith("error:")]


def _rank(folder: str, rank: int, world: int, port: int, words: tuple[str, ...], happens: Happens | None) -> None:
    os.chdir(folder)
    log = os.open(f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if happens:
        happens(rank)
    sys.argv = ["foretrain", "train", "run.toml", *words]
    main()


# -- what happens to them ----------------------------------------------------------------------------------


def keep_rows(rank: int) -> None:
    original = feed.Feed.batches

    def batches(self: Any, config: RunConfig, step: int) -> Iterator[Any]:
        for idx, targets in original(self, config, step):
            with Path(f"rows-{rank}.jsonl").open("a") as file:
                file.write(json.dumps([step, [_name(row) for row in idx]]) + "\n")
            yield idx, targets

    feed.Feed.batches = batches  # type: ignore[method-assign]


def _name(row: torch.Tensor) -> str:
    return hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16]


def rows_taken(folder: Path) -> dict[int, Counter[str]]:
    found: dict[int, Counter[str]] = {}
    for path in folder.glob("rows-*.jsonl"):
        for line in path.read_text().splitlines():
            step, names = json.loads(line)
            found.setdefault(step, Counter()).update(names)
    return found


def rows_wanted(folder: Path, made: RunConfig) -> dict[int, Counter[str]]:
    tokens = TokenFile(read_info(folder / "toy"), "train", made.vocab_size)
    count, found = made.batch_size * made.gradient_accumulation_steps, {}
    for step in range(made.max_iters):
        starts = tokens.starts(made.data_order, made.seed, TRAIN, step, count, made.block_size)
        idx, _ = tokens.batch(starts, made.block_size, torch.device("cpu"))
        found[step] = Counter(_name(row) for row in idx)
    return found


def at_step(step: int, what: Callable[[], object]) -> None:
    """Let something happen in this process when it begins a step."""
    original = feed.Feed.batches

    def batches(self: Any, config: RunConfig, at: int) -> Iterator[Any]:
        if at == step:
            what()
        return original(self, config, at)

    feed.Feed.batches = batches  # type: ignore[method-assign]


def signalled(rank: int) -> None:
    if rank == 1:
        at_step(6, lambda: os.kill(os.getpid(), signal.SIGTERM))


def killed(rank: int) -> None:
    if rank == 1:
        at_step(7, lambda: os.kill(os.getpid(), signal.SIGKILL))


def first_killed(rank: int) -> None:
    if rank == 0:
        at_step(7, lambda: os.kill(os.getpid(), signal.SIGKILL))


def without_memory(where: str, rank: int) -> None:
    """The second rank runs out of memory in step 3, in its last micro-step, the one whose gradients are sent."""
    if rank == 1:
        fail_in_step(pytest.MonkeyPatch(), 3, 2, where)


def forward(rank: int) -> None:
    without_memory("forward", rank)
    keep_rows(rank)


def backward(rank: int) -> None:
    without_memory("backward", rank)


def optimizer(rank: int) -> None:
    without_memory("optimizer", rank)


def sent(rank: int) -> None:
    """The second rank runs out of memory where the gradients of the last layers are with the others already."""
    if rank == 1:
        original, patch, steps = trainer.train_step, pytest.MonkeyPatch(), iter(range(99))

        def step(state: Any, batches: Any, rate: float) -> Any:
            if next(steps) == 3:
                weight = next(iter(state.model.layers())).ln_1.weight
                seen = iter(range(99))

                def hook(_: torch.Tensor) -> None:
                    if next(seen) == 2:
                        raise NO_MEMORY

                weight.register_hook(hook)
            return original(state, batches, rate)

        patch.setattr(trainer, "train_step", step)


def not_finite(rank: int) -> None:
    """A fault of the second rank's machine: its loss is no number in step 3."""
    if rank == 1:
        original, patch, steps = trainer.train_step, pytest.MonkeyPatch(), iter(range(99))

        def step(state: Any, batches: Any, rate: float) -> Any:
            if next(steps) != 3:
                return original(state, batches, rate)
            call = state.call
            state.call = lambda idx, targets: call(idx, targets) * float("nan")
            try:
                return original(state, batches, rate)
            finally:
                state.call = call

        patch.setattr(trainer, "train_step", step)


# -- what they leave ---------------------------------------------------------------------------------------


def state(run: Path) -> dict[str, torch.Tensor]:
    path, _ = newest_valid(run / "checkpoints")
    assert path
    found = {}
    for kind in ("model", "optimizer"):
        with tensors_in(path, kind) as tensors:
            found |= {f"{kind}/{name}": tensor.whole().clone() for name, tensor in tensors.items()}
    return found


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]
