"""Runs as a user starts them: killed and resumed, stopped by signals, in a busy directory, diverging."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.analysis.forecast_check import check_forecast, plan_of
from foretrain.app.training_session import prepare_data
from foretrain.base.errors import ExitCode, UserError
from foretrain.config import checks
from foretrain.config.checks import effect_of
from foretrain.config.options import OPTIONS
from foretrain.config.resolve import from_values, resolve
from foretrain.data.dataset import read_info
from foretrain.model.graphed import WARM_STEPS
from foretrain.model.step import train_step
from foretrain.runs import folder
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import SCHEMA
from foretrain.training import checkpoint, cpu_threads, trainer
from foretrain.training.device import place
from foretrain.training.meter import Meter
from foretrain.training.trainer import Trainer
from tests.kit.command import REPO, foretrain, refused
from tests.kit.tiny import TINY, tiny, write_dataset
from tests.kit.training import AsAlways, assert_same, final_tensors, rewrite, stop_at_6, train

# A child that trains and, at a given moment, is gone as if the power was cut: no handler runs.
KILLED_CHILD = """
import os, signal, sys
sys.path.insert(0, {repo!r})
from pathlib import Path
from foretrain.training import checkpoint, trainer
from tests.kit.tiny import tiny
from tests.kit.training import train
moment, at = sys.argv[1], int(sys.argv[2])
def die(): os.kill(os.getpid(), signal.SIGKILL)
if moment == "step":
    original = trainer.train_step
    count = 0
    def step(*args):
        global count
        result = original(*args)
        count += 1
        if count == at: die()
        return result
    trainer.train_step = step
elif moment == "evaluation":
    original = trainer.evaluation_loss
    count = 0
    def evaluation(*args):
        global count
        count += 1
        if count == at: die()
        return original(*args)
    trainer.evaluation_loss = evaluation
elif moment == "save":
    from foretrain.base import files as durable
    count = 0
    def watch(call, path, size):
        global count
        count += call == "open"
        if count == at: die()
    durable.watch(watch)
