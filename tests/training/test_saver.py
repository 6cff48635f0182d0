"""Saving in the background: what is written is the state of its moment, failures are heard, the end waits."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.base import files
from foretrain.base.errors import ExitCode, UserError
from foretrain.base.messages import say
from foretrain.config.resolve import resolve
from foretrain.hardware.cpu import cpu_device
from foretrain.model.step import build, train_step
from foretrain.predict.memory import STAGING_SPARE, predict
from foretrain.predict.spec import StepSpec
from foretrain.runs.folder import RunDirectory
from foretrain.training import checkpoint, saver, trainer
from foretrain.training.checkpoint import Progress
from foretrain.training.saver import Saver
from foretrain.training.tensor_files import live
from tests.kit.command import refused
from tests.kit.tiny import tiny
from tests.kit.training import assert_same, final_tensors, same_state, tensors_of, train, trained

FOLDER = Path("checkpoints")


class Gate:
    """Holds the writer back at its first file until it is opened; may fail afterwards."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.open, self.reached, self.error = threading.Event(), threading.Event(), error

    def __call__(self, call: str, path: Path, size_bytes: int) -> None:
        if call == "write" and path.suffix == ".safetensors":
            self.reached.set()
            assert self.open.wait(60)
            if self.error:
                raise self.error


@pytest.fixture(autouse=True)
def unwatched() -> Iterator[None]:
    yield
    files.watch(None)


def step_on(state: Any) -> None:
    idx = torch.arange(16).repeat(4, 1)
    train_step(state, [(idx, idx), (idx, idx)], 1e-2)


def test_what_is_written_is_the_state_of_its_moment() -> None:
    """Steps go on while the writer is held back; the checkpoint has nothing of them, nor of what is noted later."""
    state, notes = trained(), []
    before, gate = tensors_of(state), Gate()
    files.watch(gate)
    own = Saver(FOLDER, 2, lambda id, **values: notes.append((id, values)))
    own.save(state, Progress(step=2, elapsed_s=1.5), wait=False)
    assert gate.reached.wait(60)
    for _ in range(3):
        step_on(state)
        own.poll()
    torch.rand(5)
    assert notes == []
    gate.open.set()
    own.finish()
    assert [(id, values["name"]) for id, values in notes] == [("saved", "step-0000000002")]
    assert 0 <= notes[0][1]["save_s"] <= own.blocked_s
    other = build(tiny(dropout=0.1, seed=3), torch.device("cpu"), torch.float32, compile=False)
    loaded = checkpoint.load(FOLDER, other)
    assert loaded.progress == Progress(step=2, elapsed_s=1.5)
    assert same_state(before, tensors_of(other))


@pytest.mark.fault(
    "slow disk", row="B.3",
    sees="nothing, unless a save takes longer than to the next one, which then waits",
    safe="everything: at most one save is under way",
)  # fmt: skip
def test_one_at_a_time() -> None:
    state, gate = trained(), Gate()
    files.watch(gate)
    own = Saver(FOLDER, 5, lambda id, **values: None)
    own.save(state, Progress(step=1), wait=False)
    threading.Timer(0.2, gate.open.set).start()
    own.save(state, Progress(step=2), wait=False)  # waits for the first
    assert 1 in checkpoint.steps_in(FOLDER)
    assert own.blocked_s >= 0.15
    own.finish()
    assert checkpoint.steps_in(FOLDER) == [1, 2]


@pytest.mark.parametrize(("error", "why"), [
    (OSError(28, "No space left on device"), "allows no more writing"), (OSError(30, "Read-only file system"), "Read-only"),
    (OSError(5, "Input/output error"), "Input/output"), (RuntimeError("CUDA error: out of memory"), "out of memory"),
])  # fmt: skip
def test_failed_save_is_retried_and_the_third_ends_the_run(error: BaseException, why: str) -> None:
    state, gate = trained(), Gate(error)
    gate.open.set()
    checkpoint.save(FOLDER, state, Progress(step=1))
    notes: list[tuple[str, dict[str, Any]]] = []
    own = Saver(FOLDER, 1, lambda id, **values: notes.append((id, values)))

    def fail(step: int) -> None:
        files.watch(gate)
        own.save(state, Progress(step=step), wait=False)
        own._thread.join()
        own.poll()
        assert checkpoint.problem_of(checkpoint.path_of(FOLDER, 1)) is None
        assert step not in checkpoint.steps_in(FOLDER)

    fail(2)
    fail(3)
    assert [id for id, _ in notes] == ["save_failed"] * 2
    assert why in say("event.save_failed", **notes[0][1])
    assert "step-0000000001 is intact" in say("event.save_failed", **notes[0][1])
    with pytest.raises((UserError, RuntimeError)):
        fail(4)
    files.watch(None)
    own.keep = 2
    own.save(state, Progress(step=5), wait=False)  # one that succeeds lets the count begin anew
    own.finish()
    fail(6)
    assert (notes[-1][0], notes[-1][1]["count"]) == ("save_failed", 1)


