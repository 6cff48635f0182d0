"""What a run meets while it lives: lost cards, compilers that fail, terminals that close, machines that sleep."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretrain.base.errors import ExitCode, UserError
from foretrain.cli import keep_going as supervisor
from foretrain.cli.commands.train import Patient, patient_output
from foretrain.data.dataset import read_info
from foretrain.model.step import build, train_step
from foretrain.predict.trace.self_test import traced_on_cpu
from foretrain.runs import folder
from foretrain.runs.folder import RunDirectory, newest_unfinished
from foretrain.training import checkpoint, device, nonfinite, trainer
from foretrain.training.attempts import NotCompiled, attempt, card_is_lost, go_eager, is_out_of_memory, not_compiled
from foretrain.training.device import place
from foretrain.training.vitals import Clocks, Vitals
from tests.faults import catalogue
from tests.faults.harness import fork, wait
from tests.kit.command import refused
from tests.kit.tiny import TINY, tiny, write_dataset
from tests.kit.training import assert_same, fail_in_step, final_tensors, train

LOST = torch.AcceleratorError("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA")


# -- the card ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (LOST, True), (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("cuBLAS error: CUBLAS_STATUS_EXECUTION_FAILED"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False), (RuntimeError("a shape"), False),
        (torch.OutOfMemoryError("CUDA out of memory."), False), (ValueError("CUDA error:"), False),
    ],
)  # fmt: skip
def test_what_counts_as_a_lost_card(error: BaseException, lost: bool) -> None:
    assert card_is_lost(error) == lost
    assert not (lost and is_out_of_memory(error))


@pytest.mark.fault(
    "the card is lost (Xid, dead CUDA context)", row="B.3", sees="exit code 4: the card failed, what it said, where to look",
    safe="earlier checkpoints; no further call to the card; --auto-restart begins again in a new process",
)  # fmt: skip
def test_a_lost_card_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the error no function of torch.cuda is called, though the run believes that it is on a card."""
    write_dataset(Path("data/toy"))
    lost, calls = [False], []

    def stand_in(name: str) -> Any:
        def call(*words: Any, **named: Any) -> Any:
            if lost[0]:
                calls.append(name)
                raise LOST
            return torch.zeros(16, dtype=torch.uint8) if "rng" in name else 0

        return call

    own = tiny(max_iters=20, lr_decay_iters=20)
    directory = folder.create("out")
    run = trainer.Trainer(own, read_info(Path("data/toy")), directory, place(own))
    original = trainer.train_step

    def failing(state: Any, batches: Any, rate: float) -> Any:
        if run.progress.step != 7:
            return original(state, batches, rate)
        card = torch.device("cuda", 0)
        state.device = run.meter.device = run.vitals.device = card
        for name in ("memory_reserved", "memory_allocated", "synchronize", "empty_cache", "get_rng_state",
                     "set_rng_state", "mem_get_info", "max_memory_allocated", "get_device_properties"):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, stand_in(name))
        lost[0] = True
        raise LOST

    monkeypatch.setattr(trainer, "train_step", failing)
    with pytest.raises(UserError) as caught:
        run.run()
    directory.release()
    assert (caught.value.id, caught.value.exit_code) == ("environment.card_failed", ExitCode.ENVIRONMENT)
    assert "unspecified launch failure" in str(caught.value)
    assert calls == []
    record = RunDirectory(Path("out")).read_record()
    assert (record.status, record.reason, record.steps_done) == ("failed", "environment.card_failed", 7)
    assert checkpoint.newest_valid(Path("out/checkpoints"))[0] == Path("out/checkpoints/step-0000000005")