train(tiny(dropout=0.1, out_dir="killed"), resume=Path("killed/run.json").exists())
"""

# 12 steps, evaluations (of 2 splits x 2 batches) at 0, 5, 10 and 12, saves of 5 files at 5, 10 and 12.
MOMENTS = [("step", 6), ("evaluation", 7), ("save", 2)]  # by the hundred at any moment: tests/faults


@pytest.mark.fault(
    "`kill -9`, also inside a save", row="B.3",
    sees="nothing; `--resume auto` goes on",
    safe="everything up to the last checkpoint, bit for bit",
)  # fmt: skip
@pytest.mark.parametrize(("moment", "at"), MOMENTS)
def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(moment: str, at: int) -> None:
    """Weights, both moments, step counts and the generator of dropout, after kill -9 and --resume."""
    train(tiny(dropout=0.1, out_dir="whole"))
    command = [sys.executable, "-c", KILLED_CHILD.format(repo=str(REPO)), moment, str(at)]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == -signal.SIGKILL, first.stderr
    assert RunDirectory(Path("killed")).read_record().status == "killed"
    record = train(tiny(dropout=0.1, out_dir="killed"), resume=True)
    assert record.status == "finished"
    assert_same(final_tensors(Path("whole")), final_tensors(Path("killed")))
    # The metrics tell each step and evaluation once, with the same losses.
    whole, killed = (RunDirectory(Path(name)).read_lines("metrics") for name in ("whole", "killed"))
    assert [(m["kind"], m["step"], m.get("loss"), m.get("val_loss")) for m in whole] == [
        (m["kind"], m["step"], m.get("loss"), m.get("val_loss")) for m in killed
    ]


@pytest.mark.parametrize("stop_at", [1, 4, 5, 11])
def test_stopped_by_a_signal_saves_and_resumes_exactly(stop_at: int) -> None:
    """SIGTERM after any step: that step is finished, the state saved, and nothing is done twice."""
    train(tiny(dropout=0.1, out_dir="whole"))

    def send(event: Any) -> None:
        if getattr(event, "kind", "") == "step" and event.step + 1 == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    record = train(tiny(dropout=0.1, out_dir="stopped"), listen=send)
    assert (record.status, record.reason, record.steps_done) == ("interrupted", "SIGTERM", stop_at)
    record = train(tiny(dropout=0.1, out_dir="stopped"), resume=True)
    assert record.resumed_from == (stop_at,)
    assert_same(final_tensors(Path("whole")), final_tensors(Path("stopped")))


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1"])
def test_exit_code_75_and_resume_from_the_command_line(name: str) -> None:
    write_dataset(Path("data/toy"), tokens=20_000)
    words = [f"--{k}={v}" for k, v in TINY.items()] + ["--max_iters=100000", "--lr_decay_iters=100000"]
    command = [sys.executable, "-c", "from foretrain.cli import main; main()", "train", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        for _ in range(600):
            time.sleep(0.1)
            if Path("out/metrics.jsonl").exists() and Path("out/metrics.jsonl").stat().st_size > 2000:
                break
        child.send_signal(getattr(signal, name))
        out, err = child.communicate(timeout=600)
    assert child.returncode == ExitCode.STOPPED, err
    assert "--resume auto" in out
    assert "Traceback" not in err
    record = RunDirectory(Path("out")).read_record()
    assert record.status == "interrupted"
    foretrain("train", *words, f"--max_iters={record.steps_done + 3}", "--resume", "auto", code=0)
    assert RunDirectory(Path("out")).read_record().steps_done == record.steps_done + 3


def test_a_run_is_a_directory() -> None:
    write_dataset(Path("data/toy"))
    words = [f"--{k}={v}" for k, v in TINY.items()]
    result = foretrain("train", *words, "--json", code=0)
    record = json.loads(result.stdout)
    assert record["schema"] == "foretrain.run/1"
    assert record["status"] == "finished"
    assert record["steps_done"] == 12
    assert record["val_loss"] < record["first_val_loss"] - 0.5
    names = {p.name for p in Path("out").iterdir()}
    assert {
        "run.json",
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "events.jsonl",
        "plan.json",
        "checkpoints",
    } <= names
    # The config that was written starts the same run again, and nothing is overwritten.
    again = foretrain("train", "out/config.toml", "--json")
    assert json.loads(again.stdout)["id"] == "out-2"
    assert_same(final_tensors(Path("out")), final_tensors(Path("out-2")))
    listed = json.loads(foretrain("runs", "--json").stdout)
    assert [run["path"] for run in listed["runs"]] == ["out", "out-2"]
    assert "finished" in foretrain("runs").stdout


def test_measured_memory_agrees_with_the_plan() -> None:
    write_dataset(Path("data/toy"))
    words = {**TINY, "n_embd": 128, "block_size": 64, "vocab_size": 512}
    foretrain("train", *[f"--{k}={v}" for k, v in words.items()], apart=True, code=0)
    record = RunDirectory(Path("out")).read_record()
    comparison = check_forecast(plan_of(Path("out"), record), record)
    rows = {row.id: row for row in comparison.memory}
    assert {"component.weights", "component.gradients", "component.optimizer", "component.saved", "phase.evaluate_first",
            "phase.first_step", "phase.steady_step", "phase.evaluate_steady"} <= set(rows)  # fmt: skip
    for id, row in rows.items():
        if not id.startswith("process"):
            assert abs(row.error) < 0.01, (id, row.error)
    assert {row.id for row in comparison.time} == {"time.step", "time.evaluation", "time.run"}


def test_second_run_in_a_busy_directory_is_refused() -> None:
    record = train(tiny())
    directory = RunDirectory(Path("out"))
    directory.write_record(record.model_copy(update={"status": "running"}))
    directory.acquire()
    try:
        assert RunDirectory(Path("out")).read_record().status == "running"
        result = foretrain("train", *[f"--{k}={v}" for k, v in TINY.items()], "--resume", "auto", code=2)
        assert "another process is training" in result.stderr
        assert folder.create("out").id == "out-2"
    finally:
        directory.release()
    assert RunDirectory(Path("out")).read_record().status == "killed"


@pytest.mark.parametrize("interval", [1, 3])
def test_losses_read_late_are_the_same_losses(interval: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card a loss is read when the next step is under way; here a CPU's trainer is told to do so."""
    order = []
    monkeypatch.setattr(trainer, "train_step", lambda *words: order.append("step") or train_step(*words))

    def run(out: str, late: bool) -> list[tuple[Any, ...]]:
        info = read_info(write_dataset(Path("data/toy")))
        config = tiny(out_dir=out, log_interval=interval)
        directory = folder.create(out)
        own = Trainer(
            config,
            info,
            directory,
            place(config),
            lambda e: order.append("logged" if getattr(e, "kind", "") == "step" else "note"),
        )
        own.reads_late = late
        record = own.run()
        directory.release()
        assert record.status == "finished"
        lines = [json.loads(line) for line in (directory.path / "metrics.jsonl").read_text().splitlines()]
        return [(m["step"], m.get("loss"), m.get("grad_norm"), m.get("val_loss")) for m in lines]

    plain = run("plain", late=False)
    steps_before_first_line = order.index("logged")
    order.clear()
    assert run("late", late=True) == plain
    assert order.index("logged") == steps_before_first_line + 1


