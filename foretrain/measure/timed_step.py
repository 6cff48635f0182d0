"""Training steps of one setting on random tokens, timed in bursts or tried for their memory. Torch is imported with
this file, so only children import it, once they listen to their parent."""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from foretrain.base.errors import ExitCode
from foretrain.base.processes import Child
from foretrain.config.options import RunConfig
from foretrain.config.sharing import Sharing, config_of_rank
from foretrain.hardware.cpu import usable_cores
from foretrain.measure.tune_record import FEWEST_STEPS, WHOLE_S
from foretrain.model.graphed import WARM_STEPS, graphed_step
from foretrain.model.low_precision import fp16_accumulation
from foretrain.model.parallel import Share
from foretrain.model.step import build, evaluation_loss, train_step
from foretrain.training.attempts import is_out_of_memory
from foretrain.training.contention import cores_busy_s
from foretrain.training.device import TORCH_DTYPES, keep_memory, place
from foretrain.training.memory_limit import cap, held_now_bytes, kept, peak_bytes

# Orders and the first rank's decisions go through the store where the ranks meet: a waiting child then uses neither
# card nor processor, as it would in a collective. The others belong to the first one's process group. One that ends by
# itself ends them all, since the first one may wait for it in a collective.

RANK, PORT = "FORETRAIN_TUNE_RANK", "FORETRAIN_TUNE_PORT"
FOR_EVER = timedelta(days=7)  # until the next order
LOOKS_EVERY_S = 0.2
OUT_OF_MEMORY = int(ExitCode.OUT_OF_MEMORY)

Answer = Callable[[dict[str, Any]], None]


class Ranks:
    def __init__(self, rank: int, world: int, port: int = 0) -> None:
        self.rank, self.world = rank, world
        self.store = TCPStore("127.0.0.1", port, world, rank == 0, FOR_EVER, wait_for_workers=False)
        self._words = 0

    def part_of(self, config: RunConfig) -> RunConfig:
        device = f"cuda:{self.rank}" if config.device.startswith("cuda") else config.device
        return config_of_rank(config, self.world).model_copy(update={"device": device})

    def share(self, config: RunConfig) -> Share:
        return Share(Sharing.of(config, self.world, self.world))

    def join(self, device: torch.device) -> None:
        cards = device.type == "cuda"
        if cards:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if cards else "gloo", store=PrefixStore("group", self.store), rank=self.rank,
            world_size=self.world, device_id=device if cards else None,
        )  # fmt: skip

    def first_says(self, word: Callable[[], Any]) -> Any:
        """Return the first rank's word, on each of them; it has to be JSON."""
        self._words += 1
        key = f"word/{self._words}"
        if self.rank == 0:
            self.store.set(key, json.dumps(word()))
        return json.loads(self.store.get(key))

    def gather(self, number: float) -> list[float]:
        """Return every rank's number to the first one, once all are there; the others get their own."""
        self._words += 1
        key = f"word/{self._words}"
        if self.rank:
            self.store.set(f"{key}/{self.rank}", json.dumps(number))
            return [number]
        return [number, *(json.loads(self.store.get(f"{key}/{rank}")) for rank in range(1, self.world))]


def joined(job: dict[str, Any], answer: Answer) -> Ranks | None:
    """Return this process's place among the ranks of a job, of which the first starts the others; None if alone."""
    if job["world"] == 1:
        return None
    if rank := int(os.environ.get(RANK, "0")):
        return Ranks(rank, job["world"], int(os.environ[PORT]))
    ranks = Ranks(0, job["world"])
    others = [_started(job, rank, ranks.store.port) for rank in range(1, ranks.world)]
    threading.Thread(target=_watch, args=(others, answer), daemon=True).start()
    return ranks


def _started(job: dict[str, Any], rank: int, port: int) -> Child:
    environ = {RANK: str(rank), PORT: str(port)}
    child = Child("foretrain.measure.pool", env=environ, prints=True, leads_group=False)
    child.send(job)
    return child


def _watch(others: list[Child], answer: Answer) -> None:
    """Wait until another rank has ended; then end too, and report an out-of-memory error."""
    while not (codes := [code for child in others if (code := child.process.poll()) is not None]):
        time.sleep(LOOKS_EVERY_S)
    if OUT_OF_MEMORY in codes:
        answer({"died": "memory", "peak_bytes": 0})
    os._exit(1)


