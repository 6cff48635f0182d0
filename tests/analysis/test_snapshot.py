"""`foretrain explain snapshot.pickle`: sums that PyTorch's own reader agrees with, stacks, failures, hostile files."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.cuda import _memory_viz

from foretrain.analysis import snapshot_analysis, snapshot_file
from foretrain.analysis.snapshot_analysis import SnapshotAnalysis, analyse, place_of
from foretrain.base.errors import UserError
from foretrain.predict.snapshot import Label
from tests.kit.command import foretrain, refused, said
from tests.kit.lifetimes import export, replayed
from tests.kit.snapshots import SIDE, recorded

MIB = 1 << 20
Frames = list[dict[str, Any]]


def frame(name: str, file: str, line: int = 1) -> dict[str, Any]:
    return {"name": name, "filename": file, "line": line}


TORCH = "lib/python3.12/site-packages/torch"
TO = [
    frame("convert", f"{TORCH}/nn/modules/module.py"),
    frame("_apply", f"{TORCH}/nn/modules/module.py"),
    frame("<module>", "train.py", 195),
]
FORWARD = [
    frame("linear", f"{TORCH}/nn/functional.py"),
    frame("forward", "model.py", 88),
    frame("_call_impl", f"{TORCH}/nn/modules/module.py"),
]
LOSS = [frame("cross_entropy", f"{TORCH}/nn/functional.py"), frame("forward", "model.py", 187)]
ADAM = [
    frame("_init_group", f"{TORCH}/optim/adamw.py"),
    frame("step", f"{TORCH}/optim/optimizer.py"),
    frame("<module>", "train.py", 310),
]
BACKWARD = [
    frame("_engine_run_backward", f"{TORCH}/autograd/graph.py"),
    frame("backward", f"{TORCH}/_tensor.py"),
    frame("<module>", "train.py", 300),
]


def block(
    address: int, size: int, frames: Frames | None, requested: int | None = None, state: str = "active_allocated"
) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": requested or size,
        "state": state,
        "frames": frames or [],
    }


def segment(address: int, blocks: list[dict[str, Any]], device: int = 0) -> dict[str, Any]:
    used = sum(b["size"] for b in blocks if b["state"] == "active_allocated")
    active = sum(b["size"] for b in blocks if b["state"] != "inactive")
    return {
        "device": device, "address": address, "total_size": sum(b["size"] for b in blocks), "allocated_size": used,
        "active_size": active, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "blocks": blocks,
    }  # fmt: skip


def by_hand() -> dict[str, Any]:
    """A program that ran out: 100 MiB of weights, 40 of moments, fragments of 2 x 40 free, 60 asked for."""
    big, moments, pieces = 1 << 40, 2 << 40, 3 << 40
    trace: list[dict[str, Any]] = []

    def add(action: str, address: int, size: int, frames: Frames, **more: int) -> None:
        trace.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": 0,
                "frames": frames,
                "time_us": len(trace),
                **more,
            }
        )

    for start, size, frames in ((big, 100, TO), (moments, 40, ADAM)):
        add("segment_alloc", start, size * MIB, frames)
        add("alloc", start, size * MIB, frames)
    add("segment_alloc", pieces, 120 * MIB, FORWARD)
    for i, size in enumerate((40, 20, 40, 20)):
        add("alloc", pieces + sum((40, 20, 40, 20)[:i]) * MIB, size * MIB, FORWARD if i % 2 else LOSS)
    for i in (0, 2):
        address = pieces + sum((40, 20, 40, 20)[:i]) * MIB
        add("free_requested", address, 40 * MIB, BACKWARD)
        add("free_completed", address, 40 * MIB, BACKWARD)
    trace.append(
        {"action": "oom", "size": 60 * MIB, "stream": 0, "frames": LOSS, "device_free": 8 * MIB, "time_us": 99}
    )
    state = [
        segment(big, [block(big, 100 * MIB, TO)]), segment(moments, [block(moments, 40 * MIB, ADAM)]),
        segment(pieces, [
            block(pieces, 40 * MIB, None, state="inactive"), block(pieces + 40 * MIB, 20 * MIB, FORWARD),
            block(pieces + 60 * MIB, 40 * MIB, None, state="inactive"), block(pieces + 100 * MIB, 20 * MIB, FORWARD),
        ]),
    ]  # fmt: skip
    return {"segments": state, "device_traces": [trace], "allocator_settings": {"expandable_segments": False}}


def written(snapshot: Any, name: str = "s.pickle") -> Path:
    path = Path(name)
    path.write_bytes(pickle.dumps(snapshot))
    return path


# -- sums and stacks ---------------------------------------------------------------------------------------


def test_a_program_that_ran_out_is_explained() -> None:
    found = snapshot_file.read(written(by_hand()))
    assert (found.allocated_bytes, found.reserved_bytes) == (180 * MIB, 260 * MIB)
    assert (found.split_bytes, found.largest_split_bytes, found.cached_bytes) == (80 * MIB, 40 * MIB, 0)
    assert (found.peak.allocated_bytes, found.peak_reserved_bytes) == (260 * MIB, 260 * MIB)
    assert found.peak.by_kind_bytes == {
        "optimizer": 40 * MIB, "logits": 80 * MIB, "weights": 100 * MIB, "activations": 40 * MIB,
    }  # fmt: skip
    (failure,) = found.failures
    assert (failure.asked_bytes, failure.free_bytes, failure.unused_bytes) == (60 * MIB, 8 * MIB, 80 * MIB)
    assert (failure.where, failure.made_by, failure.kind) == ("model.py:187 forward", "cross_entropy", "logits")
    assert failure.fits_expandable
    assert found.advice[0] == "expandable"
    top = found.at_failure.groups[0] if found.at_failure else None
    assert (top.kind, top.where, top.size_bytes) == ("weights", "train.py:195 <module>", 100 * MIB)


def test_pytorchs_own_reader_agrees_with_the_sums() -> None:
    for snapshot in (by_hand(), recorded()):
        found = analyse(snapshot, "s")
        active = sum(_memory_viz.calc_active(s) for s in snapshot["segments"])
        assert found.allocated_bytes + found.pending_bytes == active
        assert found.reserved_bytes == sum(s["total_size"] for s in snapshot["segments"])
        told = _memory_viz.segsum(snapshot)
        assert _memory_viz.Bytes(found.reserved_bytes).__repr__() in told


def test_a_snapshot_that_pytorch_made_itself() -> None:
    """Of a profile on the CPU, by PyTorch's own code: stacks and categories as it writes them."""
    from torch.profiler import ProfilerActivity, profile

    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    weights = sum(p.numel() for p in model.parameters())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True, record_shapes=True) as run:
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(512, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    made = _memory_viz._profile_to_snapshot(run)
    found = snapshot_file.read(written(made))
    assert found.from_profile
    assert (found.reserved_bytes, found.empty_segments) == (found.allocated_bytes, ())
    kinds = found.peak.by_kind_bytes
    assert kinds["optimizer"] == pytest.approx(2 * 4 * weights, rel=0.01)
    assert kinds["activations"] >= 512 * 1024 * 4 * 2
    assert found.peak.allocated_bytes < 6 * 4 * weights + 10 * 512 * 1024 * 4


@settings(max_examples=25)
@given(st.data())
def test_the_peak_is_that_of_a_plain_replay(data: st.DataObject) -> None:
    """Whatever is allocated and freed: the walk over the history against the simulator that wrote it."""
    events: list[tuple[str, Any, int]] = []
    alive: list[int] = []
    for i in range(data.draw(st.integers(1, 40))):
        if alive and data.draw(st.booleans()):
            events.append(("free", alive.pop(data.draw(st.integers(0, len(alive) - 1))), 0))
        else:
            events.append(("alloc", i, data.draw(st.integers(1, 30 * MIB))))
            alive.append(i)
    labels = {i: Label(f"t{i}", "activations") for i in range(40)}
    plain = replayed(events)
    found = analyse(export(events, labels), "s")
    assert found.peak_reserved_bytes == plain.stats["reserved_bytes.all.peak"]
    assert found.peak.allocated_bytes == plain.stats["requested_bytes.all.peak"]
    assert sum(group.size_bytes for group in found.peak.groups) == found.peak.allocated_bytes
    assert found.allocated_bytes == plain.stats["allocated_bytes.all.current"]
    cut = export(events, labels)
    cut["device_traces"][0] = cut["device_traces"][0][len(events) // 2 :]  # a ring buffer has lost the beginning
    late = analyse(cut, "s")
    assert late.peak.allocated_bytes <= found.peak.allocated_bytes
    assert late.peak.before_bytes + sum(g.size_bytes for g in late.peak.groups) == late.peak.allocated_bytes


@pytest.mark.parametrize(
    ("frames", "kind"),
    [(TO, "weights"), (FORWARD, "activations"), (LOSS, "logits"), (ADAM, "optimizer"), (BACKWARD, "backward"), ([], "unknown"),
     ([frame("flash_attention_forward", "attention.py")], "attention"), ([frame("getNewWorkspace", "CublasHandlePool.cpp")], "workspace"),
     ([frame("get_batch", "train.py")], "batch"), (None, "unknown"), ([7, {"name": 3}], "unknown")],
)  # fmt: skip
def test_kinds_are_guessed_by_names(frames: Any, kind: str) -> None:
    assert place_of(frames).kind == kind


def test_without_a_history_or_stacks_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    bare = {
        "segments": [
            segment(
                1 << 40, [block(1 << 40, 4 * MIB, None), block((1 << 40) + 4 * MIB, 60 * MIB, None, state="inactive")]
            )
        ]
    }
    found = analyse(bare, "s")
    assert (found.peak, found.failures) == (None, ())
    assert found.advice == ("empty_segments", "no_history", "no_frames")
    assert found.n_empty_segments == 1
    written(bare)
    shown = said(capsys, "explain", "s.pickle")
    assert "_record_memory_history" in shown
    assert "60.0 MiB that nothing uses" in shown


def test_the_device_that_holds_most_is_taken() -> None:
    two = by_hand()
    for part in two["segments"]:
        part["device"] = 1
    two["device_traces"] = [[], two["device_traces"][0]]
    found = analyse(two, "s")
    assert (found.device, found.devices, found.reserved_bytes) == (1, 2, 260 * MIB)


def test_expandable_segments_are_advised_only_where_they_help() -> None:
    full = by_hand()
    full["device_traces"][0][-1]["size"] = 500 * MIB
    found = analyse(full, "s")
    assert found.failures[0].fits_expandable is False
    assert found.advice[0] == "expandable_not_enough"


def test_the_views_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    written(by_hand())
    shown = " ".join(said(capsys, "explain", "s.pickle").split())
    assert "asked for 60.0 MiB. The driver had 8.0 MiB left, 52.0 MiB too little" in shown
    assert "80.0 MiB were reserved but unused, in separate pieces" in shown
    assert "model.py:187 forward" in shown
    found = json.loads(said(capsys, "explain", "s.pickle", "--json"))
    assert found.pop("schema") == "foretrain.explain/1#snapshot"
    assert SnapshotAnalysis.model_validate(found) == snapshot_file.read(Path("s.pickle"))
    with refused("usage.explain_config"):
        said(capsys, "explain", "s.pickle", "--config", "baby")


def test_several_streams_are_told_with_what_only_they_can_use(capsys: pytest.CaptureFixture[str]) -> None:
    data = recorded(SIDE)
    found = analyse(data, "s")
    assert [(s.stream, s.reserved_bytes // MIB, s.free_bytes // MIB) for s in found.streams] == [
        (0, 30, 5),
        (9, 22, 11),
    ]
    assert found.pending_bytes == 10 * MIB
    assert found.allocated_bytes == 25 * MIB + 512
    written(data)
    shown = " ".join(said(capsys, "explain", "s.pickle").split())
    assert "What is free on a stream, no other stream can take" in shown
    assert "0x9 22.0 MiB 12.0 MiB" in shown
    assert analyse(recorded(), "s").streams == ()


@pytest.mark.parametrize("stream", ["9", -1, None, 2.5, True])
def test_segment_without_a_stream_number_is_of_the_default_one(stream: object) -> None:
    data = recorded(SIDE)
    for segment in data["segments"]:
        segment["stream"] = stream
    assert analyse(data, "s").streams == ()


# -- hostile files -----------------------------------------------------------------------------------------


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch touched",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"segments": [], "device_traces": [[Harm()]]}), b"\x80\x04.", b"", b"\x80\x02cos\nsystem\n(S'true'\ntR.",
        b"\x80\x02}r\xff\xff\xff\x07.", pickle.dumps([1, 2]), pickle.dumps({"segments": 5}), pickle.dumps({"a": 1}),
        pickle.dumps({"segments": [{"total_size": 1}], "device_traces": [[]]}),
        pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "size": -1}]]}),
        pickle.dumps({"segments": [], "device_traces": []}), b"\x80\x04]\x94(h\x00" + b"h\x00" * 50 + b"e.",
    ],
)  # fmt: skip
def test_hostile_and_damaged_files_are_one_sentence(data: bytes) -> None:
    Path("s.pickle").write_bytes(data)
    answer = snapshot_file.answer_of("s.pickle", "s.pickle", -1)
    assert answer["problem"].startswith("s.pickle: ")
    assert "\n" not in answer["problem"]
    assert not Path("touched").exists()


