"""A child process of `foretrain tune`: one setting's training steps, timed in short bursts whenever the parent asks.

The parent writes one JSON object a line: first the job, then orders. Each is answered by one line. What is timed is
foretrain's own step (model/step.py) on random tokens, which are the same for every setting. A step of many
micro-batches is cut short: the rest of them take as long as those between the first and the last. The child ends with
its parent, whose end it notices by its standard input, and takes its compiler's processes and the scratch folder with
it.
"""

import json
import math
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from foretrain.config.options import RunConfig
from foretrain.hardware.cpu import usable_cores

WHOLE_S = 1.0  # a step that takes longer is timed by some of its micro-batches
FEWEST_STEPS, MOST_STEPS = 2, 200
RATE = 0.0  # the same work with weights that stay, so that every step of a trial has the same loss


def rows_of(config: RunConfig, count: int) -> Any:
    """The first rows of an optimizer step, count x (block_size + 1) int64: the same ones, however a step is cut."""
    import torch

    generator = torch.Generator().manual_seed(config.seed)
    return torch.randint(0, config.vocab_size, (count, config.block_size + 1), generator=generator)


class TimedStep:
    """A model that trains as one setting says, and a clock for its steps.

    `cpu_clock`: count the process's own CPU time, which other programs disturb less; right for one thread only.
    """

    def __init__(self, config: RunConfig, *, cpu_clock: bool = False) -> None:
        import torch

        from foretrain.model.step import build
        from foretrain.training.device import TORCH_DTYPES, place

        if config.cpu_threads:
            torch.set_num_threads(config.cpu_threads)
        self.config, self.placement = config, place(config)
        self.device = self.placement.device
        self.clock = time.process_time if cpu_clock else time.perf_counter
        dtype = TORCH_DTYPES[self.placement.dtype]
        self.state = build(config, self.device, dtype, compile=self.placement.compiled)
        self.whole = config.gradient_accumulation_steps
        self._take(min(2, self.whole))

    def _take(self, micro_steps: int) -> None:
        """Time steps of so many micro-batches."""
        self.micro_steps = micro_steps
        self.state.config = self.config.model_copy(update={"gradient_accumulation_steps": micro_steps})
        self.rows = rows_of(self.config, micro_steps * self.config.batch_size).to(self.device)

    def _now(self) -> float:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)
        return self.clock()

    def _batches(self, stamps: list[float]) -> Iterator[Any]:
        """The micro-batches; where the step is cut short, the time at the beginning of each and after the last."""
        size, short = self.config.batch_size, self.micro_steps < self.whole
        for i in range(self.micro_steps):
            if short:
                stamps.append(self._now())
            ids = self.rows[i * size : (i + 1) * size]
            yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        if short:
            stamps.append(self._now())

    def step(self) -> tuple[float, float]:
        """(seconds of a whole step, mean loss of the rows that were computed)."""
        from foretrain.model.step import train_step

        stamps: list[float] = []
        started = self._now()
        result = train_step(self.state, self._batches(stamps), RATE)
        taken = self._now() - started
        if stamps:  # the first micro-batch adds up no gradients, so it says nothing of the ones left out
            later = [b - a for a, b in pairwise(stamps[1:])]
            taken += (self.whole - self.micro_steps) * sum(later) / len(later)
        return taken, float(result.loss)

    def warm_up(self) -> dict[str, Any]:
        """Compile, make the moments, find out how much of a step can be timed. Returns what was seen.

        `loss`: of the drawn weights on all rows of a step; None where a step is cut short.
        """
        started = time.perf_counter()
        self.step()
        ready_s = time.perf_counter() - started
        taken, loss = self.step()
        if self.micro_steps < self.whole:
            micro_s = max(taken / self.whole, 1e-9)
            self._take(min(self.whole, max(2, math.ceil(WHOLE_S / micro_s))))
            _, loss = self.step()
        whole = self.micro_steps == self.whole
        return {"first_s": ready_s, "loss": loss if whole and math.isfinite(loss) else None}

    def burst(self, seconds: float) -> list[float]:
        """Seconds of whole steps, again and again for about so long."""
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < FEWEST_STEPS or (time.perf_counter() < end and len(times) < MOST_STEPS):
            times.append(self.step()[0])
        return times

    def evaluate(self) -> None:
        """An evaluation batch beside all that training keeps, then a step: what a run's memory has to hold."""
        from foretrain.model.step import evaluation_loss

        c = self.config.model_copy(update={"block_size": self.config.eval_block})
        ids = rows_of(c, c.eval_batch).to(self.device)
        float(evaluation_loss(self.state, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())))
        self.step()

    def peak_bytes(self) -> int:
        """Of the process on a CPU; on a card what PyTorch reserved, and the context beside it."""
        from foretrain.base.process_memory import peak_bytes

        if self.device.type != "cuda":
            return peak_bytes() or 0
        import torch

        from foretrain.hardware.sensors import Load
        from foretrain.training.memory_limit import ASSUMED_CONTEXT_BYTES

        with Load(self.device) as load:
            context = load.context_bytes()
        return torch.cuda.max_memory_reserved(self.device) + (context or ASSUMED_CONTEXT_BYTES)


