"""This machine's cards and runs at one moment, again and again: `foretrain top`."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from foretrain.analysis.live.folders import found_in
from foretrain.analysis.live.observed import LOCKS
from foretrain.analysis.live.record import LiveCard, LiveMachine, LiveRun, Top
from foretrain.analysis.live.runs import Known, known_of, of_folder
from foretrain.base import process_memory
from foretrain.base.process_memory import TreeSample
from foretrain.hardware.card import Cards
from foretrain.hardware.cpu import available_memory_bytes, machine, nominal_cpu, total_memory_bytes
from foretrain.training.folder import now

MOST_RUNS = 60  # are read at a look; a screen shows fewer
_LEAST_S = 0.2  # over which the processor's share of work says something
MOST_OTHERS = 3  # programs that are named beside a card


class Look:
    """Looks at this machine. `folders`: where runs are looked for; None: here, and all that are alive on this machine.

    `nvml`, `locks` (the kernel's list of locks) and `clock` are stand-ins for tests.
    """

    def __init__(
        self,
        folders: Sequence[Path] | None = None,
        *,
        nvml: Any = None,
        locks: Path = LOCKS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._roots = list(folders) if folders else [Path()]
        self._locks = None if folders else locks
        self._cards, self._clock = Cards(nvml), clock
        self._known: dict[Path, Known] = {}
        self._energy_j: dict[int, float] = {}
        self._cpu_name, self._cores = nominal_cpu().name, machine().cores
        self._busy = _Busy()

    def now(self) -> Top:
        """What there is at this moment. It takes some milliseconds, the first time a fifth of a second."""
        folders = found_in(self._roots, self._locks)
        runs = [self._run(run) for run in folders[:MOST_RUNS]]
        trees = {run.path: _tree(run) for run in runs if run.where == "here"}
        cards = self._look_at_cards(runs, trees)
        held = {path: tree.rss_bytes for path, tree in trees.items()}
        on = {run.path: tuple(c.index for c, by in cards if by.get(run.path)) for run in runs}
        shown = [_with_processes(run, trees.get(run.path), on[run.path]) for run in runs]
        at = datetime.fromtimestamp(self._clock()).astimezone().isoformat(timespec="seconds")
        return Top(
            at=at, machine=self._machine(sum(held.values())), cards=tuple(card for card, _ in cards),
            no_cards="" if cards else self._cards.problem, runs=tuple(sorted(shown, key=_order)),
            more_runs=max(0, len(folders) - MOST_RUNS),
        )  # fmt: skip

    def close(self) -> None:
        """Let go of the driver."""
        self._cards.close()

    def _run(self, run: Any) -> LiveRun:
        alive, known = run.is_locked(), self._known.get(run.path)
        if known is None or (alive and not known.alive):
            known = self._known[run.path] = known_of(run.path, alive=alive)
        return of_folder(run, known)

    def _machine(self, runs_bytes: int) -> LiveMachine:
        total, free = total_memory_bytes(), available_memory_bytes()
        return LiveMachine(
            host=socket.gethostname(), cpu=self._cpu_name, cores=self._cores, busy=self._busy.share(),
            load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None, total_bytes=total,
            used_bytes=None if free is None else total - free, runs_bytes=runs_bytes,
        )  # fmt: skip

    def _look_at_cards(
        self, runs: list[LiveRun], trees: dict[str, TreeSample]
    ) -> list[tuple[LiveCard, dict[str, int]]]:
        """Each card, and what each run holds on it."""
        ours = {pid: path for path, tree in trees.items() for pid in tree.pids}
        samples = self._cards.sample(tuple(ours))
        holders = [self._cards.holders(facts.index) for facts in self._cards.facts]
        by = [_by_run(each or (), ours) for each in holders]
        # In a container NVML may show no process, or none by the number that it has there.
        visible = any(by) or not any(_on_a_card(run) for run in runs)
        found = []
        for facts, sample, held, who in zip(self._cards.facts, samples, by, holders, strict=False):
            told = (
                visible
                and who is not None
                and sample.used_bytes is not None
                and all(size is not None for _, size in who)
            )
            card = LiveCard(
                index=facts.index, name=facts.name, driver=facts.driver, total_bytes=facts.total_bytes,
                used_bytes=sample.used_bytes, runs_bytes=sum(held.values()) if told else None,
                others_bytes=max(0, (sample.used_bytes or 0) - sum(held.values())) if told else None,
                others=_names([pid for pid, _ in who or () if pid not in ours]) if told else (), busy=sample.busy,
                clock_ghz=sample.clock_ghz, reasons=sample.reasons, temperature_c=sample.temperature_c,
                power_w=sample.power_w, energy_j=sample.energy_j,
                energy_seen_j=self._seen_j(facts.index, sample.energy_j),
            )  # fmt: skip
            found.append((card, held))
        return found

    def _seen_j(self, index: int, energy_j: float | None) -> float | None:
        return None if energy_j is None else energy_j - self._energy_j.setdefault(index, energy_j)


class _Busy:
    """The share of the processor that works, between two questions."""

    def __init__(self) -> None:
        self._at_s = time.monotonic()
        process_memory.system().cpu_percent(None)

    def share(self) -> float:
        if (wait_s := self._at_s + _LEAST_S - time.monotonic()) > 0:
            time.sleep(wait_s)
        self._at_s = time.monotonic()
        return process_memory.system().cpu_percent(None) / 100


def _by_run(holders: Sequence[tuple[int, int | None]], ours: dict[int, str]) -> dict[str, int]:
    """What each run holds on a card."""
    found: dict[str, int] = {}
    for pid, size in holders:
        if pid in ours:
            found[ours[pid]] = found.get(ours[pid], 0) + (size or 0)
    return found


def _on_a_card(run: LiveRun) -> bool:
    """Whether a run here says that it trains on a card."""
    return run.where == "here" and bool(run.device) and not run.device.upper().startswith("CPU")


def _names(pids: Sequence[int]) -> tuple[str, ...]:
    """What the programs are called that have these numbers here."""
    names = (process_memory.name_of(pid) for pid in pids)
    return tuple(dict.fromkeys(name for name in names if name))[:MOST_OTHERS]


def _tree(run: LiveRun) -> TreeSample:
    """The processes of a run, those of its other ranks here included."""
    pids = [*run.pids]
    for path in sorted(Path(run.path).glob(f".ranks/*/{now.FILE}")):
        said = now.read(path.parent)
        if said is not None and now.lives(said):
            pids.append(said.pid)
    trees = [tree for pid in pids if (tree := process_memory.sample_tree(pid))]
    return TreeSample(
        tuple(pid for tree in trees for pid in tree.pids), sum(tree.cpu_s for tree in trees),
        sum(tree.rss_bytes for tree in trees),
    )  # fmt: skip


def _with_processes(run: LiveRun, tree: TreeSample | None, cards: tuple[int, ...]) -> LiveRun:
    """The run with its cards; one that is on none holds what its processes hold."""
    if tree is None or not tree.pids:
        return run
    update: dict[str, Any] = {"pids": tree.pids, "cards": cards}
    if not cards and run.device.startswith("CPU") and tree.rss_bytes:
        update["memory_bytes"] = tree.rss_bytes
        update["memory_peak_bytes"] = max(run.memory_peak_bytes or 0, tree.rss_bytes)
    return run.model_copy(update=update)


def _order(run: LiveRun) -> tuple[bool, bool, bool]:
    """Those that are alive here, those that are alive elsewhere, those that have ended, and what cannot be read; each
    in the order in which they came, which is the newest first."""
    return run.phase == "unreadable", run.where == "nowhere", run.where == "elsewhere"