def test_the_child_refuses_too_and_the_command_exits_with_7(capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [[Harm()]]}))
    with refused(code=7, match=r"wants to load (posix|nt)\.system"):
        said(capsys, "explain", "s.pickle")
    assert not Path("touched").exists()


@pytest.mark.parametrize(
    ("name", "data", "wrong"),
    [
        ("nope.pickle", None, "cannot be read (No such file or directory)"), ("nope", None, "No such file"),
        ("text.pickle", b"iter 10: loss 4.2", "is not a memory snapshot"), ("empty.pickle", b"", "is not a memory snapshot"),
        ("other.pickle", pickle.dumps({"a": 1}), "has no segments"), ("list.pickle", pickle.dumps([1]), "list.pickle: "),
        ("folder", "", "cannot be read (it is a folder)"), ("folder.pickle", "", "cannot be read (it is a folder)"),
    ],
)  # fmt: skip
def test_what_is_no_snapshot_is_said_with_what_to_do(name: str, data: bytes | str | None, wrong: str) -> None:
    if data == "":
        Path(name).mkdir()
    elif isinstance(data, bytes):
        Path(name).write_bytes(data)
    ended = foretrain("explain", name)
    assert (ended.returncode, ended.stdout) == (7, "")
    told = " ".join(ended.stderr.split())
    assert told.startswith(f"error: {name}: ")
    assert wrong in told
    assert "torch.cuda.memory._dump_snapshot(FILE)" in told
    assert "Traceback" not in told


