"""Trackers: what a run reports is what its own record says, and no tracker can stop, slow or spoil a run.

What needs a tracker's own library is skipped where that is not installed. The tests of failures bring a stand-in for
trackio, which a process of its own imports as it would the real one.
"""

import json
import os
import sqlite3
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import foretrain
from foretrain.app.training_session import without_secrets
from foretrain.base.errors import UserError
from foretrain.comparison.sources import load
from foretrain.comparison.sources.request import take_apart
from foretrain.config.resolve import resolve
from foretrain.runs import trackers
from foretrain.runs.folder import EvaluationMetrics, Note, RunDirectory, StepMetrics
from foretrain.runs.record import TrainedRun
from foretrain.runs.trackers import TRACKERS, asked_for, report
from foretrain.runs.trackers import tracker as names
from foretrain.runs.trackers.report import Report
from foretrain.runs.trackers.tracker import Job, Namer, Tracker, without_undone
from tests.kit.command import REPO, refused
from tests.kit.command import foretrain as command
from tests.kit.tiny import TINY, write_dataset

PLACES = {"trackio": "trackio/mine.db"}


@pytest.fixture(autouse=True)
def offline(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing leaves this machine, and nothing of the user's is written to."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(own_directory / "trackio"))
    monkeypatch.setenv("HOME", str(own_directory))


class Heard:
    """The notes that a run told. `stops_at`: the step at which it ends as by an error."""

    def __init__(self, stops_at: int = -1) -> None:
        self.notes: list[Note] = []
        self.stops_at = stops_at

    def __call__(self, event: Any) -> None:
        if isinstance(event, Note):
            self.notes.append(event)
        elif isinstance(event, StepMetrics) and event.step == self.stops_at:
            self.stops_at = -1
            raise Stopped

    def of(self, id: str) -> list[dict[str, Any]]:
        return [note.values for note in self.notes if note.id == id]


class Stopped(Exception):
    pass


def trained(report_to: str, heard: Heard | None = None, *, resume: bool = False, **more: Any) -> TrainedRun:
    dataset = str(write_dataset(Path("toy"))) + "/"
    options = {**TINY, "dtype": "float32", "dataset": dataset, "wandb_project": "mine", "report_to": report_to, **more}
    return foretrain.train(options, resume=resume, listen=heard or Heard())


def kept_by(tracker: str) -> Path:
    return Path(PLACES.get(tracker, f"out/{tracker}"))


def own_lines() -> list[dict[str, Any]]:
    return RunDirectory(Path("out")).read_lines("metrics")


def as_kept(tracker: str, value: float) -> float:
    """TensorBoard keeps float32, the others what they are given."""
    return struct.unpack("f", struct.pack("f", value))[0] if tracker == "tensorboard" else value


def need(tracker: str) -> type[Tracker]:
    found = TRACKERS[tracker]
    pytest.importorskip(found.package)
    return found


# -- each tracker's run, read back ---------------------------------------------------------------------------


@pytest.mark.parametrize("tracker", TRACKERS)
@pytest.mark.filterwarnings("ignore")  # of the trackers' libraries
def test_a_run_read_back_equals_its_record(tracker: str) -> None:
    """A run that was stopped at step 8 and resumed from step 5, so that three steps were reported twice."""
    need(tracker)
    heard = Heard(stops_at=8)
    with pytest.raises(Stopped):
        trained(tracker, heard)
    assert trained(tracker, heard, resume=True).status == "finished"
    (first, second) = (values["look"] for values in heard.of("tracker_started"))
    assert first
    assert second
    lines = own_lines()
    assert len(lines) == 12 + 4

    found = trackers.read(kept_by(tracker))
    step = names.STEP if tracker in ("wandb", "trackio") else "step"
    rows = without_undone(found.rows, step)
    wanted = [(line["step"], {name: as_kept(tracker, value) for name, value in Namer(None).named(line).items()})
              for line in lines]  # fmt: skip
    known = {*names.OF_STEP.values(), *names.OF_EVALUATION.values()}
    assert [(row[step], {name: row[name] for name in row if name in known}) for row in rows] == wanted
    assert found.is_ours
    assert found.config["n_embd"] == TINY["n_embd"]
    assert found.config["learning_rate"] == TINY["learning_rate"]
    assert found.config["compile"] is False

    subject, own = load(take_apart(f"x={kept_by(tracker)}")), load(take_apart("out"))
    assert subject.train.steps == own.train.steps
    assert subject.train.losses == tuple(as_kept(tracker, loss) for loss in own.train.losses)
    assert subject.val.steps == own.val.steps == (0, 5, 10, 12)
    assert subject.val.losses == tuple(as_kept(tracker, loss) for loss in own.val.losses)
    assert subject.tokens_per_step == own.tokens_per_step
    assert subject.config.model_dump(exclude={"dataset"}) == own.config.model_dump(exclude={"dataset"})  # one path

    explained = foretrain.explain(kept_by(tracker)).log
    assert (explained.first_step, explained.last_step, explained.steps) == (0, 11, 12)
    assert explained.losses.last_loss == as_kept(tracker, own.train.losses[-1])
    assert explained.losses.best_val_loss == min(as_kept(tracker, loss) for loss in own.val.losses)


@pytest.mark.filterwarnings("ignore")
def test_several_trackers_at_once_and_their_commands() -> None:
    need("tensorboard")
    need("trackio")
    write_dataset(Path("data/toy"))
    words = [f"--{key}={value}" for key, value in TINY.items()]
    done = command(
        "train", *words, "--report-to=trackio", "--report_to", "tensorboard", "--wandb-run-name=mine", apart=True
    )
    assert done.returncode == 0, done.stderr
    assert "tensorboard: tensorboard --logdir" in done.stderr
    assert "trackio: trackio show --project foretrain" in done.stderr
    assert json.loads(Path("out/trackers.json").read_text()) == {"trackio": "mine", "tensorboard": "tensorboard"}
    assert not list(Path("out").glob("tracker-*.log"))
    compared = command("compare", "a=out", "b=out/tensorboard", "c=trackio/foretrain.db", "--json", apart=True)
    assert compared.returncode in (0, 2), compared.stderr  # equal figures, so that two of them may be the same
    explained = command("explain", "out/tensorboard", apart=True)
    assert explained.returncode == 0, explained.stderr
    assert "12 steps, 0 to 11" in explained.stdout


SPY = """
import socket
asked = socket.socket.connect, socket.getaddrinfo
def note(address):
    if not isinstance(address, (str, bytes)) and str(address[0]) not in ("127.0.0.1", "::1", "localhost", "None"):
        open(__file__ + ".seen", "a").write(f"{address}\\n")
        raise OSError("the test has no network")
def connect(self, address):
    note(address)
    return asked[0](self, address)
def getaddrinfo(host, port, *more, **other):
    note((host, port))
    return asked[1](host, port, *more, **other)
socket.socket.connect, socket.getaddrinfo = connect, getaddrinfo
"""


@pytest.mark.parametrize("tracker", TRACKERS)
def test_nothing_leaves_this_machine_unless_asked(
    tracker: str, own_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the process of the tracker, whoever asks for an address of elsewhere is written down. A token invites to."""
    need(tracker)
    spy = own_directory / "spy" / "sitecustomize.py"
    spy.parent.mkdir()
    spy.write_text(SPY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(spy.parent), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    heard = Heard()
    trained(tracker, heard)
    assert heard.of("tracker_started")
    seen = Path(f"{spy}.seen")
    assert not seen.exists(), seen.read_text()


@pytest.mark.filterwarnings("ignore")
def test_wandb_without_a_key_stays_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    heard = Heard()
    assert trained("", heard, wandb_log=True).status == "finished"
    (kept,) = heard.of("tracker_offline")
    assert kept["check"] == "`wandb login`"
    assert kept["command"].startswith("wandb sync ")
    assert Path(kept["command"].removeprefix("wandb sync ")).is_dir()
    assert load(take_apart("x=out/wandb")).train.losses == load(take_apart("out")).train.losses


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_wandb_log_is_said() -> None:
    pytest.importorskip("wandb")
    trained("wandb")
    (file,) = Path("out/wandb").glob("*run-*/*.wandb")
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])  # as a kill leaves it: what was whole is read
    assert trackers.read(file).rows
    for at in (9, len(whole) // 2, len(whole) - 40):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        with refused(code=7, match="cannot be read as a run of wandb"):
            trackers.read(file)


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_event_file_is_said() -> None:
    pytest.importorskip("tensorboard")
    trained("tensorboard")
    (file,) = Path("out/tensorboard").iterdir()
    file.write_bytes(b"\x00" * 400)
    with refused(code=7):
        load(take_apart("x=out/tensorboard"))


TRAINER = """
import json, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        ids = (torch.arange(16) + i) % 50
        return {"input_ids": ids, "labels": ids}
config = GPT2Config(n_layer=1, n_head=1, n_embd=16, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0)
arguments = TrainingArguments("o", max_steps=12, logging_steps=2, eval_strategy="steps", eval_steps=4, use_cpu=True,
    report_to=[sys.argv[1]], per_device_train_batch_size=4, save_strategy="no", disable_tqdm=True, project="mine")
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Data(), eval_dataset=Data())
trainer.train()
print(json.dumps(trainer.state.log_history))
"""


@pytest.mark.slow
@pytest.mark.parametrize("tracker", TRACKERS)
@pytest.mark.filterwarnings("ignore")
def test_a_run_of_the_trainer_equals_its_history(tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers' own integration of each tracker has written."""
    need(tracker)
    pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, "-c", TRAINER, tracker], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    history = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{"))
    place = {"tensorboard": "o", "wandb": "wandb"}.get(tracker, PLACES.get(tracker, ""))
    subject, explained = load(take_apart(f"x={place}")), foretrain.explain(place).log
    for curve, key in ((subject.train, "loss"), (subject.val, "eval_loss")):
        wanted = [(entry["step"], as_kept(tracker, entry[key])) for entry in history if key in entry]
        assert list(zip(curve.steps, curve.losses, strict=True)) == wanted
    assert subject.config is None
    assert subject.step_s is not None or tracker == "trackio"  # which stamps several steps at once
    assert explained.last_step == 12
    assert explained.losses.last_val_loss == subject.val.losses[-1]
    rates = [entry["learning_rate"] for entry in history if "learning_rate" in entry]
    assert explained.learning_rate == as_kept(tracker, rates[-1])


# -- what fails stops nothing ----------------------------------------------------------------------------------

RUN = """
    import os, sys, time
    class Run:
        count = 0
        def log(self, values, step):
            self.count += 1
            {log}
        def finish(self):
            {finish}
    def init(**options):
        print("what a library prints on standard output")
        {init}
        return Run()
"""


@pytest.fixture
def stand_in(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A trackio that does what the test says, which the tracker's own process imports."""

    def make(*, init: str = "pass", log: str = "pass", finish: str = "pass") -> None:
        folder = own_directory / "libraries" / "trackio"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(textwrap.dedent(RUN).format(init=init, log=log, finish=finish))
        (folder / "sqlite_storage.py").write_text(
            "class SQLiteStorage:\n    @staticmethod\n    def get_runs(project): return []\n"
        )
        monkeypatch.syspath_prepend(folder.parent)
        path = filter(None, (str(folder.parent), os.environ.get("PYTHONPATH")))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))

    return make


