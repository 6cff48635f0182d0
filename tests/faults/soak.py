"""python -m tests.faults.soak [--hours 1] [--every 30]: a small real run under `train --auto-restart`, with faults.

Nobody does anything by hand: every fault has to be got over by the run and its supervisor. For the last third of the
time the faults are those that end no process, so that one training process is old enough to show what it leaks. At the
end the run is stopped by SIGTERM. The same steps are done once more without a fault (soak_whole.py), to compare every
bit.

The JSON is written after each fault. `--check` counts again from the files of a soak (`--work`).
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, report, show
from tests.faults import soak_faults
from tests.faults.soak_count import counted
from tests.faults.soak_watch import SAVE_EVERY, Watch
from tests.faults.soak_whole import Whole
from tests.kit.command import REPO

CONFIG = {
    "device": "cpu", "compile": "false", "cpu_threads": 1, "dtype": "float32", "attention": "sdpa", "n_layer": 2,
    "n_head": 2, "n_embd": 64, "block_size": 32, "batch_size": 8, "gradient_accumulation_steps": 2, "dropout": 0.1,
    "max_iters": 200_000, "lr_decay_iters": 200_000, "eval_interval": SAVE_EVERY, "eval_iters": 1,
    "always_save_checkpoint": "true", "keep_checkpoints": 3, "log_interval": 1,
}  # fmt: skip
LAST_SHARE = 1 / 3  # of the time without a fault that ends a process


def command(out: str, *more: str, **changes: object) -> list[str]:
    words = [f"--{key}={value}" for key, value in {**CONFIG, **changes}.items()]
    return [sys.executable, "-m", "foretrain", "train", "baby", *words, f"--out_dir={out}", *more]


def environment(*, faults: bool) -> dict[str, str]:
    """One thread; with the file that lets some faults in, where there are any."""
    inside = [str(Path(__file__).parent / "inside")] if faults else []
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*inside, str(REPO)]), "OMP_NUM_THREADS": "1"}


class Soak:
    """The hour. `work`: an empty folder."""

    def __init__(self, work: Path, hours: float, every_s: float, seed: int, out: Path) -> None:
        self.work, self.hours, self.every_s, self.out = work, hours, every_s, out
        self.whole = Whole(work, command, environment(faults=False))
        self.chance = random.Random(seed)
        self.faults: list[dict[str, Any]] = []
        self.squeezes = self.saves = 0
        self.lock = threading.Lock()

    def run(self) -> None:
        log = (self.work / "stderr.txt").open("w")
        words = command("out", "--auto-restart")
        own = subprocess.Popen(words, cwd=self.work, env=environment(faults=True), stdout=log, stderr=log)
        watch = Watch(own.pid, self.work / "out")
        while watch.last_step() < 2 * SAVE_EVERY:  # the data are made and a checkpoint is there
            time.sleep(0.2)
            assert own.poll() is None, (self.work / "stderr.txt").read_text()
        watch.measure()
        started, first = time.monotonic(), watch.last_step()
        threading.Thread(target=self._sample, args=(watch, started), daemon=True).start()
        self.whole.begin()
        while own.poll() is None and time.monotonic() - started < self.hours * 3600:
            self._wait(watch, started)
            self._one(watch, started)
            self.save(first_step=first, wall_s=time.monotonic() - started, manual_actions=0, ended=None)
        manual = int(own.poll() is not None)  # it gave up: somebody would have to come
        wall_s = time.monotonic() - started
        if not manual:
            own.send_signal(signal.SIGTERM)
        code = own.wait(timeout=300)
        self.save(first_step=first, wall_s=wall_s, manual_actions=manual, ended=code)

    def _wait(self, watch: Watch, started: float) -> None:
        """Until the next fault is due and the run has saved after the last one: three failed saves in a row end it.

        Saves are counted, as a run that may not open a file cannot note that a save has failed.
        """
        due = (len(self.faults) + 1) * self.every_s
        supervisor = Path(f"/proc/{watch.supervisor}")
        while supervisor.exists() and (time.monotonic() - started < due or watch.saves() == self.saves):
            time.sleep(0.05)

    def _one(self, watch: Watch, started: float) -> None:
        at = time.monotonic() - started
        kinds: list[soak_faults.Fault] = [*soak_faults.PASSING]
        if at < self.hours * 3600 * (1 - LAST_SHARE):
            kinds += soak_faults.KILLING
        squeeze = self.squeezes < soak_faults.MOST_SQUEEZES and len(self.faults) % 2 == 1  # early: see soak_whole.py
        kind = soak_faults.no_memory if squeeze else self.chance.choice(kinds)
        self.squeezes += kind is soak_faults.no_memory
        fault = {"at_s": at, "kind": kind.__name__, "step": watch.last_step()}
        try:
            fault |= kind(watch, self.chance)
        except (OSError, subprocess.CalledProcessError, TimeoutError, IndexError) as error:
            reason = str(error).replace(str(self.work), self.work.name)  # results name no machine's folders
            fault |= {"not_done": f"{type(error).__name__}: {reason}"}
        self.faults.append(fault)
        self.saves = watch.saves()

    def _sample(self, watch: Watch, started: float) -> None:
        with (self.work / "samples.jsonl").open("a") as file:
            while Path(f"/proc/{watch.supervisor}").exists():
                file.write(json.dumps({"at_s": time.monotonic() - started, **watch.look()}) + "\n")
                file.flush()
                time.sleep(1)

    def save(self, **values: Any) -> None:
        document = {"hours": self.hours, "every_s": self.every_s, **values, "faults": self.faults}
        (self.work / "soak.json").write_text(json.dumps(document))
        write(self.work, self.out)


def write(work: Path, out: Path, same: dict[str, Any] | None = None) -> dict[str, Any]:
    """Count from the files of a soak, and write the JSON."""
    found = counted(work)
    found |= {"compared": same}
    rows = [[key, json.dumps(value)] for key, value in found.items()]
    with (work / "table.txt").open("w") as file:
        old, sys.stdout = sys.stdout, file
        try:
            show("Soak", ["what", "count"], rows)
            report(out, found)
        finally:
            sys.stdout = old
    return found


def main() -> None:
    """Exit code 1 where it did not show what it must."""
    parser = argparse.ArgumentParser(description="A run of an hour with a fault every 30 seconds.")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds from fault to fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("soak"), help="a new folder for the run's files")
    parser.add_argument("--check", action="store_true", help="do no hour: count and compare what is in --work")
    parser.add_argument("--out", type=Path, default=RESULTS / "soak.json")
    words = parser.parse_args()
    work, out = words.work.absolute(), words.out.absolute()
    if words.check:
        whole = Whole(work, command, environment(faults=False))
    else:
        work.mkdir(parents=True)
        soak = Soak(work, words.hours, words.every, words.seed, out)
        soak.run()
        whole = soak.whole
    same = whole.compare()
    found = write(work, out, same)
    print((work / "table.txt").read_text())
    raise SystemExit(0 if found["ok"] and same["weights_moments_generators_equal"] else 1)


if __name__ == "__main__":
    main()
