"""The first step of a compiled run with the whole model compiled and with compile_blocks, without the compiler's caches.

    python benchmarks/compile_start.py

One thread; the first step by the clock, as compilers are programs of their own, later steps by CPU time.
"""

import json
import os
import subprocess
import sys
import tempfile
from statistics import median

from common import arguments, report

KNOBS = {"n_layer": 12, "n_head": 4, "n_embd": 128, "block_size": 64, "vocab_size": 256, "batch_size": 8,
         "gradient_accumulation_steps": 1, "attention": "bmm", "device": "cpu"}  # fmt: skip
ROUNDS = 2
CHILD = """
import json, sys, time
import torch
torch.set_num_threads(1)
import torch._inductor.config as inductor
inductor.force_disable_caches = True
from foretrain.config.options import RunConfig
from foretrain.model.step import build, train_step
config = RunConfig(**json.loads(sys.argv[1]))
state = build(config, torch.device("cpu"), torch.bfloat16, compile=True)
ids = torch.randint(0, config.vocab_size, (config.batch_size, config.block_size + 1))
batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
def timed(clock):
    began = clock()
    train_step(state, [batch], 1e-4)
    return clock() - began
print(json.dumps([timed(time.perf_counter), sorted(timed(time.process_time) for _ in range(12))[6]]))
"""


def measured(compile_blocks: bool) -> tuple[float, float]:
    """(seconds of the first step, of later ones), in a process and with a compiler's folder of its own."""
    words = [sys.executable, "-c", CHILD, json.dumps({**KNOBS, "compile_blocks": compile_blocks})]
    with tempfile.TemporaryDirectory() as folder:
        own = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        return tuple(json.loads(subprocess.run(words, check=True, capture_output=True, text=True, env=own).stdout))


def main() -> None:
    options = arguments("compile_start", __doc__ or "")
    samples: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for blocks, found in samples.items():
            found.append(measured(blocks))
    rows = [
        {"compiled": "one block (`compile_blocks`)" if blocks else "the whole model",
         "first_s": median(first for first, _ in found), "step_s": median(step for _, step in found)}
        for blocks, found in samples.items()
    ]  # fmt: skip
    table = [[row["compiled"], f"{row['first_s']:.1f}", f"{row['step_s'] * 1e3:.1f}"] for row in rows]
    data = {"what": (__doc__ or "").splitlines()[0], "knobs": KNOBS, "rows": rows}
    report(options.out, "Cold start of a compiled run", ["compiled", "first step s", "later steps ms"], table, data)


if __name__ == "__main__":
    main()
