"""Other programs on the processor: noticed, said, kept out of the forecast's judgement, and given way to."""

import io
import json
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

from foretrain.analysis.forecast_check import check_forecast
from foretrain.analysis.run import explain_run
from foretrain.analysis.run_pace import pace_of
from foretrain.predict.plan import plan
from foretrain.reports import text
from foretrain.reports.document import Document
from foretrain.reports.views import run as run_view
from foretrain.reports.views import run_explain as run_explain_view
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import MachineLoad, crowded
from foretrain.training import contention, cpu_threads
from foretrain.training.contention import Clock, Contention, cores_busy_s
from foretrain.training.cpu_threads import Waiting, idle_teams
from foretrain.training.meter import Pace
from tests.kit.tiny import tiny, write_dataset
from tests.kit.training import assert_same, final_tensors, stop_at_6, train


def shown_of(document: Document) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None, highlight=False)
    text.render(document, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


class Machine:
    """Two cores on which time passes only when a test says so."""

    def __init__(self, cores: int = 2) -> None:
        self.at_s = self.own_s = self.busy_s = 0.0
        self.counts = True
        self.load = 0.0
        self.clock = Clock(
            lambda: self.at_s,
            lambda: self.own_s,
            lambda: self.busy_s if self.counts else None,
            lambda: self.load,
            cores,
        )

    def passes(self, wall_s: float, own: float, others: float) -> None:
        """So many seconds, in which this process and others use so many cores."""
        self.at_s, self.own_s = self.at_s + wall_s, self.own_s + own * wall_s
        self.busy_s += (own + others) * wall_s


def steps(watch: Contention, machine: Machine, count: int, took_s: float, own: float, others: float) -> list[Any]:
    told = []
    for _ in range(count):
        machine.passes(took_s, own, others)
        told += watch.step(took_s)
    return told


def test_a_quiet_machine_is_no_news() -> None:
    machine = Machine()
    watch = Contention(2, clock=machine.clock)
    assert steps(watch, machine, 400, 0.05, 1.9, 0.05) == []
    found = watch.result()
    assert (found.others_share, found.own_share, found.busy) == (0.025, 0.95, False)
    assert not watch.gives_way


def test_a_run_that_gets_all_cores_has_no_others_beside_it() -> None:
    """On a virtual machine time that was stolen can be counted twice, as this process's and as the cores'."""
    machine = Machine()
    watch = Contention(2, clock=machine.clock)
    assert steps(watch, machine, 400, 0.05, 1.98, 0.25) == []
    found = watch.result()
    assert found.others_share == pytest.approx(0.01)
    assert not watch.gives_way


def test_busy_machine_and_its_end_are_said_once() -> None:
    machine = Machine()
    watch = Contention(2, clock=machine.clock)
    told = steps(watch, machine, 100, 0.1, 0.8, 1.2)
    assert [id for id, _ in told] == ["machine_busy"]
    assert told[0][1] == pytest.approx({"others": 0.6, "own": 0.4})
    assert [id for id, _ in steps(watch, machine, 600, 0.05, 1.95, 0.0)] == ["machine_quiet"]
    assert steps(watch, machine, 40, 0.1, 0.8, 1.2) == []  # not every minute
    assert watch.result() is not None


def test_others_matter_where_training_wants_their_cores() -> None:
    """Half of a machine of 64 cores may be used while a run needs eight."""
    assert not crowded(32, 64, 8)
    assert crowded(60, 64, 8)
    assert crowded(1, 2, 2)
    assert not crowded(1, 2, 1)
    assert not crowded(0.1, 2, 2)


def test_threads_sleep_beside_others_and_spin_when_alone() -> None:
    machine = Machine()
    watch = Contention(2, clock=machine.clock)
    steps(watch, machine, 100, 0.05, 1.9, 0.0)
    assert not watch.gives_way
    steps(watch, machine, 80, 0.05, 0.9, 1.0)
    assert watch.gives_way
    steps(watch, machine, 200, 0.05, 1.9, 0.0)  # ten seconds: others may only pause
    assert watch.gives_way
    steps(watch, machine, 300, 0.05, 1.9, 0.0)
    assert not watch.gives_way
    steps(watch, machine, 80, 0.05, 0.9, 1.0)  # not told again so soon, but given way to
    assert watch.gives_way
    assert watch.threads == 2


def ways(watch: Contention, machine: Machine, wall_s: float, spinning_s: float, sleeping_s: float) -> list[bool]:
    """Whether threads slept in each step beside others, where one takes so long in either way."""
    found: list[bool] = []
    while wall_s > 0:
        found.append(watch.gives_way)
        took_s = sleeping_s if watch.gives_way else spinning_s
        steps(watch, machine, 1, took_s, 1.0, 0.9)
        wall_s -= took_s
    return found


def test_threads_wait_in_the_way_that_makes_steps_shorter() -> None:
    """A neighbour of a virtual machine that takes a little of it all the time, and two programs that take it all."""
    for spinning_s, sleeping_s in ((0.028, 0.042), (2.2, 0.07)):
        machine = Machine()
        watch = Contention(2, clock=machine.clock)
        found = ways(watch, machine, 10.0, spinning_s, sleeping_s)
        assert (found[0], True in found) == (False, True)  # both were tried
        assert set(ways(watch, machine, 200.0, spinning_s, sleeping_s)) == {sleeping_s < spinning_s}


def test_other_way_is_retried_after_a_while_or_on_longer_steps() -> None:
    machine = Machine()
    watch = Contention(2, clock=machine.clock)
    found = ways(watch, machine, 400.0, 0.03, 0.06)
    tries = [n for n in range(1, len(found)) if found[n] and not found[n - 1]]
    assert len(tries) == 2  # once more after five minutes
    assert 0.03 * (tries[1] - tries[0]) == pytest.approx(300, rel=0.03)
    assert sum(found) * 0.06 < 7  # seconds asleep
    assert ways(watch, machine, 20.0, 0.6, 0.06)[-1]  # others take more than before


def test_a_little_noise_changes_nothing() -> None:
    machine = Machine()
    watch = Contention(2, clock=machine.clock)
    ways(watch, machine, 10.0, 0.03, 0.0301)
    assert len(set(ways(watch, machine, 100.0, 0.0302, 0.0301))) == 1


def test_stalls_are_counted_beside_others_only() -> None:
    machine = Machine()
    watch = Contention(2, clock=machine.clock)
    steps(watch, machine, 100, 0.05, 1.9, 0.0)
    steps(watch, machine, 2, 2.0, 1.9, 0.0)  # a disk, a page fault
    found = watch.result()
    assert found.stalls == 0
    steps(watch, machine, 100, 0.05, 1.9, 0.0)
    steps(watch, machine, 2, 4.0, 0.3, 1.0)  # threads hold each other up
    found = watch.result()
    assert found.stalls == 2
    assert found.stalled_s == pytest.approx(2 * 3.95)


def test_run_that_begins_beside_others_gives_way_at_once() -> None:
    machine = Machine()
    watch = Contention(2, clock=machine.clock, since=machine.clock.read())
    machine.passes(3.0, 0.5, 1.0)
    assert [id for id, _ in watch.begin()] == ["machine_busy"]
    assert watch.gives_way
    alone = Contention(2, clock=machine.clock, since=machine.clock.read())
    machine.passes(3.0, 1.0, 0.02)
    assert alone.begin() == []
    assert not alone.gives_way


def test_as_many_idle_threads_as_make_more_threads_than_cores() -> None:
    for cores in range(1, 65):
        for count in range(2, cores + 1):
            teams = idle_teams(count, cores)
            assert count + teams * (count - 1) > cores
            assert teams == 1 or count + (teams - 1) * (count - 1) <= cores
    assert idle_teams(1, 8) == 0  # which waits for nobody


def test_idle_threads_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "can_sleep", lambda: True)
    monkeypatch.setattr(cpu_threads, "idle_teams", lambda threads, cores: 3)

    def idle() -> int:
        return sum(thread.name == "foretrain-idle" for thread in threading.enumerate())

    with Waiting() as own:
        assert own.sleep()
        assert own.sleep()  # again changes nothing
        assert (own.asleep, idle()) == (True, 3)
        own.spin()
        assert (own.asleep, idle()) == (False, 0)
        own.sleep()
    assert idle() == 0