def losses() -> list[float]:
    return [line["loss"] for line in own_lines() if line["kind"] == "step"]


@pytest.mark.parametrize(
    ("does", "id", "reason"),
    [
        ({"init": "raise RuntimeError('no room\\n for it')"}, "tracker_failed", "no room for it"),
        ({"init": "os._exit(9)"}, "tracker_failed", "exit code 9"),
        ({"log": "os._exit(9) if self.count == 3 else None"}, "tracker_failed", "exit code 9"),
        ({"finish": "raise ValueError"}, "tracker_failed", "ValueError"),
    ],
    ids=["at its start", "dies", "dies in the middle", "at its end"],
)
def test_a_tracker_that_fails_is_told_once(
    stand_in: Callable[..., None], does: dict[str, str], id: str, reason: str
) -> None:
    stand_in(**does)
    heard = Heard()
    assert trained("trackio", heard).status == "finished"
    (told,) = heard.of(id)
    assert reason in told["reason"]
    assert told["check"] == "`TRACKIO_SERVER_URL`, `TRACKIO_DIR`"
    assert [event["id"] for event in RunDirectory(Path("out")).read_lines("events")].count(id) == 1
    found = losses()
    trained("", out_dir="without")
    assert [
        line["loss"] for line in RunDirectory(Path("without")).read_lines("metrics") if line["kind"] == "step"
    ] == found


