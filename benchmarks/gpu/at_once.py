"""Jobs in parallel forks of this process, until the time is up. torch is imported once, CUDA by the forks.

Each job's answer is a dict; {"error"} where a fork raises, ends or is too slow. And what the scripts of this folder ask
for and write alike.
"""

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

GRACE_S = 30  # for running jobs to end after the time is up


def parser_of(description: str | None, out: str, minutes: float, at_once: int = 0) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="one or two tiny cases, to try the script")
    parser.add_argument("--minutes", type=float, default=minutes, help="start no further case after this long")
    if at_once:
        parser.add_argument("--only", metavar="PATTERN", default="", help="cases whose name matches")
        parser.add_argument("--at-once", type=int, default=at_once, help="cases side by side")
    return parser


def head(description: str | None, device: str = "cuda") -> dict[str, Any]:
    """Return what a document of measurements begins with."""
    import torch

    card: Any = torch.cuda.get_device_properties(0) if device == "cuda" else None
    machine = {"gpu": card.name, "memory_bytes": card.total_memory, "sm_count": card.multi_processor_count} if card else {
        "gpu": "none", "memory_bytes": 0, "sm_count": 0,
    }  # fmt: skip
    return {
        "what": (description or "").splitlines()[0],
        "date": date.today().isoformat(),
        "machine": {**machine, "system": f"{platform.system()} {platform.machine()}"},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
    }


def import_compiler() -> None:
    """Import torch and its compiler, whose import asks how many cards there are: a process that has asked cannot fork.

    Without a card, torch before 2.13 would measure kernels by Triton's do_bench from then on, whose buffer is larger
    than a real run's; so it sees one.
    """
    import torch

    counted = getattr(torch._C, "_cuda_getDeviceCount", None)
    try:
        if counted:  # without CUDA torch decides more differently
            torch._C._cuda_getDeviceCount = lambda: 1
            import torch._inductor.runtime.benchmarking

            torch._C._cuda_getDeviceCount = lambda: 0
        import torch._inductor.compile_fx
    finally:
        if counted:
            torch._C._cuda_getDeviceCount = counted
    import torch._inductor.config

    torch._inductor.config.compile_threads = max(1, (os.cpu_count() or 1) // 6)


def run_all(jobs: dict[str, Callable[[], dict[str, Any]]], at_once: int, deadline: float) -> dict[str, dict[str, Any]]:
    """Return {name: answer} of all finished jobs; others were not begun by `deadline` (time.monotonic)."""
    found: dict[str, dict[str, Any]] = {}
    waiting, running = list(jobs), dict[int, tuple[str, Path, float]]()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < at_once and time.monotonic() < deadline:
                name = waiting.pop(0)
                out = Path(folder) / str(len(jobs) - len(waiting))
                running[_fork(jobs[name], out)] = name, out, time.monotonic()
            if not running:
                break
            for pid, (name, out, began) in list(running.items()):
                if time.monotonic() > deadline + GRACE_S:
                    os.kill(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del running[pid]
                    text = out.read_text() if out.exists() else ""
                    why = f"the process ended with {os.waitstatus_to_exitcode(status)}"
                    found[name] = json.loads(text) if text else {"error": why}
                    print(f"{time.monotonic() - began:5.0f} s  {name}: {found[name].get('error', 'done')}", flush=True)
            time.sleep(0.05)
    return found


def error_of(error: Exception) -> dict[str, Any]:
    where = "".join(traceback.format_tb(error.__traceback__))[-1500:]
    return {"error": f"{type(error).__name__}: {str(error)[:300]}", "where": where}


def answer_of(job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a job's answer or error: one failing case must not cost the others their time on the card."""
    try:
        return job()
    except Exception as error:
        return error_of(error)


def _fork(job: Callable[[], dict[str, Any]], out: Path) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            staging = out.with_suffix(".staging")
            staging.write_text(json.dumps(answer_of(job)))
            staging.replace(out)
        finally:
            os._exit(0)
    return pid