@pytest.mark.fault(
    "out of memory in the optimizer", row="B.1", sees="exit code 5 with the smaller micro-batch; --auto-restart goes on by itself",
    safe="nothing half-updated is saved; a resume continues from the last checkpoint with half the micro-batch",
)  # fmt: skip
def test_optimizer_out_of_memory_goes_back_to_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the run that was stopped at that checkpoint and went on with half the micro-batch."""
    config = tiny(dropout=0.1)

    def stop(event: Any) -> None:
        if getattr(event, "kind", "") == "step" and event.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    train(tiny(dropout=0.1, out_dir="resumed"), listen=stop)
    train(tiny(dropout=0.1, out_dir="resumed", batch_size=2, gradient_accumulation_steps=4), resume=True)
    with monkeypatch.context() as patch:
        fail_in_step(patch, 7, 0, "optimizer")
        with pytest.raises(UserError, match="--resume auto"):
            train(config)
    assert supervisor.worth_another(config, int(ExitCode.OUT_OF_MEMORY))
    record = train(config, resume=True)
    assert (record.status, record.config.batch_size, record.shrunk_from) == ("finished", 2, 4)
    assert_same(final_tensors(Path("resumed")), final_tensors(Path("out")))


def test_keep_going_begins_again_after_a_lost_card(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_step", lambda *words: (_ for _ in ()).throw(LOST))
        with pytest.raises(UserError):
            train(tiny())
    ends = iter([int(ExitCode.ENVIRONMENT), 0])
    waits: list[float] = []
    monkeypatch.setattr(supervisor, "one_attempt", lambda words: (next(ends), False))
    monkeypatch.setattr(sys, "argv", ["foretrain", "train", "--auto-restart"])
    assert supervisor.keep_going(tiny(), wait=waits.append) == 0
    assert waits == [2.0]
    assert newest_unfinished("out", 12) is not None


# -- the compiler ------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "out of memory or another failure in torch.compile or Triton", row="B.1", sees="a note: the run goes on uncompiled",
    safe="everything: the step is done again uncompiled, the same as a run without torch.compile",
)  # fmt: skip
@pytest.mark.parametrize("changes", [{}, {"compile_blocks": True}, {"loss_chunk_size": 64}])
def test_a_compiler_that_fails_leaves_an_uncompiled_run(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.compile_fx as compile_fx

    def out_of_resources(*words: Any, **named: Any) -> Any:
        raise RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 101376.")

    monkeypatch.setattr(device, "obstacle_to_compile", lambda device: None)
    monkeypatch.setattr(compile_fx, "compile_fx", out_of_resources)
    own = {"max_iters": 6, "dropout": 0.1, **changes}

    def compiled() -> int:
        notes: list[Any] = []
        record = train(tiny(**own, compile=True), listen=notes.append)
        told = [note.values["reason"] for note in notes if getattr(note, "id", "") == "not_compiled"]
        assert len(told) == 1
        assert "shared memory" in told[0]
        assert (record.status, record.compiled) == ("finished", False)
        return 0

    # In a fork: where a compiler has failed, Dynamo counts a user of its hook for good, so that a later compilation in
    # the same process would leave it, and callers would keep what they passed (compilation.remove_frame_hook).
    assert wait(fork(compiled)) == 0
    train(tiny(**own, out_dir="eager"))
    assert_same(final_tensors(Path("eager")), final_tensors(Path("out")))


def test_step_after_a_failed_compiler_takes_uncompiled_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx as compile_fx

    def no_compiler(*words: Any, **named: Any) -> Any:
        raise RuntimeError("no compiler")

    config = tiny(vocab_size=2048, eval_batch_size=32, gradient_accumulation_steps=2)

    def peaks() -> dict[str, tuple[int, int]]:
        return traced_on_cpu(config, "bfloat16", "foretrain", compiled=False).peaks()

    def same() -> int:
        before = peaks()
        with monkeypatch.context() as patch:
            patch.setattr(compile_fx, "compile_fx", no_compiler)
            state = build(config, torch.device("cpu"), torch.bfloat16, compile=True)
            ids = torch.zeros(config.batch_size, config.block_size, dtype=torch.int64)
            result = attempt(state, [(ids, ids)] * 2, lambda batches: train_step(state, batches, 1e-3))
        assert isinstance(result, NotCompiled)
        go_eager(state)
        assert peaks() == before
        return 0

    assert wait(fork(same)) == 0  # in a fork, as Dynamo's count of users stays wrong


def test_tritons_own_error_is_one_of_the_compilers() -> None:
    own = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})
    failed = not_compiled(own("out of resource: shared memory"))
    assert failed.reason == "OutOfResources: out of resource: shared memory"
    assert not_compiled(RuntimeError("CUDA out of memory")) is None


@pytest.mark.parametrize(
    "text",
    ["NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'", "MPS backend out of memory (MPS allocated: 1)",
     "Triton Error [CUDA]: out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling"],
)  # fmt: skip
def test_shapes_of_a_lack_of_memory(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))


# -- signals and output ------------------------------------------------------------------------------------


@pytest.mark.fault(
    "SIGTERM, Ctrl-C", row="B.3", sees="exit code 75, `--resume auto` goes on",
    safe="the last whole step: a step that is broken off between two micro-steps is done again",
)  # fmt: skip
@pytest.mark.parametrize("micro", [1, 2])
def test_a_stop_between_two_micro_steps(micro: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is taken back; the whole run is bit for bit the one without a stop."""
    own = {"dropout": 0.1, "gradient_accumulation_steps": 4, "batch_size": 2}
    original, tries = trainer.train_step, iter(range(10**6))

    def stopping(state: Any, batches: Any, rate: float) -> Any:
        if next(tries) != 6:
            return original(state, batches, rate)
        call, count = state.call, iter(range(10**6))

        def model(idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if next(count) == micro:
                os.kill(os.getpid(), signal.SIGTERM)
            return call(idx, targets)

        state.call = model
        try:
            return original(state, batches, rate)
        finally:
            state.call = call
            assert next(count) == micro + 1, "no further micro-step was begun"

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_step", stopping)
        record = train(tiny(**own))
    assert (record.status, record.steps_done) == ("interrupted", 6)
    assert checkpoint.steps_in(Path("out/checkpoints"))[-1] == 6
    train(tiny(**own), resume=True)
    train(tiny(**own, out_dir="whole"))
    assert_same(final_tensors(Path("whole")), final_tensors(Path("out")))


@pytest.mark.fault(
    "SIGHUP, closed terminal, broken pipe", row="B.3", sees="nothing more on the screen; the run's files have it all",
    safe="everything: the run goes on to its end",
)  # fmt: skip
def test_a_reader_that_goes_away_and_a_hangup_end_nothing() -> None:
    write_dataset(Path("data/toy"))
    words = [f"--{k}={v}" for k, v in {**TINY, "max_iters": 40, "lr_decay_iters": 40}.items()]
    command = [sys.executable, "-c", "from foretrain.cli import main; main()", "train", *words]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    run.stderr.readline()  # it has begun, and ignores SIGHUP
    run.stderr.close()
    run.stdout.close()
    run.send_signal(signal.SIGHUP)
    assert run.wait(timeout=600) == 0
    record = RunDirectory(Path("out")).read_record()
    assert (record.status, record.steps_done) == ("finished", 40)


@pytest.mark.parametrize("words", [["plan", "gpt2-124m", "--gpu", "4070"], ["gpus", "--json"]], ids=" ".join)
def test_a_reader_that_goes_away_is_a_quiet_end(words: list[str]) -> None:
    """`foretrain … | head -1`: rich and click would make an exit code 1 of it."""
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "foretrain", *words], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_log_on_a_full_disk_and_one_that_is_closed() -> None:
    class Full:
        def __init__(self, number: int) -> None:
            self.number = number

        def write(self, text: str) -> int:
            raise OSError(self.number, "no")

        flush = write

        def fileno(self) -> int:
            raise OSError(9, "none")

    for number in (5, 28, 32):
        assert Patient(Full(number), any_error=True).write("x") == 1  # type: ignore[arg-type]
    with pytest.raises(OSError, match="no"):
        Patient(Full(28), any_error=False).write("x")  # type: ignore[arg-type]