def test_what_fails_for_a_moment_is_tried_again(stand_in: Callable[..., None]) -> None:
    stand_in(log="open('logged', 'a').write('x')\n        if self.count == 2: raise OSError('for a moment')")
    heard = Heard()
    assert trained("trackio", heard).status == "finished"
    assert not heard.of("tracker_failed")
    assert Path("logged").read_text() == "x" * (16 + 1)


def test_a_tracker_that_hangs_is_not_waited_for(stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """It never begins: the queue fills, lines are counted that do not fit, and at the end its process is ended."""
    stand_in(init="time.sleep(600)")
    monkeypatch.setattr(report, "MOST_WAITING", 50)
    job = Job("mine", "name", Path().resolve(), {})
    line = StepMetrics(
        step=0, loss=1.0, grad_norm=1.0, learning_rate=1.0, step_s=1.0, tokens_per_s=1.0, mfu=None, memory_bytes=None,
        elapsed_s=1.0, eta_s=1.0,
    ).to_json()  # fmt: skip
    made = Report(TRACKERS["trackio"], job, Namer(None))
    for step in range(10_000):  # more than the pipe and the queue take
        made.hear({**line, "step": step})
    made.begin_end("finished")
    assert not made.ended(0.5)
    made.give_up()
    assert made.ended(30)
    told = {}
    while not made.events.empty():
        id, values = made.events.get()
        told[id] = values
    assert told["tracker_slow"]["tracker"] == "trackio"
    assert told["tracker_behind"]["count"] > 1000


def test_a_trackers_processor_time_is_known(stand_in: Callable[..., None]) -> None:
    """A run on a CPU tells of other programs, and its own trackers are none."""
    stand_in(init="sum(range(3 * 10**7))")
    made = Report(TRACKERS["trackio"], Job("mine", "name", Path().resolve(), {}), Namer(None))
    for _ in range(600):
        if made.processor_s > 0.1 or made.ended(0.05):
            break
    assert made.processor_s > 0.1
    made.begin_end("finished")
    assert made.ended(60)
    assert made.processor_s == 0  # the system counts it as this process's own from then on


def test_what_a_library_prints_is_not_part_of_the_answer(stand_in: Callable[..., None]) -> None:
    stand_in()
    write_dataset(Path("data/toy"))
    words = [f"--{key}={value}" for key, value in TINY.items()]
    done = command("train", *words, "--report_to=trackio", "--json", apart=True)
    assert json.loads(done.stdout)["status"] == "finished"
    assert "standard output" not in done.stderr


def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRACKERS["wandb"], "package", "a_library_that_nobody_has")
    heard = Heard()
    assert trained("wandb", heard).status == "finished"
    (told,) = heard.of("tracker_not_installed")
    assert told["command"] == "pip install 'foretrain[wandb]'"
    with refused(code=4, match=r"pip install 'foretrain\[wandb\]'"):
        TRACKERS["wandb"].read(Path("run-x.wandb"), None)