def test_a_loss_read_late_saves_nothing_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step before an evaluation gives no number: that is said, and nothing is saved any more."""

    def step(state: Any, *words: Any) -> Any:
        result = train_step(state, *words)
        bad = own.progress.step == 4
        return type(result)(result.loss * float("nan"), result.grad_norm) if bad else result

    monkeypatch.setattr(trainer, "train_step", step)
    config, directory = tiny(), folder.create("out")
    own = Trainer(config, read_info(write_dataset(Path("data/toy"))), directory, place(config))
    own.reads_late = True
    with pytest.raises(UserError, match="diverged"):
        own.run()
    assert checkpoint.steps_in(directory.checkpoints) == []
    assert directory.read_record().status == "diverged"
    directory.release()


def test_out_of_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.54 GiB.")

    monkeypatch.setattr(trainer, "train_step", no_memory)
    with refused(code=ExitCode.OUT_OF_MEMORY) as caught:
        train(tiny())
    assert "micro-batch of one sequence" in str(caught.value)
    assert RunDirectory(Path("out")).read_record().status == "failed"


def test_a_bug_shows_itself_and_the_record_says_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "train_step", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tiny())
    assert RunDirectory(Path("out")).read_record().reason == "ZeroDivisionError"


def test_a_resume_that_makes_no_step_keeps_what_was_measured() -> None:
    """Stopped after the last step, before the last evaluation: the process that evaluates has no step to measure."""

    def stop(event: Any) -> None:
        if getattr(event, "kind", "") == "step" and event.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    before = train(tiny(max_iters=8, lr_decay_iters=8, log_interval=1), listen=stop)
    assert (before.status, before.steps_done) == ("interrupted", 8)
    assert before.step_s
    assert before.memory.phase("steady_step")
    after = train(tiny(max_iters=8, lr_decay_iters=8, log_interval=1), resume=True)
    assert (after.status, after.steps_done, after.resumed_from) == ("finished", 8, (8,))
    for name in ("step_s", "tokens_per_s", "mfu", "data_wait_s"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.val_loss is not None
    assert after.memory.phase("evaluate_first")
    for phase in ("first_step", "steady_step"):
        assert after.memory.phase(phase) == before.memory.phase(phase)
    assert after.memory.gradients_bytes == before.memory.gradients_bytes
    assert (after.memory.process_peak_bytes or 0) >= (before.memory.process_peak_bytes or 0)


def test_resume_refuses_what_would_change_the_learning() -> None:
    train(tiny(), listen=stop_at_6)
    with refused("usage.resume_changed") as caught:
        train(tiny(learning_rate=2e-2, batch_size=8), resume=True)
    assert "learning_rate: 0.01 → 0.02" in str(caught.value)
    record = train(tiny(max_iters=14, eval_interval=7, log_interval=3), resume=True)
    assert record.steps_done == 14


def test_resume_refuses_fewer_steps_than_are_done() -> None:
    before = train(tiny(), listen=stop_at_6)
    config = Path("out/config.toml")
    config.write_text("max_iters = 12\n")  # as the command line writes it
    with refused("usage.resume_beyond", code=2) as caught:
        train(tiny(max_iters=3), resume=True)
    assert f"step {before.steps_done} is done already, beyond max_iters = 3" in str(caught.value)
    assert config.read_text() == "max_iters = 12\n"
    assert train(tiny(), resume=True).steps_done == 12


@pytest.mark.fault(
    "another config on resume", row="B.3",
    sees="nothing, a note, or exit code 2 with what changed",
    safe="everything: the table below lists every option",
)  # fmt: skip
@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", 5), ("dropout", 0.2), ("beta2", 0.9), ("optimizer", "adamw8bit"), ("grad_clip", 0.5), ("bias", True),
     ("cpu_threads", 2), ("loss_chunk_size", 8), ("eval_iters", 3), ("eval_interval", 3), ("keep_checkpoints", 5),
     ("on_nonfinite", "skip"), ("price_per_kwh", 1.0)],
)  # fmt: skip
def test_a_changed_knob_is_free_or_warns_or_refuses(key: str, value: Any) -> None:
    train(tiny(max_iters=3, lr_decay_iters=12))
    changed = tiny(**{"max_iters": 4, "lr_decay_iters": 12, key: value})
    effect, notes = effect_of(key), []
    if effect == "refuses":
        with refused("usage.resume_changed") as caught:
            train(changed, resume=True)
        assert f"{key}: " in str(caught.value)
        return
    train(changed, resume=True, listen=notes.append)
    told = [note for note in notes if getattr(note, "id", "") in ("resumed_otherwise", "evaluation_changed")]
    assert [key in str(note.values["changed"]) for note in told] == [True] * (effect == "warns")


@pytest.mark.fault(
    "a resume with other cores or another OMP_NUM_THREADS", row="B.3",
    sees="nothing: the run keeps its number of threads; a note where there are fewer cores",
    safe="everything, bit for bit while there are as many cores",
)  # fmt: skip
def test_a_resume_takes_as_many_threads_as_the_run_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over another number of threads round differently: tensors of this size already."""
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 4)
    torch.set_num_threads(2)
    train(tiny(dropout=0.1, n_embd=64, out_dir="whole"))
    train(tiny(dropout=0.1, n_embd=64), listen=stop_at_6)
    torch.set_num_threads(1)  # as OMP_NUM_THREADS=1 has it, or one core that is left
    notes: list[Any] = []
    record = train(tiny(dropout=0.1, n_embd=64), resume=True, listen=notes.append)
    assert (record.threads, torch.get_num_threads()) == (2, 2)
    assert_same(final_tensors(Path("whole")), final_tensors(Path("out")))
    assert "resumed_otherwise" not in [getattr(note, "id", "") for note in notes]