def test_a_pickle_that_asks_for_memory_is_stopped() -> None:
    # Lists that each hold the one before ten times are small; a long of a gigabyte is not, nor is a copy of text.
    bomb = b"\x80\x04(" + b"X\x00\x00\x10\x00" + b"a" * (1 << 20) + b"\x940" + b"(h\x00" * 10 + b"e."
    Path("s.pickle").write_bytes(bomb)
    with pytest.raises(UserError) as caught:
        snapshot_file.read(Path("s.pickle"))
    assert caught.value.id.startswith("data.snapshot")


def test_shared_frames_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One list of frames that thousands of entries refer to is gone through once, not for each."""
    read = []
    real = snapshot_analysis.place_of
    monkeypatch.setattr(snapshot_analysis, "place_of", lambda *words: read.append(words) or real(*words))
    many = [frame(f"f{i}", "a.py") for i in range(5000)]
    trace = [{"action": "alloc", "addr": i, "size": 512, "stream": 0, "frames": many} for i in range(20_000)]
    analyse({"segments": [], "device_traces": [trace]}, "s")
    assert len(read) == 1


@settings(max_examples=60)
@given(st.data())
def test_a_snapshot_with_damaged_bytes_is_explained_or_refused(data: st.DataObject) -> None:
    good = bytearray(pickle.dumps(by_hand()))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    Path("s.pickle").write_bytes(bytes(good))
    answer = snapshot_file.answer_of("s.pickle", "s.pickle", -1)
    assert "problem" in answer or SnapshotAnalysis.model_validate(answer)
    json.dumps(answer)


def test_other_files_are_not_taken_for_snapshots() -> None:
    Path("a.log").write_text("iter 1: loss 1.0, time 1.0ms, mfu 1.00%")
    assert not snapshot_file.looks_like_one(Path("a.log"))
    assert not snapshot_file.looks_like_one(Path("missing.pickle"))
    assert snapshot_file.looks_like_one(written(by_hand(), "b.bin"))
    assert snapshot_analysis.SCHEMA == "foretrain.explain/1#snapshot"
