"""What `foretrain demo` trains: a small GPT on the built-in corpus, as this machine trains it best."""

import subprocess
from dataclasses import replace

import torch

from foretrain.app.training_session import prepare_data
from foretrain.base import processes
from foretrain.config.resolve import ResolvedConfig, resolve
from foretrain.training import starting
from foretrain.training.device import place


def demo_config(steps: int, out: str) -> tuple[ResolvedConfig, ResolvedConfig]:
    """Make the data; return (the config of a demo, the same with what `train` will choose here). Raises UserError."""
    words = ["baby", "--device=cpu", f"--max_iters={steps}", f"--lr_decay_iters={steps}", f"--out_dir={out}",
             f"--eval_interval={max(10, steps // 5)}", f"--warmup_iters={min(50, steps // 4)}"]  # fmt: skip
    resolved, _ = prepare_data(resolve(words))
    threads = torch.get_num_threads()
    chosen = starting.decide(resolved.config, place(resolved.config), set(resolved.sources))
    torch.set_num_threads(threads)  # a calibration is of all of them
    return resolved, replace(resolved, config=chosen.config)


def to_calibrate(resolved: ResolvedConfig) -> list[str]:
    """Return the dtypes to be measured before the forecast stands on this machine's own speeds."""
    placement = place(resolved.config)
    dtypes = list(dict.fromkeys(["float32", placement.dtype]))  # as half of a half-precision step's kernels are fp32
    known = placement.gpu.calibration
    if known is None or known.disturbed or not all(known.steps_of(dtype, compiled=False) for dtype in dtypes):
        return dtypes
    return []


def measure(dtypes: list[str], *, quiet: bool) -> int:
    """Calibrate in a process of its own, so that what it leaves in memory is not the run's; return its exit code."""
    words = ["calibrate", "--device=cpu", "--quick", *(f"--dtype={dtype}" for dtype in dtypes)]
    command = processes.command("foretrain", *words, *(["--quiet"] if quiet else []))
    return subprocess.run(command, env=processes.variables(), stdout=subprocess.DEVNULL, check=False).returncode