def test_fewer_cores_on_resume_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    train(tiny(), listen=stop_at_6)
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 1)
    notes: list[Any] = []
    assert train(tiny(), resume=True, listen=notes.append).threads == 1
    assert [n.values["changed"] for n in notes if getattr(n, "id", "") == "resumed_otherwise"] == [
        ["cpu_threads: 2 → 1"]
    ]


def test_a_resume_tells_of_graphs_by_what_the_option_comes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto and off are the same here, as they are on a card where blocks are large."""
    told: list[list[str]] = []
    for steps, value in ((3, "off"), (4, "auto"), (5, "on"), (6, "on")):
        notes: list[Any] = []
        train(tiny(max_iters=steps, lr_decay_iters=12, cuda_graph=value), resume=steps > 3, listen=notes.append)
        told += [n.values["changed"] for n in notes if getattr(n, "id", "") == "resumed_otherwise"]
        monkeypatch.setattr(checks, "is_one_graph", lambda config, *_: config.cuda_graph == "on")
    assert told == [["cuda_graph: off → on"]]


@pytest.mark.parametrize(("max_iters", "at"), [(6, WARM_STEPS), (WARM_STEPS, 1)])
def test_memory_of_a_graph_is_that_of_the_recorded_step(
    max_iters: int, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays for the rest of the run; a run that ends before has the memory of an ordinary step."""
    seen: dict[str, int] = {}
    made: list[AsAlways] = []
    phase = Meter.phase

    def measured(self: Meter, name: str, state: Any) -> Any:
        if self.wants(name):
            seen[name] = made[0].done
        return phase(self, name, state)

    monkeypatch.setattr(Meter, "phase", measured)
    monkeypatch.setattr(trainer, "graphed_step", lambda state, *_: made.append(AsAlways(state)) or made[-1])
    record = train(tiny(max_iters=max_iters))
    assert (seen["first_step"], seen["steady_step"]) == (0, at)
    assert record.memory.gradients_bytes
    assert record.memory.saved_bytes


