"""Memory of a run on a CPU: refused before the first step, capped while it runs, and given back before it counts."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from foretrain.app import training_session
from foretrain.base import process_memory
from foretrain.base.errors import ExitCode, UserError
from foretrain.base.process_memory import Limit, resident_bytes
from foretrain.base.units import GIB, MIB
from foretrain.hardware import cpu
from foretrain.runs.folder import RunDirectory
from foretrain.training import trainer
from foretrain.training.device import give_back, keep_memory, place
from foretrain.training.memory_limit import HostGuard
from tests.kit.command import foretrain, refused
from tests.kit.tiny import tiny, write_dataset
from tests.kit.training import train

HUGE = ("--batch_size=1000000", "--max_iters=10", "--warmup_iters=2")


def train_words(*more: str) -> tuple[str, ...]:
    write_dataset(Path("data/toy"))
    words = [f"--{k}={v}" for k, v in tiny().model_dump(include={"n_layer", "n_head", "n_embd", "block_size"}).items()]
    return ("train", "baby", *words, "--dataset=toy", "--vocab_size=96", "--device=cpu", "--compile=false", *more)


# -- before the first step ---------------------------------------------------------------------------------


def test_run_beyond_the_machine_is_refused_and_leaves_nothing() -> None:
    result = foretrain(*train_words(*HUGE), code=ExitCode.OUT_OF_MEMORY)
    assert "needs at least" in result.stderr
    assert "Nothing was trained" in result.stderr
    assert "--batch_size=" in result.stderr
    assert "--memory_limit=" in result.stderr
    assert not Path("out-baby").exists()


def test_named_micro_batch_is_the_same_training_and_fits() -> None:
    config = tiny(batch_size=4096, gradient_accumulation_steps=2, block_size=64)
    gpu, free = place(config).gpu, 600 * MIB
    with refused("memory.machine_smaller") as caught:
        training_session.check_memory(config, gpu, compiled=False, free=lambda: free - (resident_bytes() or 0))
    values = caught.value.values
    assert values["smaller"] * values["more"] == 4096 * 2
    assert (values["free"], values["needs"] > free) == (free, True)
    cut = config.model_copy(update={"batch_size": values["smaller"], "gradient_accumulation_steps": values["more"]})
    training_session.check_memory(cut, gpu, compiled=False, free=lambda: free - (resident_bytes() or 0))


def test_too_large_for_one_sequence_is_refused_without_a_smaller() -> None:
    config = tiny(n_embd=4096, n_head=2)
    with refused("memory.machine"):
        training_session.check_memory(config, place(config).gpu, compiled=False, free=lambda: 0)


def test_where_the_system_says_nothing_nothing_is_refused() -> None:
    training_session.check_memory(tiny(batch_size=10**6), place(tiny()).gpu, compiled=False, free=lambda: None)


def test_a_memory_limit_of_that_size_starts_it_all_the_same() -> None:
    config = tiny(batch_size=4096)
    with pytest.raises(UserError) as refused:
        training_session.check_memory(config, place(config).gpu, compiled=False, free=lambda: -(resident_bytes() or 0))
    limited = config.model_copy(update={"memory_limit": refused.value.values["limit"]})
    training_session.check_memory(limited, place(config).gpu, compiled=False, free=lambda: 0)


# -- while it runs -----------------------------------------------------------------------------------------


def guard(free: int | None, held: int | None, ends: Any = None, total: int | None = 24 * GIB) -> HostGuard:
    return HostGuard(ends or (lambda *_: None), lambda: free, lambda: total, lambda: held)


def test_machine_that_this_run_nearly_fills_is_seen() -> None:
    assert guard(400 * MIB, 22 * GIB).look() == (22 * GIB, 400 * MIB, 24 * GIB)
    assert guard(2 * GIB, 20 * GIB).look() is None
    assert guard(400 * MIB, 2 * GIB).look() is None  # others took it
    assert guard(100 * MIB, GIB, total=2 * GIB).look() is None  # a small container: 3% of it
    assert guard(None, GIB).look() is None
    assert guard(GIB, None).look() is None


def test_the_guard_ends_the_run_once_and_stops_with_it() -> None:
    seen, done = list[tuple[int, int, int]](), threading.Event()

    def ends(*found: int) -> None:
        seen.append(found)
        done.set()

    with guard(MIB, 23 * GIB, ends):
        assert done.wait(60)
    assert seen == [(23 * GIB, MIB, 24 * GIB)]
    quiet = guard(20 * GIB, GIB, ends)
    with quiet:
        pass
    assert not quiet._thread.is_alive()


def test_run_that_fills_the_machine_ends_with_its_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel killed it at 24 GB (exit code 137), without a word."""
    ended, step = list[UserError](), threading.Event()
    monkeypatch.setattr(trainer.attempts, "end_process", lambda error: (ended.append(error), step.set()))
    monkeypatch.setattr(trainer, "HostGuard", lambda ends: guard(MIB, 23 * GIB, ends))
    monkeypatch.setattr(trainer, "train_step", lambda *_: pytest.fail("the end came") if step.wait(60) else None)
    with pytest.raises(pytest.fail.Exception):
        train(tiny())
    (error,) = ended
    assert (error.id, error.exit_code) == ("memory.machine_full", ExitCode.OUT_OF_MEMORY)
    assert "before the system would have killed it" in str(error)
    assert "machine_full" in [e["id"] for e in RunDirectory(Path("out")).read_lines("events")]