@pytest.mark.fault(
    "no file descriptor left", row="B.3",
    sees="a note that a save failed",
    safe="earlier checkpoints; the next save tries again",
)  # fmt: skip
def test_a_process_without_file_descriptors_goes_on() -> None:
    """As full as can be: neither the checkpoint nor the folder's list can be opened."""
    resource = pytest.importorskip("resource")
    state, notes = trained(), []
    checkpoint.save(FOLDER, state, Progress(step=1))
    own = Saver(FOLDER, 2, lambda id, **values: notes.append((id, values)))
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, old[1]))
    try:
        own.save(state, Progress(step=2), wait=False)
        own.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)
    assert [id for id, _ in notes] == ["save_failed"]
    own.save(state, Progress(step=3), wait=True)
    assert checkpoint.steps_in(FOLDER) == [1, 3]


def test_the_last_save_of_a_run_must_succeed() -> None:
    state, gate = trained(), Gate(OSError(28, "No space left on device"))
    gate.open.set()
    files.watch(gate)
    own = Saver(FOLDER, 1, lambda id, **values: None)
    with refused(code=ExitCode.DISK_FULL):
        own.save(state, Progress(step=2), wait=True)
    files.watch(None)
    own.save(state, Progress(step=2), wait=True)  # and the next one is not spoilt by it
    assert checkpoint.steps_in(FOLDER) == [2]


def full_while(steps: range) -> Any:
    """A disk that is full for a while: for the saves of these steps, and for the logs between them."""
    at = [0]

    def watcher(call: str, path: Path, size_bytes: int) -> None:
        if "staging-step-" in str(path):
            at[0] = int(str(path).split("staging-step-")[1][:10])
        if at[0] in steps and call in ("write", "append", "mkdir"):
            raise OSError(28, "No space left on device")

    return watcher


@pytest.mark.fault(
    "full disk, quota, read-only folder, I/O error, for a while", row="B.3",
    sees="a note for each save that failed",
    safe="earlier checkpoints; log lines wait for the disk; the next save tries again",
)  # fmt: skip
def test_a_run_goes_on_over_a_full_disk_for_a_while() -> None:
    """Two saves and the log lines meanwhile are refused: nothing of either is lost in the end."""
    own = {"max_iters": 40, "lr_decay_iters": 40}
    events: list[Any] = []
    files.watch(full_while(range(10, 16)))
    record = train(tiny(**own), listen=events.append)
    files.watch(None)
    assert record.status == "finished"
    assert [e.values["count"] for e in events if getattr(e, "id", "") == "save_failed"] == [1, 2]
    train(tiny(**own, out_dir="whole"))
    assert_same(final_tensors(Path("whole")), final_tensors(Path("out")))
    one, other = (
        [(m["kind"], m["step"], m.get("loss"), m.get("val_loss")) for m in RunDirectory(Path(p)).read_lines("metrics")]
        for p in ("out", "whole")
    )
    assert one == other
    noted = [line["id"] for line in RunDirectory(Path("out")).read_lines("events")]
    assert noted.count("save_failed") == 2


@pytest.mark.fault(
    "a disk that stays full", row="B.3",
    sees="exit code 8 after three failed saves in a row, with need and room",
    safe="the last checkpoint; at most three intervals of work are lost",
)  # fmt: skip
def test_a_disk_that_stays_full_ends_the_run() -> None:
    files.watch(full_while(range(10, 1000)))
    with refused("disk.full"):
        train(tiny(max_iters=40, lr_decay_iters=40))
    assert checkpoint.steps_in(Path("out/checkpoints")) == [5]
    files.watch(None)
    record = train(tiny(max_iters=40, lr_decay_iters=40), resume=True)
    assert record.status == "finished"
    train(tiny(max_iters=40, lr_decay_iters=40, out_dir="whole"))
    assert_same(final_tensors(Path("whole")), final_tensors(Path("out")))