def test_no_tracker_by_default() -> None:
    heard = Heard()
    trained("", heard)
    assert not [note.id for note in heard.notes if "tracker" in note.id]
    assert not Path("out/trackers.json").exists()
    trained("none", heard, out_dir="other")
    assert not Path("other/trackers.json").exists()


# -- the words of the config -----------------------------------------------------------------------------------


def test_an_unknown_tracker_is_said_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean wandb"):
        asked_for("wanb")
    done = command("train", "baby", "--report-to=tensorbord")
    assert done.returncode == 2
    assert "did you mean tensorboard?" in done.stderr
    assert not Path("out-baby").exists()


def test_trackers_are_named_together_or_one_by_one() -> None:
    config = resolve(["--report-to=trackio", "--report_to", "tensorboard,wandb"]).config
    assert asked_for(config.report_to) == ("trackio", "tensorboard", "wandb")
    Path("c.toml").write_text('report_to = ["trackio", "wandb"]\n')
    assert asked_for(resolve(["c.toml"]).config.report_to) == ("trackio", "wandb")
    assert resolve(["c.toml", "--report-to=wandb"]).config.report_to == "wandb"  # the command line comes last
    Path("bad.toml").write_text("report_to = [1]\n")
    with pytest.raises(UserError, match="report_to"):
        resolve(["bad.toml"])
    assert asked_for("") == asked_for("none") == ()
    assert asked_for("Tensorboard wandb", wandb_log=True) == ("tensorboard", "wandb")


