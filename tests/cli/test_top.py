"""`foretrain top`: what runs say of themselves, what is seen of them from outside, and the frame that shows it."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from foretrain.analysis.live import LiveCard, LiveRun, ObservedRun, Top, found_in, held_here, look, of_folder
from foretrain.base import messages
from foretrain.base.units import GIB
from foretrain.cli.commands.train import Printer
from foretrain.cli.common import rewrites_lines
from foretrain.data.dataset import read_info
from foretrain.hardware.card import Cards
from foretrain.reports import text
from foretrain.reports.views.runs import top_document
from foretrain.runs import folder, state
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import TrainerRun, WatchedRun
from foretrain.runs.state import Label, Now, Teller
from foretrain.training.device import place
from foretrain.training.trainer import Trainer
from tests.kit.command import REPO, foretrain
from tests.kit.nvml import FakeNvml, Nvml, Rack
from tests.kit.page import EVIL_NAME, write_run
from tests.kit.tiny import tiny, write_dataset
from tests.kit.training import train

ELSEWHERE = "another-machine"


def alive(path: Path, **changes: Any) -> RunDirectory:
    directory = write_run(path, status="running", **changes)
    directory.acquire()
    directory.tell("training", 11)
    return directory


def seen(path: Path) -> LiveRun:
    return of_folder(ObservedRun(path))


def grow_old(path: Path) -> None:
    """Nothing in a folder has changed for long."""
    for file in path.iterdir():
        os.utime(file, (1e9, 1e9))


def line(step: int, **more: Any) -> str:
    return json.dumps({"kind": "step", "step": step, "loss": 3.0, **more}) + "\n"


@pytest.fixture
def ended_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


# -- what a run says of itself -----------------------------------------------------------------------------


def test_run_says_its_phase_only_while_it_goes_on() -> None:
    said: list[tuple[str, int]] = []

    def listen(event: Any) -> None:
        found = state.read_now(Path("out"))
        assert (found.pid, state.lives(found)) == (os.getpid(), True)
        said.append((found.phase, found.step))

    record = train(tiny(max_iters=6, lr_decay_iters=6), listen=listen)
    assert record.status == "finished"
    phases = [phase for phase, _ in said]
    assert phases[0] == "starting" or phases[0] == "evaluating"
    assert set(phases) <= {"starting", "evaluating", "training", "saving"}
    assert {"evaluating", "training"} <= set(phases)
    assert not list(Path("out").glob("*now.json*"))


def test_the_first_pass_of_a_compiled_model_is_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    config, directory = tiny(max_iters=4, lr_decay_iters=4, eval_interval=2, compile=True), folder.create("out")
    told: list[str] = []
    monkeypatch.setattr(directory, "tell", lambda phase, step=0, pid=None: told.append(phase))
    info = read_info(write_dataset(Path("data/toy")))
    placement = place(config.model_copy(update={"compile": False}))
    Trainer(config, info, directory, type(placement)(**{**vars(placement), "compiled": True})).run()
    directory.release()
    changes = [phase for phase, before in zip(told, [None, *told], strict=False) if phase != before]
    assert changes[:5] == ["starting", "compiling", "evaluating", "compiling", "training"]
    assert "compiling" not in changes[4:]
    assert changes[-1] == "saving"


def test_only_changes_are_written_and_no_short_phase(tmp_path: Path) -> None:
    clock = iter([0.0, 10.0, 10.01, 20.0, 20.01, 30.0, 90.0])
    teller = Teller(lambda: tmp_path, lambda: next(clock))

    def told(phase: Any, step: int) -> tuple[str, int]:
        teller.tell(phase, step)
        found = state.read_now(tmp_path)
        return found.phase, found.step

    assert told("training", 0) == ("training", 0)
    assert told("training", 1) == ("training", 0)
    assert told("evaluating", 2) == ("evaluating", 2)
    assert told("training", 3) == ("training", 3)  # the evaluation took a hundredth of a second
    assert told("evaluating", 4) == ("training", 3)
    assert told("training", 5) == ("training", 3)
    assert told("saving", 6) == ("saving", 6)
    assert told("training", 7) == ("training", 7)
    teller.end()
    assert list(tmp_path.iterdir()) == []
    teller.end()


def test_a_disk_that_takes_nothing_ends_no_run(tmp_path: Path) -> None:
    teller = Teller(lambda: tmp_path / "gone")
    teller.tell("training")
    teller.end()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "7", '{"phase": "resting"}', "\x00\xff", "[" * 5000, " " * 100_000],
)  # fmt: skip
def test_what_is_no_now_json_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "now.json").write_text(text, "latin-1")
    assert state.read_now(tmp_path) is None


def test_living_run_is_known_by_its_process_not_its_number(ended_process: int, tmp_path: Path) -> None:
    teller = Teller(lambda: tmp_path)
    teller.tell("saving", 3)
    found = state.read_now(tmp_path)
    assert (found.host, found.step, state.lives(found)) == (socket.gethostname(), 3, True)
    assert state.lives(found.model_copy(update={"pid": ended_process})) is False
    assert state.lives(found.model_copy(update={"process_began_s": found.process_began_s - 3600})) is False
    assert state.lives(found.model_copy(update={"host": ELSEWHERE})) is None
    assert state.lives(found.model_copy(update={"numbers": "another boot"})) is None


# -- which runs there are ----------------------------------------------------------------------------------


def test_runs_are_found_by_depth_alive_first_and_then_the_newest(tmp_path: Path) -> None:
    for age, name in enumerate(("a", "b", "d/e", "g/h/deep")):
        write_run(tmp_path / name)
        for file in (tmp_path / name).iterdir():
            os.utime(file, (1e9 - age, 1e9 - age))
    (tmp_path / "d/e/now.json").write_text("damaged")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    found = [run.path.relative_to(tmp_path).as_posix() for run in found_in([tmp_path], None)]
    assert found == ["d/e", "a", "b"]
    (tmp_path / "a" / "label.json").symlink_to("/etc/passwd")
    assert "a" not in [run.path.name for run in found_in([tmp_path], None)]


def test_runs_of_this_machine_are_found_by_their_locks(tmp_path: Path) -> None:
    run, listing, processes = write_run(tmp_path / "far" / "away" / "from" / "here"), tmp_path / "locks", tmp_path / "p"
    (processes / "12" / "fd").mkdir(parents=True)
    (processes / "12" / "fd" / "3").symlink_to(run.path / "run.lock")
    (processes / "12" / "fd" / "4").symlink_to("/dev/null")
    listing.write_text(
        "1: FLOCK  ADVISORY  WRITE 12 08:01:7 0 EOF\n2: POSIX  ADVISORY  READ 13 08:01:8 0 EOF\n"
        "3: FLOCK  ADVISORY  WRITE 99 08:01:7 0 EOF\nnothing\n"
    )
    assert held_here(listing, processes) == [run.path]
    assert held_here(tmp_path / "missing", processes) == []


def test_living_run_of_another_folder_is_found_unnamed(tmp_path: Path) -> None:
    if not Path("/proc/locks").exists():
        pytest.skip("this system lists no locks")
    directory = alive(tmp_path / "elsewhere" / "run")
    here = tmp_path / "here"
    here.mkdir()
    try:
        if directory.path not in held_here():
            pytest.skip("this kernel does not show its locks here")
        assert directory.path in [run.path for run in found_in([here])]
        assert found_in([here], None) == []
    finally:
        directory.release()


# -- a run as it is ----------------------------------------------------------------------------------------


def test_living_run_shows_phase_steps_and_memory_against_plan(tmp_path: Path) -> None:
    directory = alive(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text(
        line(0, step_s=0.5, tokens_per_s=9.0, elapsed_s=10.0, power_w=100.0, memory_bytes=3 * GIB)
        + line(10, step_s=0.5, tokens_per_s=128.0, mfu=0.2, elapsed_s=30.0, power_w=50.0, memory_bytes=2 * GIB,
               eta_s=1e6, loss=2.5)
        + '{"kind": "evaluation", "step": 11, "val_loss": 2.75}\n' + '{"kind": "step", "st'
    )  # fmt: skip
    try:
        run = seen(directory.path)
    finally:
        directory.release()
    assert (run.kind, run.name, run.where, run.phase, run.step, run.steps) == ("run", "run", "here", "training", 12, 12)
    assert (run.loss, run.val_loss, run.tokens_per_s, run.mfu) == (2.5, 2.75, 128.0, 0.2)
    assert run.memory_bytes == 2 * GIB
    assert run.planned_high_bytes >= run.planned_bytes
    assert 0.9e6 < run.eta_s <= 1e6
    grow_old(directory.path)
    ended = seen(directory.path)
    assert (ended.where, ended.phase, ended.status) == ("nowhere", "ended", "killed")
    assert ended.eta_s is None


def test_killed_run_has_ended_though_its_files_are_fresh(tmp_path: Path, ended_process: int) -> None:
    directory = write_run(tmp_path / "run", status="running")
    assert ObservedRun(directory.path).is_locked()  # by its files, as it does not say which process it is
    directory.tell("training", pid=ended_process)
    assert not ObservedRun(directory.path).is_locked()
    assert seen(directory.path).phase == "ended"


def test_run_of_another_machine_lives_while_its_files_change(tmp_path: Path) -> None:
    directory = alive(tmp_path / "run")
    directory.release()
    there = Now(phase="saving", since_s=time.time(), pid=1, process_began_s=0.0, host=ELSEWHERE)
    (tmp_path / "run" / "now.json").write_text(json.dumps(there.to_json(schema=state.NOW_SCHEMA)))
    run = seen(directory.path)
    assert (run.where, run.host, run.phase, run.pids) == ("elsewhere", ELSEWHERE, "saving", ())
    grow_old(directory.path)
    assert seen(directory.path).where == "nowhere"


def test_a_run_that_has_only_begun_is_starting(tmp_path: Path) -> None:
    directory = folder.create(str(tmp_path / "run"))
    directory.tell("starting")
    (found,) = found_in([tmp_path], None)
    try:
        assert seen(found.path).model_dump(include={"name", "phase", "where", "status"}) == {
            "name": "run", "phase": "starting", "where": "here", "status": "running",
        }  # fmt: skip
    finally:
        directory.release()
    assert found_in([tmp_path], None) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"id": "x"}', "\xff\x00", "[" * 5000])
def test_a_damaged_run_is_a_line_that_says_so(tmp_path: Path, text: str) -> None:
    directory = write_run(tmp_path / "run")
    (directory.path / "run.json").write_text(text, "latin-1")
    (directory.path / "metrics.jsonl").write_text(text + "\n" + text, "latin-1")
    run = seen(directory.path)
    assert (run.phase, run.where) == ("unreadable", "nowhere")
    assert str(directory.path) in run.problem
    shown = text_of(top_of([run]), width=300).splitlines()
    assert any(row.startswith("  run: ") and str(directory.path)[:60] in row for row in shown)


@pytest.mark.parametrize("name", ["plan.json", "metrics.jsonl", "label.json", "events.jsonl"])
def test_a_damaged_file_beside_the_record_only_takes_its_figures(tmp_path: Path, name: str) -> None:
    directory = alive(tmp_path / "run")
    (directory.path / name).write_bytes(b'{"kind": "step", "step": [1], "loss": "x", "eta_s": NaN}\n\xff[[[\n')
    try:
        run = seen(directory.path)
    finally:
        directory.release()
    assert (run.where, run.phase) == ("here", "training")
    assert (run.planned_bytes is None) == (name == "plan.json")
    assert (run.loss is None) == (name == "metrics.jsonl")


def test_a_watched_command_is_there_too(tmp_path: Path) -> None:
    path = tmp_path / "watch"
    path.mkdir()
    record = WatchedRun(
        id="watch",
        name="python train.py",
        command=("python", "train.py"),
        status="running",
        started_at="2026-01-01",
        interval_s=1.0,
    )
    directory = RunDirectory(path)
    directory.acquire()
    directory.write_record(record)
    directory.tell("running", pid=os.getpid())
    card = {"index": 0, "ours_bytes": 2 * GIB, "energy_j": 1000.0}
    for energy_j, elapsed_s in ((1000.0, 1.0), (1500.0, 2.0)):
        sample = {"elapsed_s": elapsed_s, "rss_bytes": GIB, "cards": [{**card, "energy_j": energy_j}, {"index": 1}]}
        directory.append("samples", sample)
    try:
        before = seen(path)
        directory.append("metrics", {"kind": "step", "step": 40, "loss": 3.5, "step_s": 0.1, "tokens_per_s": None})
        run = seen(path)
    finally:
        directory.release()
        grow_old(path)
    assert (before.kind, before.name, before.phase, before.step) == ("watched", "python train.py", "running", None)
    assert (run.phase, run.step, run.loss, run.memory_bytes) == ("training", 40, 3.5, 2 * GIB)
    assert seen(path).phase == "ended"


def test_a_trainers_run_is_there_too(tmp_path: Path) -> None:
    path = tmp_path / "foretrain"
    path.mkdir()
    record = TrainerRun(
        id="foretrain", name="sft", status="running", started_at="2026-01-01", trainer="SFTTrainer", device="cpu",
        kind="cpu", max_steps=100,
    )  # fmt: skip
    directory = RunDirectory(path)
    directory.acquire()
    directory.write_record(record)
    directory.tell("evaluating", 20)
    for step in (19, 20):
        directory.append("metrics", {"kind": "step", "step": step, "step_s": 2.0, "tokens": 512, "elapsed_s": step})
    directory.append("metrics", {"kind": "log", "step": 20, "loss": 1.25, "memory_bytes": GIB, "elapsed_s": 20.0})
    try:
        run = seen(path)
    finally:
        directory.release()
    assert (run.kind, run.phase, run.step, run.steps, run.loss) == ("trainer", "evaluating", 20, 100, 1.25)
    assert (run.tokens_per_s, run.memory_bytes) == (256.0, GIB)
    assert 150 < run.eta_s <= 160.0


# -- the end of a file -------------------------------------------------------------------------------------


def test_of_a_long_file_only_the_end_is_read(tmp_path: Path) -> None:
    directory = alive(tmp_path / "run")
    broken = '{"kind": "step", "st'
    (tmp_path / "run" / "metrics.jsonl").write_text(line(99) * 5000 + "x" * 200_000 + "\n" + line(7, loss=2.5) + broken)
    try:
        run = seen(directory.path)
    finally:
        directory.release()
    assert (run.step, run.loss) == (12, 2.5)


# -- cards and processes -----------------------------------------------------------------------------------


def test_a_card_says_what_runs_hold_of_its_memory(tmp_path: Path) -> None:
    directory = alive(tmp_path / "run")
    try:
        top = look(Cards(Rack([{os.getpid(): 4.0, os.getppid(): 2.5}, {}])), [tmp_path])
    finally:
        directory.release()
    first, second = top.cards
    assert (first.ours_bytes, first.used_bytes, second.ours_bytes) == (4 * GIB, 7.5 * GIB, 0)
    assert first.reasons == ("power_cap", "thermal")
    assert os.getpid() in top.runs[0].pids
    assert "(runs 4.00 GiB)" in text_of(top, 200)


def test_driver_that_lists_no_processes_is_not_guessed_at(tmp_path: Path) -> None:
    directory = alive(tmp_path / "run")
    try:
        top = look(Cards(Nvml(processes=False)), [tmp_path])
    finally:
        directory.release()
    assert top.cards[0].ours_bytes is None
    assert top.cards[0].used_bytes
    assert "(runs" not in text_of(top)


def test_a_card_that_says_nothing_is_a_name(tmp_path: Path) -> None:
    top = look(Cards(FakeNvml("NVIDIA T4", 16, 2560)), [tmp_path])
    assert [(card.name, card.busy, card.power_w) for card in top.cards] == [("NVIDIA T4", None, None)]
    assert "NVIDIA T4" in text_of(top)


def test_without_nvml_there_is_a_reason(tmp_path: Path) -> None:
    class Broken(FakeNvml):
        def nvmlInit(self) -> None:
            raise self.NVMLError("Driver Not Loaded")

    top = look(Cards(Broken("", 1, 1)), [tmp_path])
    assert (top.cards, top.no_cards, top.runs) == ((), "Driver Not Loaded", ())
    assert "No NVIDIA GPU: Driver Not Loaded" in text_of(top)


def test_ranks_of_a_run_count_as_one(tmp_path: Path) -> None:
    directory = alive(tmp_path / "run", world=2)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    rank = tmp_path / "run" / ".ranks" / "rank-1"
    rank.mkdir(parents=True)
    Teller(lambda: rank).tell("training", pid=child.pid)
    try:
        top = look(Cards(Rack([{os.getpid(): 4.0}, {child.pid: 3.0}])), [tmp_path])
    finally:
        directory.release()
        child.communicate(b"\n")
    assert [card.ours_bytes for card in top.cards] == [4 * GIB, 3 * GIB]
    assert top.runs[0].pids == (os.getpid(), child.pid)


# -- the picture -------------------------------------------------------------------------------------------

CARD = LiveCard(
    index=0, name="NVIDIA GeForce RTX 4070", driver="575.64", total_bytes=12 * GIB, used_bytes=10 * GIB,
    ours_bytes=7 * GIB, busy=0.98, clock_ghz=2.475, reasons=("power_cap", "thermal"), temperature_c=84, power_w=200.0,
)  # fmt: skip


def run_of(number: int, **changes: Any) -> LiveRun:
    values: dict[str, Any] = {
        "path": f"out-{number}", "kind": "run", "name": f"out-{number}", "where": "here", "phase": "training",
        "status": "running", "step": 1240, "steps": 5000, "loss": 3.2134, "val_loss": 3.4, "tokens_per_s": 12340.0,
        "mfu": 0.212, "memory_bytes": 7 * GIB, "planned_bytes": 8 * GIB, "eta_s": 252.0,
        "started_at": "2026-01-01T10:00:00+00:00",
    }  # fmt: skip
    return LiveRun(**{**values, **changes})


def top_of(runs: list[LiveRun], cards: list[LiveCard] | None = None, **more: Any) -> Top:
    return Top(
        at="2026-01-01T16:04:21+00:00", host="node7", runs=tuple(runs), cards=tuple(cards or ()),
        no_cards="" if cards else "NVML Shared Library Not Found", **more,
    )  # fmt: skip


def text_of(top: Top, width: int = 80, most: int = 60) -> str:
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        text.render(top_document(top, most), console)
    return capture.get()


ENDED = run_of(90, name="earlier", where="nowhere", phase="ended", status="interrupted")
DAMAGED = LiveRun(
    path="bad", kind="run", name="bad", where="nowhere", phase="unreadable", problem="run.json is " + "x" * 99
)
FAR = run_of(
    91, name="far", where="elsewhere", host=ELSEWHERE, phase="saving", phase_s=7.0, label=Label(tags=("sweep",))
)
FULL = [run_of(i, phase=phase, phase_s=75.0) for i, phase in enumerate(("training", "compiling", "evaluating"))]
TOPS = {
    "nothing": top_of([]),
    "mixed": top_of([*FULL, FAR, ENDED, DAMAGED], [CARD]),
    "many": top_of([run_of(i, name="a-long-name-of-a-folder-" * 9) for i in range(40)], [CARD] * 2, more_runs=7),
    "bare": top_of([LiveRun(path="r", kind="run", name="r", where="here", phase="starting")], [LiveCard(index=0, name="x")]),
}  # fmt: skip


@pytest.mark.parametrize("lang", messages.languages())
@pytest.mark.parametrize("width", [80, 40, 200])
@pytest.mark.parametrize("name", TOPS)
def test_a_picture_is_never_wider_than_its_terminal(name: str, width: int, lang: str) -> None:
    with messages.speaking(lang):
        shown = text_of(TOPS[name], width).splitlines()
    assert all(Console(width=999).measure(row).maximum <= width for row in shown)


def test_a_wide_terminal_shows_everything_of_a_run_and_a_card() -> None:
    shown = text_of(TOPS["mixed"], 200)
    for part in (
        "node7", "16:04:21", "runs: 3 here, 1 elsewhere", "NVIDIA GeForce RTX 4070", "10.00 of 12.00 GiB (runs 7.00 GiB)",
        "98.0% busy", "2.48 GHz", "slowed by power limit, heat", "84 °C", "200 W", "out-0", "training", "1,240 / 5,000",
        "4.2 min left", "3.2134", "12,340 tokens/s", "21.2%", "7.00 of 8.00 GiB planned", "compiling 1.2 min",
        f"saving 7 s, on {ELSEWHERE}", "far #sweep", "earlier", "stopped", "3.4000", "bad: run.json is",
    ):  # fmt: skip
        assert part in shown, part
    assert "training 1.2" not in shown  # how long is no news there
    for part in ("out-0", "compiling", "1,240 / 5,000", "4.2 min left", "7.00 of 8.00 GiB"):
        assert part in text_of(top_of(FULL), 80), part


def test_what_does_not_fit_is_counted() -> None:
    shown = text_of(TOPS["many"], 120, most=9)
    assert shown.count("4.2 min left") == 9
    assert "38 more runs" in shown


def test_no_run_says_how_to_start_one() -> None:
    text = text_of(TOPS["nothing"])
    assert "foretrain train baby" in text
    assert "No NVIDIA GPU" in text


def test_memory_beyond_the_plan_is_marked() -> None:
    styles = {}
    for held in (7, 9, 11):
        console = Console(width=120, force_terminal=True, color_system="standard", no_color=False)
        top = top_of([run_of(1, memory_bytes=held * GIB, planned_high_bytes=10 * GIB)], [CARD])
        with console.capture() as capture:
            text.render(top_document(top), console)
        (row,) = [row for row in capture.get().splitlines() if "planned" in row]
        styles[held] = "\x1b[33m" in row
    assert styles == {7: False, 9: False, 11: True}


def test_names_and_tags_of_others_stay_text() -> None:
    evil = f"{EVIL_NAME}\u202e\u2066\n[red]x[/red]\x9b2J"
    runs = [run_of(1, name=evil), run_of(2, label=Label(name=evil, tags=(evil[:40],)), host=evil, where="elsewhere")]
    runs.append(run_of(3, name=evil, where="nowhere", phase="unreadable", problem=evil))
    shown = text_of(top_of(runs, [CARD.model_copy(update={"name": evil, "driver": evil})]), width=200)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    assert "<img src=x" in shown
    assert "[red]" in text_of(top_of([run_of(1, name="[red]x[/red]")]))


# -- the command -------------------------------------------------------------------------------------------


def test_one_picture_and_one_object(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "run")
    once = foretrain("top", "runs", "--once", code=0)
    assert "finished" in once.stdout
    assert "\x1b" not in once.stdout
    piped = foretrain("top", "runs")
    assert (piped.returncode, "finished" in piped.stdout) == (0, True)
    told = json.loads(foretrain("top", "runs", "--json").stdout)
    assert (told["schema"], [run["name"] for run in told["runs"]]) == ("foretrain.run/1#top", ["run"])


def test_what_cannot_be_is_one_sentence() -> None:
    wrong = foretrain("top", "--interval", "0")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    missing = foretrain("top", "nowhere")
    assert (missing.returncode, missing.stderr.count("\n")) == (7, 1)


@pytest.fixture
def terminal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """(process, terminal) of `foretrain top` on a run, as somebody sits before it. The parameter: what TERM says."""
    write_run(tmp_path / "runs" / "run")
    pid, terminal = pty.fork()
    if pid == 0:
        term = getattr(request, "param", "xterm")
        environment = {**os.environ, "TERM": term, "PYTHONPATH": str(REPO), "LINES": "24", "COLUMNS": "80"}
        code = "from foretrain.cli import main; main()"
        os.execve(sys.executable, [sys.executable, "-c", code, "top", str(tmp_path / "runs")], environment)
    yield pid, terminal
    os.close(terminal)


def until(terminal: int, text: bytes) -> bytes:
    shown, end_s = b"", time.monotonic() + 120
    while text not in shown and time.monotonic() < end_s:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:
                break
    return shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_the_terminal_is_as_it_was(terminal: tuple[int, int], number: int) -> None:
    pid, screen = terminal
    assert b"\x1b[?1049h" in until(screen, b"finished")
    os.kill(pid, number)
    assert b"\x1b[?1049l" in until(screen, b"nothing more")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("terminal", ["dumb"], indirect=True)
def test_a_terminal_that_moves_nothing_gets_one_picture(terminal: tuple[int, int]) -> None:
    pid, screen = terminal
    shown = until(screen, b"nothing more")
    assert b"finished" in shown
    assert b"\x1b" not in shown
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize(("term", "live"), [("xterm", True), ("dumb", False), ("unknown", False)])
def test_progress_on_a_dumb_terminal_is_plain_lines(term: str, live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one of an editor, which would show the codes."""
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert Printer(quiet=False, max_iters=1).live is live
    assert rewrites_lines(terminal=True) is live
    assert not rewrites_lines(terminal=False)