def test_a_signal_waits_for_the_save_under_way() -> None:
    gate = Gate()
    files.watch(gate)

    def send(event: Any) -> None:
        if getattr(event, "kind", "") == "step" and event.step == 6:
            assert gate.reached.wait(60)
            threading.Timer(0.3, gate.open.set).start()
            os.kill(os.getpid(), signal.SIGTERM)

    record = train(tiny(), listen=send)
    assert (record.status, record.steps_done) == ("interrupted", 7)
    assert checkpoint.steps_in(Path("out/checkpoints")) == [5, 7]
    assert checkpoint.problem_of(Path("out/checkpoints/step-0000000005")) is None


def test_an_error_of_the_run_lets_the_save_end(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, count = Gate(), iter(range(10**6))
    files.watch(gate)

    def failing(*words: Any) -> Any:
        if next(count) == 6:
            assert gate.reached.wait(60)
            threading.Timer(0.2, gate.open.set).start()
            raise ZeroDivisionError
        return train_step(*words)

    monkeypatch.setattr(trainer, "train_step", failing)
    with pytest.raises(ZeroDivisionError):
        train(tiny())
    assert checkpoint.newest_valid(Path("out/checkpoints"))[0] == Path("out/checkpoints/step-0000000005")


@pytest.mark.fault(
    "out of memory while saving", row="B.1",
    sees="nothing; the save takes as long as its writing",
    safe="everything: the tensors are written themselves, piece by piece",
)  # fmt: skip
@pytest.mark.parametrize("why", ["no room", "limit", "no memory"])
def test_without_room_for_a_copy_the_loop_writes_itself(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = trained()
    if why == "no room":
        monkeypatch.setattr(saver, "available_memory_bytes", lambda: 1000)
    elif why == "no memory":

        def none(_: object) -> None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")

        monkeypatch.setattr(saver, "staged", none)
    own = Saver(FOLDER, 2, lambda id, **values: None, 1000 if why == "limit" else None)
    own.save(state, Progress(step=2), wait=False)
    assert checkpoint.steps_in(FOLDER) == [2]
    assert own._thread is None


def test_the_same_state_is_not_saved_twice() -> None:
    state = trained()
    own = Saver(FOLDER, 2, lambda id, **values: None)
    own.save(state, Progress(step=2, elapsed_s=1), wait=False)
    own.finish()
    files.watch(lambda *_: pytest.fail("a call on files"))
    own.save(state, Progress(step=2, elapsed_s=2), wait=True)
    files.watch(None)
    own.save(state, Progress(step=2, elapsed_s=2, evaluated=True), wait=True)
    assert checkpoint.read_progress(FOLDER / "step-0000000002").evaluated


def test_a_copy_that_the_plan_knows_of() -> None:
    """On a CPU the copy stands beside the steps after a save: the forecast has its bytes, where there is room."""
    for optimizer in ("adamw", "adamw8bit", "adamw4bit", "muon"):
        config = tiny(n_embd=128, optimizer=optimizer)
        state = build(config, torch.device("cpu"), torch.float32, compile=False)
        idx = torch.arange(16).repeat(4, 1)
        train_step(state, [(idx, idx), (idx, idx)], 1e-2)
        copied = sum(
            t.numel() * t.element_size() for n, f in live(state).files.items() if n[:3] != "rng" for t in f.values()
        )
        long, short = config.model_copy(update={"max_iters": 99}), config.model_copy(update={"max_iters": 1})

        def steady(c: Any, room: int | None) -> tuple[int, int, int]:
            phase = predict(StepSpec.of(c, cpu_device(), dtype="float32", compiled=False), room).phase("steady_step")
            return phase.needed_low_bytes, phase.needed_expected_bytes, phase.needed_high_bytes

        low, expected, high = (a - b for a, b in zip(steady(long, None), steady(short, None), strict=True))
        assert (low, expected) == (0, high)
        assert high == pytest.approx(copied, rel=0.001)
        room = steady(short, None)[1]
        assert steady(long, room)[1] == room
    assert saver.SPARE == STAGING_SPARE
    assert resolve([]).config.max_iters > resolve([]).config.eval_interval