def test_what_a_resume_refuses_is_what_decides_learning() -> None:
    """The two are said one by one, and agree but for what another draw of the same noise or the start decides."""
    for option in OPTIONS.values():
        refused = effect_of(option.name) == "refuses"
        start, evaluated = ("init_from", "init_optimizer"), ("eval_block_size", "eval_only")
        learned = "learning" in option.affects and option.name not in (*start, *evaluated)
        assert refused == (learned or option.name == "seed"), option.name


@pytest.mark.fault(
    "another PyTorch or device on resume", row="B.3", sees="a note: no longer bit for bit", safe="everything"
)
def test_another_torch_is_told() -> None:
    train(tiny(max_iters=3, lr_decay_iters=12))
    path = Path("out/checkpoints/step-0000000003")
    state = json.loads((path / "state.json").read_text())
    rewrite(path, "state.json", json.dumps({**state, "torch": "1.0"}).encode())
    notes: list[Any] = []
    train(tiny(max_iters=4, lr_decay_iters=12), resume=True, listen=notes.append)
    assert [n.values["changed"] for n in notes if getattr(n, "id", "") == "resumed_otherwise"] == [
        [f"torch: 1.0 → {torch.__version__}"]
    ]


def test_resume_refuses_other_data() -> None:
    write_dataset(Path("data/toy"))
    meta = {"dtype": "uint16", "vocab_size": 96, "fingerprint": "one"}
    Path("data/toy/meta.json").write_text(json.dumps(meta))
    train(tiny(), listen=stop_at_6)
    Path("data/toy/meta.json").write_text(json.dumps({**meta, "fingerprint": "two"}))
    with refused("data.changed"):
        train(tiny(), resume=True)


def test_evaluation_settings_do_not_move_training() -> None:
    """In nanoGPT they do: changing eval_interval changes the data that is trained on."""
    train(tiny(dropout=0.1, out_dir="a"))
    train(tiny(dropout=0.1, out_dir="b", eval_interval=3, eval_iters=5, eval_batch_size=7, eval_block_size=8))
    assert_same(final_tensors(Path("a")), final_tensors(Path("b")))


def test_best_is_kept_and_only_improvements_are_saved() -> None:
    record = train(tiny(always_save_checkpoint=False, keep_checkpoints=1))
    steps = checkpoint.steps_in(Path("out/checkpoints"))
    best = min(
        (m for m in RunDirectory(Path("out")).read_lines("metrics") if m["kind"] == "evaluation"),
        key=lambda m: m["val_loss"],
    )
    assert best["val_loss"] == record.best_val_loss
    assert set(steps) == {12, best["step"]}


def test_no_gpu_is_a_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    write_dataset(Path("data/toy"))
    words = {**TINY, "device": "cuda"}
    foretrain("train", *[f"--{k}={v}" for k, v in words.items()], code=ExitCode.ENVIRONMENT, says="--device=cpu")