def test_every_extra_is_declared() -> None:
    import tomllib

    extras = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for name, tracker in TRACKERS.items():
        assert name in extras, name
        assert f"foretrain[{name}]" in tracker.install()


# -- names and figures -------------------------------------------------------------------------------------------


def step_line(step: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": "step", "step": step, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3, "step_s": 0.5,
        "tokens_per_s": 100.0, "mfu": None, "memory_bytes": 3 * 2**30, "elapsed_s": float(step), "eta_s": 1.0, **more,
    }  # fmt: skip


def test_memory_is_set_against_the_plan_and_energy_is_added_up() -> None:
    namer = Namer(4 * 2**30)
    assert namer.named(step_line(0, power_w=100.0))["train/memory_of_plan"] == 0.75
    assert "train/mfu" not in namer.named(step_line(1))  # the driver is asked once a second at most
    found = namer.named(step_line(10, power_w=300.0))
    assert found["train/energy_kwh"] == pytest.approx(10 * 200 / 3.6e6)  # a trapezoid
    assert namer.named(step_line(11))["train/energy_kwh"] == found["train/energy_kwh"]
    again = Namer(None)  # as a resumed run has it
    again.skip([step_line(0, power_w=100.0), step_line(10, power_w=300.0)])
    assert again.named(step_line(11))["train/energy_kwh"] == found["train/energy_kwh"]
    assert "train/memory_of_plan" not in again.named(step_line(12))


def test_figure_of_a_line_has_a_name_or_is_left_out_on_purpose() -> None:
    left_out = {"kind", "step", "eta_s", "best"}
    assert set(StepMetrics.model_fields) - left_out <= names.OF_STEP.keys()
    assert set(EvaluationMetrics.model_fields) - left_out == names.OF_EVALUATION.keys()


def test_steps_that_were_done_again_count_once() -> None:
    rows = [{"s": 0, "eval/loss": 1}, {"s": 0, "l": 1}, {"s": 1, "l": 2}, {"s": 2, "eval/loss": 3}, {"s": 2, "l": 4},
            {"s": 3, "l": 5}, {"s": 2, "l": 6}, {"s": 3, "l": 7}]  # fmt: skip
    kept = without_undone(rows, "s")
    assert [row.get("l", row.get("eval/loss")) for row in kept] == [1, 1, 2, 3, 6, 7]


# -- files that no library of theirs is needed for -----------------------------------------------------------------


def metric(run: str, loss: float, step: int) -> tuple[str, int, str]:
    """A row of trackio's: ten more for run b."""
    return run, step, json.dumps({"train/loss": loss + 10 * (run == "b")})


def trackio_database(path: Path, *rows: tuple[str, int, str]) -> None:
    """The tables that trackio 0.43 makes, as far as runs and metrics go. A row: run, step, its metrics as JSON."""
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_id, timestamp, run_name, step, metrics)")
        base.execute("CREATE TABLE configs (id INTEGER PRIMARY KEY, run_id, run_name, config)")
        for run, step, metrics in rows:
            at = f"2026-01-01T{step // 3600:02d}:{step // 60 % 60:02d}:{step % 60:02d}+00:00"
            base.execute("INSERT INTO metrics VALUES (NULL, ?, ?, ?, ?, ?)", (run, at, run.upper(), step, metrics))


