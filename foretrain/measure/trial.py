"""A short trial of a run's sizes in a process of its own: does it live, and what does it take?

The child trains the config's model on random tokens: an evaluation batch, two optimizer steps of at most two
micro-steps (Adam's states appear after the first, gradients add up from the second micro-step on), and an evaluation
batch with all of that there. It is capped as the run will be: on CUDA by PyTorch's allocator; on a CPU the parent looks
at its memory twenty times a second and ends it when it is beyond the cap. The child ends with its parent: it reads a
pipe that closes.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time

from foretrain.base import apart, bugs
from foretrain.base.messages import printable, say
from foretrain.base.process_memory import resident_bytes
from foretrain.base.records import Record
from foretrain.config.options import RunConfig

LOOK_EVERY_S = 0.05


class Trial(Record):
    """What a trial showed. `peak_bytes`: of the process on a CPU, of PyTorch's reserved memory on CUDA.

    `problem`: why it says nothing about memory, such as a compiler that is missing; '' where it does.
    """

    batch_size: int
    lived: bool
    peak_bytes: int
    problem: str = ""


def run_trial(config: RunConfig, cap_bytes: int | None) -> Trial:
    """Try a config's sizes. `cap_bytes`: what the process may take. Ends the child when interrupted."""
    job = json.dumps({"config": config.model_dump(mode="json"), "cap_bytes": cap_bytes}) + "\n"
    beyond = peak = 0
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = apart.start("foretrain.measure.trial", stdin=subprocess.PIPE, stdout=out, stderr=err, text=True)
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(job)
                child.stdin.flush()
            while child.poll() is None:
                peak = max(peak, resident_bytes(child.pid) or 0)
                if config_on_cpu(config) and cap_bytes is not None and peak > cap_bytes:
                    beyond = peak
                    break
                time.sleep(LOOK_EVERY_S)
        finally:
            apart.end(child)
        out.seek(0)
        err.seek(0)
        return _result(config, child.returncode, beyond, peak, out.read(), err.read())


def config_on_cpu(config: RunConfig) -> bool:
    """Whether the process's own memory is what counts; 'auto' is resolved before."""
    return config.device == "cpu"


def _result(config: RunConfig, code: int, beyond: int, peak: int, out: str, err: str) -> Trial:
    batch = config.batch_size
    if beyond or (code == -9 and config_on_cpu(config)):  # the system's own killer is a lack of memory too
        return Trial(batch_size=batch, lived=False, peak_bytes=beyond or peak)
    try:
        found = json.loads(out.strip().splitlines()[-1])
        return Trial(batch_size=batch, lived=found["lived"], peak_bytes=max(found["peak_bytes"], 0))
    except (ValueError, IndexError, KeyError, TypeError):
        return Trial(batch_size=batch, lived=True, peak_bytes=peak, problem=failure(err, code))


def failure(printed: str, code: int) -> str:
    """Why a child that tries something ended: its last line, its exit code, and the file that has all it printed."""
    lines = printed.strip().splitlines()
    last = printable(lines[-1][:200]) if lines else say("trial.silent")
    path = bugs.write_text_file(printed, "trial") if lines else None
    return say("trial.kept" if path else "trial.failed", last=last, code=code, path=path)


def main() -> None:
    """Read a job from stdin, write one line of JSON. Ends when stdin closes: then nobody waits any more."""
    job = json.loads(sys.stdin.readline())

    def end_with_parent() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    from foretrain.measure.timed_step import try_steps

    lived, peak = try_steps(RunConfig.model_validate(job["config"]), job["cap_bytes"])
    sys.stdout.write(json.dumps({"lived": lived, "peak_bytes": peak}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the thread above still reads


if __name__ == "__main__":
    main()