def test_unwritable_directory_is_a_sentence() -> None:
    write_dataset(Path("data/toy"))
    Path("file").write_text("")
    result = foretrain(
        "train", *[f"--{k}={v}" for k, v in TINY.items()], "--out_dir=file/run", code=ExitCode.ENVIRONMENT
    )
    assert "cannot be written" in result.stderr


def test_compiled_equals_eager() -> None:
    """torch.compile on the CPU, where a C++ compiler is at hand: the same losses up to rounding."""
    if not place(tiny(compile=True)).compiled:
        pytest.skip("no C++ compiler here")
    a = train(tiny(out_dir="a", n_layer=1, max_iters=4, lr_decay_iters=4))
    b = train(tiny(out_dir="b", n_layer=1, max_iters=4, lr_decay_iters=4, compile=True))
    assert b.compiled
    assert b.val_loss == pytest.approx(a.val_loss, rel=1e-4)


def test_without_a_compiler_training_goes_on_in_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    placement = place(tiny(compile=True))
    assert not placement.compiled
    assert placement.notes[0][0] == "no_compile"


def test_vocabulary_is_taken_from_the_dataset() -> None:
    path = write_dataset(Path("data/toy"))
    (path / "meta.json").write_text(json.dumps({"dtype": "uint16", "vocab_size": 96}))
    values = {k: v for k, v in TINY.items() if k != "vocab_size"}
    resolved, _ = prepare_data(from_values(values))
    assert resolved.config.vocab_size == 96
    with refused("data.vocab_too_small"):
        prepare_data(from_values({**values, "vocab_size": 95}))


def test_missing_published_weights_are_explained_before_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", "no-cache")
    foretrain("train", "--init_from=gpt2", "--device=cpu", code=ExitCode.ENVIRONMENT, says="init_from = ./gpt2")
    assert resolve(["--init_from=gpt2"]).config.n_embd == 768


def test_a_damaged_record_is_a_sentence() -> None:
    Path("bad").mkdir()
    for text in ("", "{", "[]", '{"id": 3}', "\x00"):
        Path("bad/run.json").write_text(text)
        result = foretrain("compare", "bad")
        assert result.returncode == ExitCode.DATA, text
    assert foretrain("runs").returncode == 0  # one bad run does not hide the others


@pytest.mark.parametrize("out_dir", ["/", ".", "..", "../..", "/dev/null", "x" * 300 + "/y"])
def test_folders_that_no_run_can_have(out_dir: str, own_directory: Path) -> None:
    with refused(code=ExitCode.ENVIRONMENT):
        folder.create(out_dir)
    assert not list(own_directory.iterdir())