def test_a_hangup_is_ignored_only_meanwhile() -> None:
    old = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with patient_output():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        seen: list[int] = []
        signal.signal(signal.SIGHUP, lambda number, frame: seen.append(number))
        with patient_output():
            os.kill(os.getpid(), signal.SIGHUP)
        assert seen == [signal.SIGHUP], "who wants it gets it"
    finally:
        signal.signal(signal.SIGHUP, old)


# -- time --------------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "laptop sleep, clock set, NTP", row="B.3", sees="a note: suspended, or the clock was set, by how much",
    safe="everything: durations are of a clock that neither moves, and order is by step",
)  # fmt: skip
@pytest.mark.parametrize(
    ("asleep_s", "set_s", "ids"),
    [
        (0, 0, []), (0, 5, []), (0, -3600, ["clock_set_back"]), (0, 86400, ["clock_set_on"]), (3600, 0, ["suspended"]),
        (60, -7200, ["suspended", "clock_set_back"]),
    ],
)  # fmt: skip
def test_gaps_in_time_are_told(asleep_s: float, set_s: float, ids: list[str]) -> None:
    now = {"monotonic": 100.0, "boot": 130.0, "wall": 1e9}
    clocks = Clocks(lambda: now["monotonic"], lambda: now["boot"], lambda: now["wall"])
    now = {"monotonic": 110.0, "boot": 140.0 + asleep_s, "wall": 1e9 + 10 + asleep_s + set_s}
    found = clocks.look()
    assert [id for id, _ in found] == ids
    assert clocks.look() == [], "told once"
    assert [values["seconds"] for _, values in found] == [abs(x) for x in (asleep_s, set_s) if abs(x) > 5]


