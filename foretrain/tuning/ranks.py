"""The ranks of one setting of `foretrain tune --gpus`: the first one's child starts the others, and all do the same.

What the first one decides goes through the store where they meet, as do the parent's orders: a child that waits while
another setting is timed uses neither card nor processor then, as it would in a collective. The others belong to the
first one's process group and end with it. One that ends by itself ends them all, since the first one may wait for it in
a collective that never comes back.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from foretrain.base.errors import ExitCode
from foretrain.config.options import RunConfig
from foretrain.config.ranks import of_rank
from foretrain.model.ranks.parallel import Share
from foretrain.model.ranks.sharing import Sharing

RANK, PORT = "FORETRAIN_TUNE_RANK", "FORETRAIN_TUNE_PORT"
FOR_EVER = timedelta(days=7)  # until the next order
LOOKS_EVERY_S = 0.2
OUT_OF_MEMORY = int(ExitCode.OUT_OF_MEMORY)

Answer = Callable[[dict[str, Any]], None]


class Ranks:
    """This rank among those that time a setting together."""

    def __init__(self, rank: int, world: int, port: int = 0) -> None:
        self.rank, self.world = rank, world
        self.store = TCPStore("127.0.0.1", port, world, rank == 0, FOR_EVER, wait_for_workers=False)
        self._words = 0

    def part_of(self, config: RunConfig) -> RunConfig:
        """What this rank carries out of each step, on its own card."""
        device = f"cuda:{self.rank}" if config.device.startswith("cuda") else config.device
        return of_rank(config, self.world).model_copy(update={"device": device})

    def share(self, config: RunConfig) -> Share:
        """What shares the model among the ranks, for `build`."""
        return Share(Sharing.of(config, self.world, self.world))

    def join(self, device: torch.device) -> None:
        """Make the process group."""
        cards = device.type == "cuda"
        if cards:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if cards else "gloo", store=PrefixStore("group", self.store), rank=self.rank,
            world_size=self.world, device_id=device if cards else None,
        )  # fmt: skip

    def first_says(self, word: Callable[[], Any]) -> Any:
        """What the first rank says, on each of them; it has to be JSON."""
        self._words += 1
        key = f"word/{self._words}"
        if self.rank == 0:
            self.store.set(key, json.dumps(word()))
        return json.loads(self.store.get(key))

    def told(self, number: float) -> list[float]:
        """Every rank's number, as the first one hears them once all have said theirs; the others have their own."""
        self._words += 1
        key = f"word/{self._words}"
        if self.rank:
            self.store.set(f"{key}/{self.rank}", json.dumps(number))
            return [number]
        return [number, *(json.loads(self.store.get(f"{key}/{rank}")) for rank in range(1, self.world))]


def joined(job: dict[str, Any], answer: Answer) -> Ranks | None:
    """This process among the ranks of a job, of which the first starts the others; None where there is one only."""
    if job["world"] == 1:
        return None
    if rank := int(os.environ.get(RANK, "0")):
        return Ranks(rank, job["world"], int(os.environ[PORT]))
    ranks = Ranks(0, job["world"])
    others = [_started(job, rank, ranks.store.port) for rank in range(1, ranks.world)]
    threading.Thread(target=_watch, args=(others, answer), daemon=True).start()
    return ranks


def _started(job: dict[str, Any], rank: int, port: int) -> "subprocess.Popen[bytes]":
    environ = {**os.environ, RANK: str(rank), PORT: str(port)}
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "foretrain.tuning.child"], env=environ, stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    assert child.stdin is not None
    child.stdin.write(json.dumps(job).encode() + b"\n")
    child.stdin.flush()  # it stays open: the child ends when it closes
    return child


def _watch(others: list["subprocess.Popen[bytes]"], answer: Answer) -> None:
    """Until one of the others has ended; then this one does too, and says why, as far as it is memory."""
    while not (codes := [code for child in others if (code := child.poll()) is not None]):
        time.sleep(LOOKS_EVERY_S)
    if OUT_OF_MEMORY in codes:
        answer({"died": "memory", "peak_bytes": 0})
    os._exit(1)