def _burst(timed: TimedStep, seconds: float) -> dict[str, Any]:
    """A burst, and the share of this process's cores that other programs used meanwhile (0 where nobody says)."""
    from foretrain.training.contention import cores_busy_s

    started, own_s, all_s = time.perf_counter(), time.process_time(), cores_busy_s() or 0.0
    times = timed.burst(seconds)
    wall_s = time.perf_counter() - started
    others_s = max(0.0, (cores_busy_s() or 0.0) - all_s - (time.process_time() - own_s))
    share = min(1.0, others_s / (wall_s * usable_cores()))
    return {"times": times, "elsewhere": share, "peak_bytes": timed.peak_bytes()}


def _prepare(job: dict[str, Any]) -> TimedStep:
    from foretrain.training.host_memory import keep_memory
    from foretrain.training.memory_limit import cap

    config = RunConfig.model_validate(job["config"])
    if not config.device.startswith("cuda"):
        keep_memory()  # as the trainer does
    elif job["cap_bytes"] is not None:
        from foretrain.training.device import place

        cap(place(config), job["cap_bytes"])
    return TimedStep(config, cpu_clock=job["cpu_clock"])


def serve(job: dict[str, Any], orders: "queue.Queue[dict[str, Any]]", answer: Any) -> None:
    """Answer 'ready', then each order: {"burst": seconds} or {"evaluate": true}. Out of memory is an answer, too."""
    from foretrain.model.low_precision import fp16_accumulation
    from foretrain.training.microbatch import is_out_of_memory

    timed: TimedStep | None = None
    try:
        timed = _prepare(job)
        with fp16_accumulation(timed.config.matmul == "fp16_accumulation"):
            seen = timed.warm_up()
            answer({"ready": True, **seen, "peak_bytes": timed.peak_bytes()})
            while True:
                order = orders.get()
                if "evaluate" in order:
                    timed.evaluate()
                    answer({"evaluated": True, "peak_bytes": timed.peak_bytes()})
                else:
                    answer(_burst(timed, order["burst"]))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        answer({"died": "memory", "peak_bytes": timed.peak_bytes() if timed else 0})


def main() -> None:
    """Serve the parent on the standard streams."""
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer
    job = json.loads(sys.stdin.readline())
    orders: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        shutil.rmtree(job["scratch"], ignore_errors=True)  # nobody is left to do it
        os.killpg(0, signal.SIGKILL)

    def answer(value: dict[str, Any]) -> None:
        reply.write(json.dumps(value) + "\n")
        reply.flush()

    threading.Thread(target=listen, daemon=True).start()
    try:
        serve(job, orders, answer)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # the thread above still reads


if __name__ == "__main__":
    main()