def test_of_several_runs_one_is_chosen() -> None:
    trackio_database(Path("two.db"), *(metric(run, 1.0 + step, step) for run in "ab" for step in (1, 2, 3)))
    with refused(code=2, match=r"several runs \(A, B\)"):
        load(take_apart("two.db"))
    assert load(take_apart("two.db+run=B")).train.losses == (12.0, 13.0, 14.0)
    assert load(take_apart("two.db+run=a")).train.losses == (2.0, 3.0, 4.0)
    assert foretrain.explain("two.db+run=B").log.losses.last_loss == 14.0
    assert "say which one, such as two.db+run=B" in command("explain", "two.db").stderr


def test_a_report_of_what_a_tracker_keeps() -> None:
    """One HTML file, outside the tracker's folder, with the losses of the run that is asked for."""
    trackio_database(Path("two.db"), *(metric(run, 1.25 + step, step) for run in "ab" for step in (1, 2, 3)))
    made = command("report", "two.db+run=B", "--json")
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    assert found["kind"] == "log"
    page = Path(found["path"]).read_text("utf-8")
    assert "14.2500" in page
    assert "4.2500" not in page.replace("14.2500", "")


def test_a_trainers_run_in_trackio() -> None:
    text = '{"train/loss": 4.STEP, "train/global_step": STEP0, "text": [1]}'
    trackio_database(Path("p.db"), *(("x", step, text.replace("STEP", str(step))) for step in (1, 2, 3)))
    subject = load(take_apart("p.db"))
    assert subject.train.steps == (10, 20, 30)
    assert subject.train.losses == (4.1, 4.2, 4.3)
    assert subject.step_s.expected_s == pytest.approx(0.1)


@pytest.mark.parametrize("text", ["{", "[1]", "null", "[" * 10_000])
def test_damaged_metrics_of_trackio_are_said(text: str) -> None:
    trackio_database(Path("p.db"), *(("x", step, text) for step in (1, 2, 3)))
    with refused(code=7):
        load(take_apart("p.db"))


def test_damaged_databases_are_said() -> None:
    trackio_database(Path("whole.db"), *(metric("r", 1.0, step) for step in range(2000)))
    whole = Path("whole.db").read_bytes()
    for name, data in (("cut", whole[: len(whole) // 2]), ("zeros", whole[:100] + b"\x00" * 9000),
                       ("flipped", whole[:4096] + b"\xff" * (len(whole) - 4096))):  # fmt: skip
        Path(f"{name}.db").write_bytes(data)
        done = command("compare", f"{name}.db", "whole.db")
        assert done.returncode == 7, (name, done.stderr)
        assert f"{name}.db: cannot be read as a run of" in done.stderr
    with sqlite3.connect("empty.db") as base:
        base.execute("CREATE TABLE something (a)")
    assert command("compare", "empty.db", "whole.db").returncode == 7


def test_a_view_without_end_is_not_read() -> None:
    """A file of others may define its tables as it likes."""
    with sqlite3.connect("hostile.db") as base:
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS key, i AS value, " \
                  "i AS run_uuid, i AS step FROM n"  # fmt: skip
        base.execute(f"CREATE VIEW metrics AS {endless}")
    assert trackers.keeper_of(Path("hostile.db")) is None


def test_a_password_in_an_address_is_not_reported() -> None:
    assert without_secrets("https://me:secret@host/set?X-Signature=abc") == "https://host/set"
    assert without_secrets("s3://bucket/set") == "s3://bucket/set"
    assert without_secrets("my data/set") == "my data/set"


def test_a_folder_that_goes_while_it_is_searched_is_no_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    glob = Path.glob

    def gone(path: Path, pattern: str) -> Iterator[Path]:
        if "tfevents" in pattern:
            raise FileNotFoundError(2, "No such file or directory", "/proc/7")
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", gone)
    ended = command("explain", str(tmp_path))
    assert ended.stderr.startswith(f"error: {tmp_path}: cannot be read")