# -- a container's limit -----------------------------------------------------------------------------------


def group(root: Path, path: str, most: str, used: int, cache: int = 0, version: int = 2) -> None:
    folder = root / "sys/fs/cgroup" / ("memory" if version == 1 else "") / path
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (most, str(used)), strict=True):
        (folder / name).write_text(value + "\n")
    prefix = "" if version == 2 else "total_"
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {cache}\n")
    (root / "proc/self").mkdir(parents=True, exist_ok=True)


def test_the_level_with_the_least_left_counts(tmp_path: Path) -> None:
    group(tmp_path, "job", str(4 * GIB), 3 * GIB, cache=GIB)
    group(tmp_path, "job/step", "max", GIB)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    assert process_memory.limits(tmp_path) == [Limit(4 * GIB, 2 * GIB)]
    group(tmp_path, "", str(8 * GIB), 7 * GIB)
    found = process_memory.memory_limit(tmp_path)
    assert found.free_bytes == GIB


def test_version_1_and_no_limit_and_no_groups(tmp_path: Path) -> None:
    assert process_memory.memory_limit(tmp_path) is None
    group(tmp_path, "docker/x", str(2 * GIB), GIB, version=1)
    group(tmp_path, "", str(2**63 - 4096), GIB, version=1)
    (tmp_path / "proc/self/cgroup").write_text("5:cpu,cpuacct:/x\n3:memory:/docker/x\n1:name=systemd:/\n")
    assert process_memory.limits(tmp_path) == [Limit(2 * GIB, GIB)]
    (tmp_path / "proc/self/cgroup").write_text("3:memory:/../../x\nnonsense\n")
    assert process_memory.limits(tmp_path) == []


def test_memory_is_what_the_container_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = Limit(2 * GIB, GIB)
    monkeypatch.setattr(cpu, "limits", lambda: [limit])
    monkeypatch.setattr(cpu, "memory_limit", lambda: limit)
    assert cpu.total_memory_bytes() == 2 * GIB
    free = cpu.available_memory_bytes()
    assert free <= GIB


def test_without_proc_psutil_says_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS and Windows had no figures."""
    monkeypatch.setattr(cpu, "memory_limit", lambda: None)
    monkeypatch.setattr(cpu.sys, "platform", "darwin")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3 * GIB, total=4 * GIB))
    assert cpu.available_memory_bytes() == 3 * GIB
    monkeypatch.setattr(cpu.os, "sysconf", lambda name: (_ for _ in ()).throw(ValueError(name)))  # as on Windows
    monkeypatch.setattr(cpu, "limits", list)
    assert cpu.total_memory_bytes() == 4 * GIB


# -- given back --------------------------------------------------------------------------------------------


@pytest.mark.skipif(not keep_memory(), reason="glibc's own")
def test_what_a_calibration_took_is_given_back() -> None:
    """Kept by glibc it counted as the training's: 1.94 GiB were measured where 396 MiB were foretold."""
    keep_memory()
    blocks = [torch.ones(MIB // 4) for _ in range(300)]
    top = torch.ones(1024)  # what lives on above them
    full = resident_bytes()
    del blocks
    give_back()
    after = resident_bytes()
    assert full - after > 200 * MIB
    assert top.sum() == 1024
