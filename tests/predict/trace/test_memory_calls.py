"""What training code asks torch.cuda about memory, and what a trace answers: histories, snapshots, statistics, phases."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.cuda._memory_viz import segsum, trace_plot

from foretrain.base.units import MIB
from foretrain.predict import snapshot
from foretrain.predict.trace.session import Tracing, trace


def block(mebibytes: int) -> torch.Tensor:
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device="cuda")


def test_a_dumped_snapshot_is_the_trace_and_torch_shows_it(tmp_path: Path) -> None:
    """In the child that traces, into the user's file; read by foretrain and by torch's own memory_viz."""
    file = tmp_path / "dump.pickle"

    def code(on: Tracing) -> None:
        before = block(32)
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        x = block(64)
        del x
        y = block(48)
        torch.cuda.memory._dump_snapshot(str(file))
        torch.cuda.memory._record_memory_history(enabled=None)
        z = block(16)
        found = torch.cuda.memory._snapshot()
        assert len(found["device_traces"][0]) == history  # pyright: ignore[reportTypedDictNotRequiredAccess]
        assert len(found["segments"]) == len(torch.cuda.memory_snapshot()) == 2  # 48 and 16 MiB share one
        del before, y, z

    history = 5  # 64 MiB and their segment, their two frees, 48 MiB
    trace(code)
    data = pickle.loads(file.read_bytes())
    actions = [entry["action"] for entry in data["device_traces"][0]]
    assert actions == ["segment_alloc", "alloc", "free_requested", "free_completed", "alloc"]
    recording = snapshot.read(file)
    assert recording.reserved_at_end_bytes == 96 * MIB
    assert [entry.nbytes for entry in recording.entries if entry.action == "alloc"] == [64 * MIB, 48 * MIB]
    assert "64.0MiB allocated, 16.0MiB" in segsum(data)
    assert "<html>" in trace_plot(data)


def test_statistics_and_the_rest_are_answered() -> None:
    def code(on: Tracing) -> None:
        x = block(64)
        nested = torch.cuda.memory_stats_as_nested_dict()
        assert nested["allocated_bytes"]["all"]["current"] == torch.cuda.memory_allocated() == 64 * MIB
        assert torch.cuda.memory_stats()["active_bytes.all.peak"] == torch.cuda.max_memory_reserved() == 64 * MIB
        assert torch.cuda.memory.get_allocator_backend() == "native"
        torch.cuda.set_per_process_memory_fraction(0.5)
        assert torch.cuda.memory.get_per_process_memory_fraction() == 0.5
        address = torch.cuda.caching_allocator_alloc(32 * MIB)
        assert torch.cuda.memory_allocated() == 96 * MIB
        torch.cuda.caching_allocator_delete(address)
        assert torch.cuda.memory_allocated() == 64 * MIB
        assert torch.cuda.device_memory_used() == 96 * MIB
        assert "96.000 MB" in torch.cuda.list_gpu_processes()
        assert torch.cuda.utilization() == torch.cuda.temperature() == 0
        torch.cuda.reset_accumulated_memory_stats()
        with torch.cuda.profiler.profile():
            del x

    assert trace(code).peak_allocated_bytes == 96 * MIB


def test_a_program_that_resets_its_peaks_has_phases() -> None:
    """Each with what the program itself would read; those of one line are one."""

    def code(on: Tracing) -> None:
        kept = block(8)
        for size in (64, 32):
            torch.cuda.reset_peak_memory_stats()
            block(size)
            assert torch.cuda.max_memory_allocated() == (size + 8) * MIB
        torch.cuda.reset_peak_memory_stats()
        del kept

    line = code.__code__.co_firstlineno + 3
    phases = trace(code).replay().phases
    names = [phase.phase for phase in phases]
    assert [phase.allocated_bytes // MIB for phase in phases] == [8, 72, 8]
    assert names[0] == "build"
    assert names[1].endswith(f"test_memory_calls.py:{line}")


def test_phases_that_the_code_names_are_left_alone() -> None:
    def code(on: Tracing) -> None:
        on.phase("mine")
        torch.cuda.reset_peak_memory_stats()
        block(8)

    assert [phase.phase for phase in trace(code).replay().phases] == ["mine"]


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_that_were_made_on_meta_are_weights(compiled: bool) -> None:
    """A compiled model's modules run no hooks, so its weights are known by the optimizer that has them."""

    def code(on: Tracing) -> None:
        with torch.device("meta"):
            layer = torch.nn.Linear(512, 512, bias=False)
        layer.to_empty(device="cuda")
        optimizer = torch.optim.SGD(layer.parameters())
        layer(torch.empty(8, 512, device="cuda")).sum().backward()
        optimizer.step()

    kinds = [a.category for a in trace(code, compile=compiled).trace.allocations if a.nbytes == MIB]
    assert kinds == ["weights", "gradients"]


PROGRAM = """
import torch
from foretrain.predict.trace.card.patches import Patches

real = torch.tensor
with Patches() as patches:
    patches.set(torch, "tensor", lambda *args, **named: real(*args, **named))
    with torch.device("meta"):  # the first in this process
        torch.tensor([])
with torch.device("meta"):
    print(torch.tensor([]).device.type, torch.ones(2).device.type)
"""


def test_device_context_holds_for_new_tensors_after_a_trace() -> None:
    """transformers asks torch.tensor([]) which device it is loading a model on."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["meta", "meta"], ended.stderr