def test_threads_wait_as_somebody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    with Waiting() as own:
        assert not own.sleep()
    assert not own.asleep


def test_without_counts_of_cores_the_load_average_stands_in() -> None:
    machine = Machine()
    machine.counts, machine.load = False, 4.0
    watch = Contention(2, clock=machine.clock)
    told = steps(watch, machine, 10, 1.0, 0.5, 0.0)
    assert told[0][0] == "machine_busy"
    assert told[0][1]["others"] == 1.0


def test_the_busy_time_is_of_the_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Idle time and waiting for disks are left out, time that other virtual machines took is not."""
    stat = tmp_path / "stat"
    stat.write_text("cpu  9 9 9 9\ncpu0 100 10 50 9000 800 5 5 30 9 9\ncpu1 1 1 1 1 1 1 1 1 1 1\n"
                    "cpu2 200 0 0 7 7 0 0 0 0 0\nintr 5\n")  # fmt: skip
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr(contention.os, "sched_getaffinity", lambda _: {0, 2}, raising=False)
    assert cores_busy_s() == 4.0
    monkeypatch.setattr(contention.os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert cores_busy_s() == pytest.approx(4.06)
    stat.write_text("nothing")
    assert cores_busy_s() is None


def test_first_eta_is_the_forecast_until_steps_are_measured() -> None:
    """A first step of seconds (memory is allocated, the profiler runs) said 54 minutes for three."""
    pace = Pace((0.1, 1.0))
    pace.begin(0.0, 0)
    first = pace.eta_s(0, pace.step_s(10.0, 0), 1001, 500)
    assert first == pytest.approx(1000 * 0.1 + 2 * 1.0)
    at_s = 10.0
    for step in range(10, 200, 10):
        at_s += 2.0
        later = pace.eta_s(step, pace.step_s(at_s, step), 1001, 500)
    assert later == pytest.approx(811 * 0.2 + 2, rel=0.1)
    without = Pace()
    without.begin(0.0, 0)
    assert without.eta_s(0, without.step_s(10.0, 0), 1001, 500) == 10_000


@pytest.fixture
def busy_run(own_directory: Path) -> RunDirectory:
    """A run that was measured while others used 60% of the processor."""
    write_dataset(Path("data/toy"))
    train(tiny())
    directory = RunDirectory(Path("out"))
    load = MachineLoad(cores=2, threads=2, others_share=0.6, own_share=0.14, stalls=3, stalled_s=9.5)
    record = directory.read_record().model_copy(update={"machine": load, "step_s": 60.2})
    directory.write_record(record)
    return directory


def test_figures_of_a_busy_machine_are_marked_and_not_judged(busy_run: RunDirectory) -> None:
    record = busy_run.read_record()
    forecast = plan(record.config, record.gpu)
    found = check_forecast(forecast, record)
    assert found.time
    assert all(row.busy and row.in_range is None for row in found.time)
    assert not any(row.busy for row in found.memory)
    shown = shown_of(run_view.comparison_document(found))
    assert "busy machine" in shown
    assert "out of range" not in shown.split("Time")[-1]
    assert "other programs used 60.0% of the processor" in " ".join(shown.split())
    assert "3 steps stalled" in shown


def test_explain_says_that_the_machine_was_busy(busy_run: RunDirectory) -> None:
    record = busy_run.read_record()
    metrics, events = busy_run.read_lines("metrics"), busy_run.read_lines("events")
    found = explain_run(record, plan(record.config, record.gpu), metrics, events)
    shown = " ".join(shown_of(run_explain_view.document(found)).split())
    assert "other programs used 60.0% of the processor" in shown
    assert shown.count("foretrain calibrate") == 1  # for the machine's limit, and not because the forecast was missed


def test_lines_beside_more_of_others_are_slow_for_their_sake() -> None:
    lines = [
        {"kind": "step", "step": i, "step_s": 0.5 if i in (20, 21) else 0.1, "cpu_s": 0.1,
         "others_cores": 1.5 if i in (20, 21) else 0.05} for i in range(40)
    ]  # fmt: skip
    found = pace_of(lines, (), compiled=False)
    assert [one.cause for one in found.slower] == ["others_cpu"]


def busy_watch() -> Contention:
    """Of a machine on which another program uses one of two cores."""
    machine = Machine()
    watch = Contention(2, clock=machine.clock, since=machine.clock.read())
    machine.passes(3.0, 0.5, 1.0)
    return watch


def test_run_names_other_programs_and_lets_threads_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(Path("data/toy"))
    monkeypatch.setattr(cpu_threads, "can_sleep", lambda: True)
    torch.set_num_threads(2)
    record = train(tiny(), contention=busy_watch())
    events = [e["id"] for e in RunDirectory(Path("out")).read_lines("events")]
    assert events[:2] == ["machine_busy", "threads_sleep"]
    assert record.machine.busy
    lines = [m for m in RunDirectory(Path("out")).read_lines("metrics") if m["kind"] == "step"]
    assert "others_cores" in json.dumps(lines)


def test_giving_way_keeps_the_threads_and_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others, stopped in its middle and resumed on a quiet machine: as the run that was never disturbed."""
    monkeypatch.setattr(cpu_threads, "can_sleep", lambda: True)
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 4)
    torch.set_num_threads(2)
    train(tiny(n_embd=64, out_dir="alone"))  # so large that threads share the sums
    stopped = train(tiny(n_embd=64), contention=busy_watch(), listen=stop_at_6)
    torch.set_num_threads(1)
    record = train(tiny(n_embd=64), resume=True)
    events = [event["id"] for event in RunDirectory(Path("out")).read_lines("events")]
    assert (stopped.status, stopped.threads, record.threads) == ("interrupted", 2, 2)
    assert "threads_sleep" in events
    assert "resumed_otherwise" not in events
    assert_same(final_tensors(Path("alone")), final_tensors(Path("out")))
