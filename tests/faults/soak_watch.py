"""What a soak sees of its run from outside: processes in /proc, and the run's own files."""

import json
import os
import time
from pathlib import Path
from typing import Any

SAVE_EVERY = 40  # steps
TICKS = os.sysconf("SC_CLK_TCK")


class Watch:
    """The supervisor, its child, and the run's directory `path`."""

    def __init__(self, supervisor: int, path: Path) -> None:
        self.supervisor, self.path = supervisor, path
        self.save_cpu_s = 0.0  # processor seconds of the child from one save to the next; see `measure`

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def child(self) -> int:
        """0 where there is none now."""
        try:
            found = Path(f"/proc/{self.supervisor}/task/{self.supervisor}/children").read_text().split()
        except OSError:
            return 0
        return int(found[0]) if found else 0

    @property
    def living(self) -> int:
        """The child. Raises ProcessLookupError where there is none now: to the system, process 0 is everybody here."""
        if not (child := self.child):
            raise ProcessLookupError("no training process")
        return child

    def cpu_s(self) -> float:
        try:
            words = Path(f"/proc/{self.child}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(words[11]) + int(words[12])) / TICKS

    def measure(self, saves: int = 5) -> None:
        """Find `save_cpu_s` over some saves of a quiet run. How long they take hangs on what else the machine does."""
        at: list[float] = []
        for number in range(self.saves() + 1, self.saves() + saves + 2):
            while self.saves() < number:
                time.sleep(0.005)
                assert self.child, "the run has ended"
            at.append(self.cpu_s())
        self.save_cpu_s = (at[-1] - at[0]) / saves

    def metrics(self) -> list[dict[str, Any]]:
        try:
            with (self.path / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - 4000))
                texts = file.read().splitlines()
        except OSError:
            return []
        lines = []
        for text in texts:
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue
        return lines

    def last_step(self) -> int:
        return max((line["step"] for line in self.metrics() if line["kind"] == "step"), default=-1)

    def resumed(self) -> list[int]:
        """Steps at which it was gone on."""
        return [event["values"]["step"] for event in self.events() if event["id"] == "resumed"]

    def failed_saves(self) -> int:
        return sum(event["id"] == "save_failed" for event in self.events())

    def saves(self) -> int:
        return sum(event["id"] == "saved" for event in self.events())

    def events(self) -> list[dict[str, Any]]:
        found = []
        for text in (self.path / "events.jsonl").read_text().splitlines():
            try:
                found.append(json.loads(text))
            except ValueError:
                continue
        return found

    def wait_until_gone(self, pid: int) -> None:
        while self.child == pid:
            time.sleep(0.002)

    def wait_until_back(self, since_s: float, most_s: float = 300) -> tuple[float, int]:
        """(seconds from then until the first step is begun after a resume, the step it was gone on from)."""
        before = len(self.resumed())
        while time.monotonic() < since_s + most_s:
            time.sleep(0.05)
            resumed = self.resumed()
            if len(resumed) > before:
                new = [line for line in self.metrics() if line["kind"] == "step" and line["step"] >= resumed[-1]]
                if new:
                    return time.monotonic() - since_s - new[0]["step_s"], resumed[-1]
        raise TimeoutError("the run did not come back")

    def look(self) -> dict[str, Any]:
        child = self.child
        return {"supervisor": process(self.supervisor), "child": process(child) if child else None}


def process(pid: int) -> dict[str, Any] | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        open_files = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
        resident = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))
    except (OSError, StopIteration):
        return None
    return {
        "pid": pid, "resident_bytes": resident, "open_files": open_files,
        "cpu_s": (int(stat[11]) + int(stat[12])) / TICKS,
    }  # fmt: skip