def test_a_clock_that_jumps_at_every_look_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real, jumps = time.time, iter(range(10**6))
    monkeypatch.setattr(time, "time", lambda: real() + (-1) ** next(jumps) * 86400)
    record = train(tiny())
    metrics = RunDirectory(Path("out")).read_lines("metrics")
    assert record.status == "finished"
    assert 0 < record.wall_s < 600
    assert all(0 < m["step_s"] < 600 and 0 <= m["eta_s"] < 600 for m in metrics if m["kind"] == "step")
    assert [m["step"] for m in metrics if m["kind"] == "step"] == list(range(12))


# -- the card's driver -------------------------------------------------------------------------------------

NVML_CALLS = (
    "nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlSystemGetDriverVersion", "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUUID", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature",
    "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetComputeRunningProcesses",
)  # fmt: skip


class Driver:
    """A card of 16 GiB that works at 1.98 GHz; one of its calls may fail."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self, failing: str = "", mask: int = 0, mhz: int = 1980) -> None:
        self.failing, self.mask, self.mhz = failing, mask, mhz

    def __getattr__(self, name: str) -> Any:
        if name not in NVML_CALLS:
            raise AttributeError(name)
        answers = {
            "nvmlDeviceGetCount": 1, "nvmlDeviceGetName": b"NVIDIA card", "nvmlDeviceGetClockInfo": self.mhz,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=16 * 2**30, used=2**30), "nvmlDeviceGetPowerUsage": 99000,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=99, memory=50), "nvmlDeviceGetTemperature": 91,
            "nvmlDeviceGetCurrentClocksEventReasons": self.mask, "nvmlDeviceGetComputeRunningProcesses": [],
            "nvmlSystemGetDriverVersion": "580.0", "nvmlDeviceGetTotalEnergyConsumption": 5000,
        }  # fmt: skip

        def call(*words: Any) -> Any:
            if name == self.failing:
                raise self.NVMLError("Driver/library version mismatch")
            return answers.get(name, 0)

        return call


def vitals_of(driver: Any) -> Vitals:
    Path("run").mkdir(exist_ok=True)
    cuda = SimpleNamespace(memory_allocated=lambda device: 5, get_device_properties=lambda device: SimpleNamespace())
    return Vitals(RunDirectory(Path("run")), torch.device("cuda", 0), nvml=driver, cuda=cuda)


@pytest.mark.fault(
    "NVML missing, mismatched or failing at any call", row="B.3", sees="the figures that are missing are left out",
    safe="everything: training does not need them",
)  # fmt: skip
@pytest.mark.parametrize("failing", ["", *NVML_CALLS])
def test_a_driver_that_fails_at_one_call_costs_that_figure(failing: str) -> None:
    own = vitals_of(Driver(failing))
    found = own.now()
    assert found["allocated_bytes"] == 5
    if failing in ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"):
        assert "clock_ghz" not in found
    elif failing == "nvmlDeviceGetClockInfo":
        assert (found.get("clock_ghz"), found["power_w"]) == (None, 99.0)
    else:
        assert found["clock_ghz"] == 1.98
    assert own.odd() == []


@pytest.mark.fault(
    "thermal or power throttling", row="B.3", sees="a note: the clock, what it was, why, how hot the card is",
    safe="everything: a run never fails of it",
)  # fmt: skip
def test_a_lowered_clock_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    driver = Driver()
    own = vitals_of(driver)
    own.clocks = SimpleNamespace(look=list)  # type: ignore[assignment]
    told: list[Any] = []
    for second in range(900):
        now[0] += 1
        driver.mask, driver.mhz = (0x20, 1410) if second >= 100 else (0x4 if second % 2 else 0, 1980)
        own.now()
        told += own.odd()
    assert [id for id, _ in told] == ["throttled"] * 2, "again after ten minutes"
    values = told[0][1]
    assert (values["reasons"], values["clock_ghz"], values["fastest_ghz"]) == (["thermal"], 1.41, 1.98)


# -- losses that leap --------------------------------------------------------------------------------------


@pytest.mark.fault(
    "the loss leaps", row="B.2", sees="a note with the loss, the usual one and the distance",
    safe="everything: nothing is skipped or changed",
)  # fmt: skip
def test_a_leap_of_the_loss_is_told_also_across_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of a hundred with a loss of five times the others; the run is stopped just before it."""
    own = {"max_iters": 80, "lr_decay_iters": 80, "eval_interval": 40, "learning_rate": 1e-5, "min_lr": 1e-6}
    original = trainer.train_step

    def leaping(state: Any, batches: Any, rate: float) -> Any:
        result = original(state, batches, rate)
        return trainer.replace(result, loss=result.loss * 5) if running[0].progress.step == 60 else result

    running: list[Any] = []
    init = trainer.Trainer.__init__

    def remembered(self: Any, *words: Any, **named: Any) -> None:
        init(self, *words, **named)
        running[:] = [self]

    def stop(event: Any) -> None:
        if getattr(event, "kind", "") == "step" and event.step == 58:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(trainer.Trainer, "__init__", remembered)
    monkeypatch.setattr(trainer, "train_step", leaping)
    train(tiny(**own, out_dir="whole"))
    train(tiny(**own), listen=stop)
    train(tiny(**own), resume=True)
    told = [
        [line["values"] for line in RunDirectory(Path(out)).read_lines("events") if line["id"] == "loss_spike"]
        for out in ("whole", "out")
    ]
    assert [values["step"] for values in told[0]] == [60]
    assert told[0] == told[1]
    assert_same(final_tensors(Path("whole")), final_tensors(Path("out")))


