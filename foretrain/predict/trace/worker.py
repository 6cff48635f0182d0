"""The processes that trace, forked for each job by one that imports torch, as standing in for a card changes torch for
good (card/guard.py): jobs as JSON on standard input, traces into files. The exit code is in a file beside: 0: traced;
4: cannot be traced, the answer is {"reason": ...}."""

import gc
import importlib
import importlib.util
import json
import logging
import os
import resource
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

from foretrain.base.installation import installed_torch
from foretrain.predict.trace.record import Trace
from foretrain.predict.trace.traced import StandInError

CANNOT = 4


def work(job: dict[str, Any]) -> int:
    from foretrain.predict.trace import self_test

    out = Path(job["out"])
    try:
        self_test.prove_this_torch()
        record: Trace = importlib.import_module(job["by"]).trace(job)
    except (StandInError, self_test.TraceError) as error:
        out.write_text(json.dumps({"reason": str(error)}))
        return CANNOT
    except Exception as error:
        # Another torch may have moved anything that is patched here; the caller falls back and reports this sentence.
        from foretrain.predict.trace.kernels.values import raised_at

        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:200].rstrip(".")
        place = f", at {where}" if (where := raised_at(error)) else ""
        what = f"torch {installed_torch()} raised {type(error).__name__}: {first}{place}"
        out.write_text(json.dumps({"reason": what}))
        return CANNOT
    record.facts["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    text = json.dumps(record.to_json())
    out.write_text(text)
    if "question" in job:
        out.with_suffix(".answer").write_text(_answer(job["question"], text))
    return 0


def _answer(question: dict[str, Any], text: str) -> str:
    from foretrain.predict.trace import memory, repeats

    gc.enable()  # replays leave cycles
    trace = Trace.from_json(json.loads(text))
    whole = repeats.with_all_micro_batches(trace, question["traced"], question["micro_batches"])
    return memory.answer(question, [whole]).model_dump_json()


def _import_torch(jobs: list[dict[str, Any]]) -> None:
    """Import what every worker needs. bitsandbytes asks torch to compile its default kernels, which no trace runs."""
    if any(".finetune." in job["by"] for job in jobs) and importlib.util.find_spec("bitsandbytes") is not None:
        with mock.patch.object(importlib.import_module("torch"), "compile", lambda function, **_: function):
            importlib.import_module("bitsandbytes")
    for job in jobs:
        importlib.import_module(job["by"])
    if any(job["compiled"] for job in jobs):
        from foretrain.predict.trace import compiled  # noqa: F401


def _forked(job: dict[str, Any]) -> int:
    out = Path(job["out"])
    if pid := os.fork():
        return pid
    code = 1
    try:
        log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{out}.inductor"
        code = work(job)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # torch's static destructors would meet the stand-in's patches; nothing is left to flush
        os._exit(code)


def tell(out: Path, code: int) -> None:
    staging = out.with_suffix(".staging")
    staging.write_text(str(code))
    staging.replace(out.with_suffix(".status"))


def main() -> int:
    gc.disable()  # a fifth of the time; a trace makes no cycles that hold tensors, or their lifetimes would be random
    asked = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a real card is neither needed nor touched
    waiting: list[dict[str, Any]] = asked["jobs"]
    _import_torch(waiting)
    gc.freeze()
    running: dict[int, Path] = {}
    while waiting or running:
        while waiting and len(running) < asked["at_once"]:
            job = waiting.pop(0)
            running[_forked(job)] = Path(job["out"])
        pid, status = os.wait()
        tell(running.pop(pid), os.waitstatus_to_exitcode(status))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