STEPS, MICRO_STEPS = 2, 2  # of a trial for memory
MOST_STEPS = 200
RATE = 0.0  # the same work with weights that stay, so that every step of a trial has the same loss


def rows_of(config: RunConfig, count: int) -> Any:
    """Draw the first rows of an optimizer step, count x (block_size + 1) int64: the same however a step is cut."""
    generator = torch.Generator().manual_seed(config.seed)
    return torch.randint(0, config.vocab_size, (count, config.block_size + 1), generator=generator)


class TimedStep:
    """A model that trains by one setting, and a clock for its steps. `cpu_clock`: the process's own CPU time, which
    other programs disturb less; right for one thread only. `ranks`: they share each step."""

    def __init__(self, config: RunConfig, *, cpu_clock: bool = False, ranks: Ranks | None = None) -> None:
        if config.cpu_threads:
            torch.set_num_threads(config.cpu_threads)
        self.config, self.placement, self.ranks = config, place(config), ranks
        self.device = self.placement.device
        self.clock = time.process_time if cpu_clock else time.perf_counter
        dtype = TORCH_DTYPES[self.placement.dtype]
        share = None
        if ranks:
            ranks.join(self.device)
            share = ranks.share(config)
        self.state = build(config, self.device, dtype, compile=self.placement.compiled, share=share)
        self.whole = config.gradient_accumulation_steps
        self.last_s = 0.0
        self.graphed = None if ranks else graphed_step(self.state, self.placement.gpu)
        # Ranks that send gradients in the last micro-batch need one between the first and the last; a graph has all.
        self._take(self.whole if self.graphed else min(3 if ranks else 2, self.whole))

    def _take(self, micro_steps: int) -> None:
        self.micro_steps = micro_steps
        self.state.config = self.config.model_copy(update={"gradient_accumulation_steps": micro_steps})
        count, ranks = micro_steps * self.config.batch_size, self.ranks
        rows = rows_of(self.config, count * (ranks.world if ranks else 1))
        first = count * ranks.rank if ranks else 0
        self.rows = rows[first : first + count].to(self.device)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()

    def _batches(self, stamps: list[float]) -> Iterator[Any]:
        """Yield the micro-batches; where the step is cut short, stamp the beginning of each and the end of the last."""
        size, short = self.config.batch_size, self.micro_steps < self.whole
        for i in range(self.micro_steps):
            if short:
                stamps.append(self._now())
            ids = self.rows[i * size : (i + 1) * size]
            yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        if short:
            stamps.append(self._now())

    def step(self) -> tuple[float, float]:
        stamps: list[float] = []
        started = self._now()
        take = self.graphed or partial(train_step, self.state)
        result = take(self._batches(stamps), RATE)
        taken = self._now() - started
        if stamps:  # the first micro-batch accumulates no gradients, so it does not stand for the ones left out
            later = [b - a for a, b in pairwise(stamps[1:])]
            if self.ranks and len(later) > 1:
                later.pop()  # in which gradients are sent
            taken += (self.whole - self.micro_steps) * sum(later) / len(later)
        self.last_s = taken
        return taken, float(result.loss)

    def warm_up(self) -> dict[str, Any]:
        """Compile, allocate the moments, find out how much of a step can be timed; return the findings, with the `loss`
        of the drawn weights on a step, None where it is cut short."""
        started = time.perf_counter()
        self.step()
        ready_s = time.perf_counter() - started
        for _ in range(WARM_STEPS if self.graphed else 0):  # the last of them is recorded
            self.step()
        taken, loss = self.step()
        if self.micro_steps < self.whole:
            micro_s = max(taken / self.whole, 1e-9)
            self._take(self._agreed(min(self.whole, max(self.micro_steps, math.ceil(WHOLE_S / micro_s)))))
            _, loss = self.step()
        whole = self.micro_steps == self.whole
        return {"first_s": ready_s, "loss": loss if whole and math.isfinite(loss) else None}

    def gather(self, number: float) -> list[float]:
        return self.ranks.gather(number) if self.ranks else [number]

    def _agreed(self, number: int) -> int:
        return int(self.ranks.first_says(lambda: number)) if self.ranks else number

    def burst(self, seconds: float) -> list[float]:
        if self.ranks:
            part_s = max(self.last_s * self.micro_steps / self.whole, 1e-9)
            return [
                self.step()[0] for _ in range(self._agreed(min(MOST_STEPS, max(FEWEST_STEPS, round(seconds / part_s)))))
            ]
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < FEWEST_STEPS or (time.perf_counter() < end and len(times) < MOST_STEPS):
            times.append(self.step()[0])
        return times

    def evaluate(self) -> None:
        """Run an evaluation batch beside the training state, then a step: what a run's memory has to hold."""
        c = self.config.model_copy(update={"block_size": self.config.eval_block})
        ids = rows_of(c, c.eval_batch).to(self.device)
        judge = self.graphed.evaluate if self.graphed else partial(evaluation_loss, self.state)
        for _ in range(2 if self.graphed else 1):  # the first compiles, the second is recorded
            float(judge((ids[:, :-1].contiguous(), ids[:, 1:].contiguous())))
        self.step()

    def peak_bytes(self) -> int:
        own = peak_bytes(self.placement) + (held_now_bytes(self.placement) if self.device.type == "cuda" else 0)
        return int(max(self.gather(own)))