def test_a_folder_with_anything_in_it_is_left_alone(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("out").mkdir()
    Path("out/ckpt.pt").write_text("precious")
    directory = folder.create("out")
    directory.release()
    assert directory.id == "out-2"
    assert [p.name for p in Path("out").iterdir()] == ["ckpt.pt"]
    monkeypatch.setenv("HOME", str(own_directory / "home"))
    directory = folder.create("~/runs/a")
    directory.release()
    assert directory.path == own_directory / "home" / "runs" / "a"


@pytest.mark.parametrize("value", ["", "a\nb", "a\x1b[2Jb", "a\x00b"])
def test_names_that_could_command_a_terminal(value: str) -> None:
    with pytest.raises(UserError):
        from_values({"out_dir": value})
    with pytest.raises(UserError):
        from_values({"dataset": value})


@pytest.mark.fault(
    "WORLD_SIZE without RANK, whatever it says", row="B.5", sees="exit code 4", safe="everything: nothing has begun"
)
def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    foretrain("train", "baby", code=ExitCode.ENVIRONMENT, says="torchrun")


def test_a_terminal_of_another_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.delenv("HOME", raising=False)
    result = foretrain("plan", "gpt2-124m", "--gpu", "4070", "--full", code=0)
    assert "123.59 M" in result.stdout


def test_a_finished_run_goes_on_when_max_iters_is_raised() -> None:
    train(tiny(max_iters=6, out_dir="r", decay_lr=False))
    record = train(tiny(max_iters=9, out_dir="r", decay_lr=False), resume=True)
    assert (record.steps_done, record.resumed_from) == (9, (6,))
    assert resolve(["r/config.toml"]).config.max_iters == 9
    train(tiny(max_iters=9, out_dir="whole", decay_lr=False))
    assert_same(final_tensors(Path("r")), final_tensors(Path("whole")))
    assert folder.newest_unfinished("r", 9) is None


def test_resume_finds_a_run_behind_a_gap() -> None:
    for _ in range(3):
        directory = folder.create("r")
        (directory.path / "run.json").write_text("{}")
        directory.release()
    train(tiny(max_iters=4, out_dir="whole"))
    for name in ("r", "r-3"):
        shutil.rmtree(name)
    (Path("r-2") / "run.json").write_text((Path("whole") / "run.json").read_text())
    found = folder.newest_unfinished("r", 99)
    assert found.path.name == "r-2"


def test_other_config_is_refused_before_the_first_checkpoint() -> None:
    record = train(tiny(max_iters=4, out_dir="r"))
    shutil.rmtree("r/checkpoints")
    RunDirectory(Path("r")).write_record(record.model_copy(update={"status": "interrupted"}))
    with refused("usage.resume_changed"):
        train(tiny(max_iters=4, out_dir="r", n_embd=64), resume=True)


@pytest.mark.fault("other data under the same name on resume", row="B.4", sees="exit code 7", safe="the run as it was")
def test_other_data_under_the_same_name_is_refused() -> None:
    """nanoGPT's layout has no fingerprint of its own."""
    train(tiny(max_iters=4, out_dir="r"))
    write_dataset(Path("data/toy"), seed=5)
    with refused("data.changed"):
        train(tiny(max_iters=8, lr_decay_iters=12, out_dir="r"), resume=True)


def test_a_spoilt_line_of_metrics_costs_that_line() -> None:
    train(tiny(max_iters=4, out_dir="r"))
    whole = RunDirectory(Path("r")).read_lines("metrics")
    for line in ("5", "[]", '{"kind": "step"}', '{"kind": "step", "step": "x"}', "[" * 100_000):
        with Path("r/metrics.jsonl").open("a") as file:
            file.write(line + "\n")
        assert RunDirectory(Path("r")).read_lines("metrics") == whole, line
    assert foretrain("report", "r").returncode == 0


def test_a_full_disk_beneath_the_output() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-c", "from foretrain.cli import main; main()", "gpus"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert result.returncode == ExitCode.DISK_FULL
    assert "disk is full" in result.stderr
    assert "Traceback" not in result.stderr


def test_record_names_damaged_checkpoints_passed_over_by_resume() -> None:
    """What `train --resume auto --json` prints is this record."""
    keep = {
        "out_dir": "r",
        "decay_lr": False,
        "eval_interval": 3,
        "always_save_checkpoint": True,
        "keep_checkpoints": 3,
    }
    first = train(tiny(max_iters=6, **keep))
    assert first.skipped_checkpoints == ()
    newest = checkpoint.path_of(Path("r") / "checkpoints", 6)
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    record = train(tiny(max_iters=9, **keep), resume=True)
    assert record.resumed_from == (3,)
    (skipped,) = record.to_json(schema=SCHEMA)["skipped_checkpoints"]
    assert skipped.startswith(f"{newest.name}: ")
    assert RunDirectory(Path("r")).read_record().skipped_checkpoints == record.skipped_checkpoints
    assert train(tiny(max_iters=12, **keep), resume=True).skipped_checkpoints == ()


def test_run_that_compiles_nothing_imports_no_compiler() -> None:
    """It would take 0.6 s and 70 MB: the decorators of torch.optim import it, and torch.profiler does."""
    code = (
        f"import sys; sys.path.insert(0, {str(REPO)!r})\n"
        "from tests.kit.tiny import tiny; from tests.kit.training import train\n"
        "assert train(tiny()).status == 'finished'; print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.split()[-1:], done.returncode) == (["False"], 0), done.stderr
