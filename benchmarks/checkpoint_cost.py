"""The cost of saving at the default interval (2000 steps) on this CPU.

python benchmarks/checkpoint_cost.py

A model is trained for some steps to time them; then it is saved in turn by the loop itself and in the background, while
steps continue. Each save's share is of 2000 steps. `slower`: how much longer the steps beside a background save take,
which counts too.
"""

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import arguments, report

from foretrain.base.process_memory import resident_bytes
from foretrain.config.options import RunConfig
from foretrain.model.step import TrainState, build, train_step
from foretrain.training.checkpoint import Progress
from foretrain.training.device import keep_memory
from foretrain.training.saver import Saver
from foretrain.training.tensor_files import live

INTERVAL = RunConfig().eval_interval
CASES = {
    "2 x 128, V 256": {"n_layer": 2, "n_head": 4, "n_embd": 128, "vocab_size": 256, "block_size": 64},
    "4 x 256, V 4096": {"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 4096, "block_size": 128},
    "6 x 384, V 50304": {"n_layer": 6, "n_head": 6, "n_embd": 384, "vocab_size": 50304, "block_size": 128},
}
ROUNDS = 5


def one_step(state: TrainState) -> float:
    c = state.config
    ids = torch.randint(0, c.vocab_size, (c.batch_size, c.block_size + 1))
    before = time.perf_counter()
    train_step(state, [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())], 1e-5)
    return time.perf_counter() - before


def case(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    config = RunConfig(batch_size=8, gradient_accumulation_steps=1, compile=False, device="cpu", **settings)
    state = build(config, torch.device("cpu"), torch.float32, compile=False)
    plain = [one_step(state) for _ in range(8)][2:]
    found: dict[str, list[float]] = {"loop": [], "background": [], "beside": [], "took": []}
    before = resident_bytes() or 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, 2 * ROUNDS + 1):
            waits = number % 2 == 1
            own = Saver(Path(folder), 2, lambda id, **values: None)
            start = time.perf_counter()
            own.save(state, Progress(step=number), wait=waits)
            found["loop" if waits else "background"].append(own.blocked_s)
            lost = 0.0
            while own._thread is not None and own._thread.is_alive():
                lost += max(0.0, one_step(state) - median(plain))
            own.finish()
            if not waits:
                found["beside"].append(lost)
                found["took"].append(time.perf_counter() - start)
    step_s, blocked_s, lost_s = median(plain), median(found["background"]), median(found["beside"])
    return {
        "case": name, "step_s": step_s, "checkpoint_bytes": live(state).size_bytes, "loop_s": median(found["loop"]),
        "background_s": blocked_s, "beside_s": lost_s, "took_s": median(found["took"]),
        "blocked_share": blocked_s / (INTERVAL * step_s), "loop_share": median(found["loop"]) / (INTERVAL * step_s),
        "whole_share": (blocked_s + lost_s) / (INTERVAL * step_s), "grown_bytes": (resident_bytes() or 0) - before,
    }  # fmt: skip


def main() -> None:
    options = arguments("checkpoint_cost", __doc__ or "")
    keep_memory()
    cases = [case(name, settings) for name, settings in CASES.items()]
    data = {"interval_steps": INTERVAL, "threads": torch.get_num_threads(), "rounds": ROUNDS, "cases": cases,
            "worst_blocked_share": max(c["blocked_share"] for c in cases)}  # fmt: skip
    report(options.out, data)


if __name__ == "__main__":
    main()