def _burst(timed: TimedStep, seconds: float) -> dict[str, Any]:
    """Time a burst, and the share of this process's cores that programs other than its ranks used meanwhile."""
    started, own_s, all_s = time.perf_counter(), time.process_time(), cores_busy_s() or 0.0
    times = timed.burst(seconds)
    wall_s = time.perf_counter() - started
    own_s = sum(timed.gather(time.process_time() - own_s))
    others_s = max(0.0, (cores_busy_s() or 0.0) - all_s - own_s)
    share = min(1.0, others_s / (wall_s * usable_cores()))
    return {"times": times, "elsewhere": share, "peak_bytes": timed.peak_bytes()}


def _prepare(job: dict[str, Any], ranks: Ranks | None) -> TimedStep:
    config = RunConfig.model_validate(job["config"])
    if ranks:
        config = ranks.part_of(config)
    if not config.device.startswith("cuda"):
        keep_memory()  # as the trainer does
    elif job["cap_bytes"] is not None:
        cap(place(config), job["cap_bytes"])
    return TimedStep(config, cpu_clock=job["cpu_clock"], ranks=ranks)


def serve(job: dict[str, Any], next_order: Callable[[], dict[str, Any]], answer: Answer) -> None:
    """Answer 'ready', then each order: {"burst": seconds} or {"evaluate": true}. Out of memory is an answer, too."""
    timed: TimedStep | None = None
    ranks = joined(job, answer)
    try:
        timed = _prepare(job, ranks)
        with fp16_accumulation(timed.config.matmul == "fp16_accumulation"):
            seen = timed.warm_up()
            answer({"ready": True, **seen, "peak_bytes": timed.peak_bytes()})
            while True:
                order = ranks.first_says(next_order) if ranks else next_order()
                if "evaluate" in order:
                    timed.evaluate()
                    answer({"evaluated": True, "peak_bytes": timed.peak_bytes()})
                else:
                    answer(_burst(timed, order["burst"]))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        answer({"died": "memory", "peak_bytes": timed.peak_bytes() if timed and not ranks else 0})


def try_steps(config: RunConfig, cap_bytes: int | None) -> tuple[bool, int]:
    placement = place(config)
    if placement.device.type == "cpu":
        keep_memory()  # as the trainer does

    def batch(rows: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, config.vocab_size, (rows, block + 1)).to(placement.device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    try:
        kept(placement, cap_bytes)
        state = build(config, placement.device, TORCH_DTYPES[placement.dtype], compile=placement.compiled)
        graphed, count = graphed_step(state, placement.gpu), config.gradient_accumulation_steps
        take, judge = graphed or partial(train_step, state), partial(evaluation_loss, state)
        if graphed:
            judge = graphed.evaluate
        else:  # a graph has all of a step
            count = min(MICRO_STEPS, count)
            state.config = config.model_copy(update={"gradient_accumulation_steps": count})
        evaluation = batch(config.eval_batch, config.eval_block)
        float(judge(evaluation))
        for _ in range(WARM_STEPS + 1 if graphed else STEPS):
            take([batch(config.batch_size, config.block_size) for _ in range(count)], 1e-6)
        float(judge(evaluation))
        lived = True
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        lived = False
    return lived, peak_bytes(placement)