def test_noise_and_slopes_are_no_leaps() -> None:
    chance, recent, most = random.Random(1), (), 0.0
    for step in range(3000):
        loss = 10 / (1 + step / 50) + 2 + chance.gauss(0, 0.05)
        most = max(most, nonfinite.spike_score(recent, loss) or 0.0)
        recent = nonfinite.with_loss(recent, loss)
    assert most < nonfinite.LEAST_SCORE
    assert len(recent) == nonfinite.WINDOW
    assert (nonfinite.spike_score(recent, recent[-1] + 2) or 0) > 20


# -- two at once -------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "two runs in one directory", row="B.3", sees="the second gets a folder of its own, or is refused (exit code 2) in a moment",
    safe="both: a lock that the system frees with its process",
)  # fmt: skip
def test_two_hundred_pairs_never_share_a_directory() -> None:
    """Both start at the same moment, in processes of their own; the holder is then killed and the run is free again."""
    script = (
        "import sys, time; from foretrain.runs import folder as store\n"
        "for line in sys.stdin:\n"
        " d = store.create(line.strip()); print(d.id, flush=True); sys.stdin.readline(); d.release()\n"
    )
    pair = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for i in range(200):
            for one in pair:
                one.stdin.write(f"r{i}\n")  # type: ignore[union-attr]
                one.stdin.flush()  # type: ignore[union-attr]
            names = {one.stdout.readline().strip() for one in pair}  # type: ignore[union-attr]
            assert names == {f"r{i}", f"r{i}-2"}
            with refused(code=ExitCode.USAGE):
                RunDirectory(Path(f"r{i}")).acquire()
            if i < 199:
                for one in pair:
                    one.stdin.write("\n")  # type: ignore[union-attr]
                    one.stdin.flush()  # type: ignore[union-attr]
    finally:
        for one in pair:
            one.kill()
            one.communicate()
    for name in ("r199", "r199-2"):
        RunDirectory(Path(name)).acquire()


def test_every_part_of_the_catalogue_has_tests() -> None:
    """Each mark says what is seen and what is safe."""
    marks = catalogue.marked()
    assert {row for row, *_ in marks} == set(catalogue.GROUPS)
    assert len(marks) >= 45
    assert all(text and "|" not in text for mark in marks for text in mark)
    assert len({what for _, what, *_ in marks}) == len(marks) == len({test for *_, test in marks})


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name in ("checkpoint", "foretrain-data") and t.is_alive()]
