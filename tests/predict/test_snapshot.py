"""Memory snapshots: read safely, replayed, compared with the recording, and written so that PyTorch opens them."""

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.base import files
from foretrain.predict import snapshot
from foretrain.predict.allocator.blocks import Lifetimes, usual
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.snapshot import Label, snapshot_of, write
from foretrain.predict.trace.record import Recorder
from tests.kit.lifetimes import export, replayed
from tests.kit.recordings import compare_with_recorded
from tests.kit.snapshots import EVENTS, LABELS, MIB, SIDE, recorded

EXPANDABLE = Settings(expandable_segments=True)
WAYS = [Settings(), EXPANDABLE, Settings.parse("max_split_size_mb:32,roundup_power2_divisions:4")]


# -- reading -----------------------------------------------------------------------------------------------


def test_a_snapshot_is_read_from_its_pickle(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(recorded()))
    recording = snapshot.read(file)
    address = usual().new(30 * MIB)
    assert recording.entries[:2] == (("segment_alloc", address, 30 * MIB, 0), ("alloc", address, 30 * MIB - 100, 0))
    assert recording.settings == Settings()
    assert recording.reserved_at_end_bytes == 82 * MIB
    assert recording.reserved_before_bytes == 0
    assert len(recording.live_at_end) == 3


class Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_would_run_something_is_refused_by_name(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    hostile = recorded()
    hostile["device_traces"][0].append(Harm(touched))
    with pytest.raises(ValueError, match=r"^s\.pickle: it wants to load (posix|nt)\.system, ") as caught:
        snapshot.parse(pickle.dumps(hostile), "s.pickle")
    assert "\n" not in str(caught.value)
    assert not touched.exists()


# Without a class: INST, OBJ, EXT1, a persistent id, BUILD on a list, and the older text forms.
@pytest.mark.parametrize(
    "data",
    [
        b"(S'touch /nonexistent'\nios\nsystem\n.",
        b"cos\nsystem\n(S'true'\ntR.",
        b"(cos\nsystem\nS'true'\no.",
        b"\x82\x01.",
        b"Pfile\n.",
        b"](K\x01b.",
        b"\x80\x63.",
        b"",
        b".",
        b"\x80\x04]\x94(h\x05.",
        b"not a pickle at all",
        b"\x80\x02}r\xff\xff\xff\x07.",  # gigabytes of memo
        b"(dp99999999999\n.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
    ],
)
def test_damaged_and_hostile_pickles_end_in_one_sentence(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^s\.pickle: ") as caught:
        snapshot.parse(data, "s.pickle")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", [b"99999999", b"+99999999", b"9_999_9999", b"\t99999999 ", b"0x5f5e0ff"])
def test_memo_index_beyond_the_file_is_refused(place: bytes) -> None:
    with pytest.raises(ValueError, match="its memo has a place beyond"):
        files.load_pickle(b"(dp" + place + b"\n.")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_raise(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^snapshot: "):
        snapshot.parse(data)


@settings(deadline=None)
@given(st.data())
def test_a_snapshot_with_damaged_bytes_is_read_or_refused(data: st.DataObject) -> None:
    good = bytearray(pickle.dumps(recorded()))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        snapshot.parse(bytes(good))
    except ValueError as error:
        assert str(error).startswith("snapshot: ")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: [], "has no device_traces"),
        (lambda s: {}, "has no device_traces"),
        (lambda s: s | {"device_traces": "no"}, "has no device_traces"),
        (lambda s: s | {"device_traces": []}, "has 0 devices"),
        (lambda s: s | {"device_traces": [[7]]}, "entry 0 of its history has no action"),
        (lambda s: s | {"device_traces": [[{"action": 7, "size": 1}]]}, "entry 0 of its history has no action"),
        (lambda s: s | {"device_traces": [[{"action": "alloc", "addr": 1}]]}, "entry 0 .* needs whole numbers"),
        (lambda s: s | {"device_traces": [[{"action": "alloc", "size": -1}]]}, "entry 0 .* needs whole numbers"),
        (lambda s: s | {"segments": [{"device": 0}]}, "segments are not those"),
        (lambda s: s | {"segments": 5}, "segments are not those"),
        (
            lambda s: s | {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}},
            "cannot be simulated",
        ),
    ],
)
def test_what_is_no_snapshot_is_refused(change: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^snapshot: .*{sentence}"):
        snapshot.recording_of(change(recorded()))


def test_numbers_that_are_none_are_refused() -> None:
    for change in ({"total_size": float("inf")}, {"address": 1.5}, {"blocks": [{"state": "x", "size": "9"}]}):
        data = recorded()
        data["segments"][0] |= change
        with pytest.raises(ValueError, match="segments are not those"):
            snapshot.recording_of(data)


def test_shared_blocks_do_not_take_quadratic_time() -> None:
    """A small file can hold one list of blocks and refer to it from each of thousands of segments."""
    blocks = [{"size": 512, "state": "inactive"}] * 6
    data = recorded() | {"segments": [{"total_size": 1, "address": 1, "blocks": blocks}] * 6}
    with pytest.raises(ValueError, match="segments are not those") as caught:
        snapshot.parse(pickle.dumps(data))
    assert "two segments share their blocks" in str(caught.value.__context__)  # at the second, so none is read twice


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol_are_read(protocol: int) -> None:
    assert snapshot.parse(pickle.dumps(recorded(), protocol)) == snapshot.recording_of(recorded())


def test_an_odd_setting_does_not_hide_the_others() -> None:
    values = {"PYTORCH_CUDA_ALLOC_CONF": "something_new:1", "max_split_size": 12345, "expandable_segments": True,
              "garbage_collection_threshold": 0.5}  # fmt: skip
    read = snapshot.recording_of(recorded() | {"allocator_settings": values}).settings
    assert read == Settings(expandable_segments=True, garbage_collection_threshold=0.5)


def test_a_snapshot_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        write({}, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_an_action_of_a_newer_pytorch_is_passed_over() -> None:
    data = recorded()
    data["device_traces"][0].insert(3, {"action": "segment_dance", "addr": 1, "size": 2, "stream": 0})
    assert compare_with_recorded(snapshot.recording_of(data)).first_difference is None


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="device 1 is not among them"):
        snapshot.recording_of(recorded(), device=1)


@pytest.mark.parametrize("way", WAYS)
def test_settings_come_from_the_snapshot(way: Settings) -> None:
    data = recorded(way=way)
    assert snapshot.recording_of(data).settings == way
    # A newer PyTorch may know more keys; then what the snapshot says one by one must do.
    data["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "something_new:1"
    read = snapshot.recording_of(data).settings
    assert (read.expandable_segments, read.max_split_bytes) == (way.expandable_segments, way.max_split_bytes)


# -- comparing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_whole_recording_agrees(way: Settings) -> None:
    found = compare_with_recorded(snapshot.recording_of(recorded(way=way)))
    assert (found.first_difference, found.complete) == (None, True)
    assert found.same == len(found.recorded) == len(found.simulated) > 0
    assert found.simulated_peak_reserved_bytes == found.recorded_peak_reserved_bytes
    assert found.simulated_peak_allocated_bytes == replayed(EVENTS, way).stats["allocated_bytes.all.peak"]


def test_the_first_difference_is_found() -> None:
    data = recorded()
    wrong = next(entry for entry in data["device_traces"][0][2:] if entry["action"] == "segment_alloc")
    wrong["size"] += 2 * MIB
    found = compare_with_recorded(snapshot.recording_of(data))
    assert (found.first_difference, found.same) == (1, 1)
    assert (found.recorded[1].nbytes, found.simulated[1].nbytes) == (52 * MIB, 50 * MIB)
    data = recorded()
    data["device_traces"][0] = [e for e in data["device_traces"][0] if e["size"] != 2 * MIB]
    found = compare_with_recorded(snapshot.recording_of(data))
    assert found.first_difference == 2  # the recording is shorter


@pytest.mark.parametrize("way", WAYS)
def test_an_emptied_cache_is_followed(way: Settings) -> None:
    events = [*EVENTS, ("free", "x", 0), ("empty_cache", None, 0), ("alloc", "x", 60 * MIB)]
    found = compare_with_recorded(snapshot.recording_of(recorded(events, way)))
    assert found.first_difference is None
    assert {"free", "unmap"} & {entry.kind for entry in found.recorded}


@pytest.mark.parametrize("way", WAYS)
def test_simulator_releases_at_the_limit_of_the_recording(way: Settings) -> None:
    events = [*EVENTS, ("free", "x", 0), ("alloc", "x", 60 * MIB)]
    limit_bytes = 102 * MIB
    data = export(events, LABELS, way, limit_bytes, physical=True)
    found = compare_with_recorded(snapshot.recording_of(data), limit_bytes)
    assert found.first_difference is None
    assert found.out_of_memory_at is None
    # Two segments of 50 and 60 do not fit; expandable ones grow by a page instead and give nothing back.
    assert ("free" in {entry.kind for entry in found.simulated}) == (not way.expandable_segments)


def test_out_of_memory_is_told() -> None:
    recording = snapshot.recording_of(recorded())
    found = compare_with_recorded(recording, 40 * MIB)
    assert found.out_of_memory_at is not None
    assert recording.entries[found.out_of_memory_at].nbytes == 50 * MIB
    data = export(EVENTS, LABELS, limit_bytes=40 * MIB)
    assert data["device_traces"][0][-1]["action"] == "oom"
    assert data["device_traces"][0][-1]["device_free"] == 10 * MIB


def test_a_history_that_begins_late_says_so() -> None:
    data = recorded()
    data["device_traces"][0] = data["device_traces"][0][2:]  # as if the weights were there before
    found = compare_with_recorded(snapshot.recording_of(data))
    assert not found.complete
    assert (found.unknown_frees, found.unknown_live, found.reserved_before_bytes) == (0, 1, 30 * MIB)
    data["device_traces"][0] = data["device_traces"][0][2:]  # and the first activation
    found = compare_with_recorded(snapshot.recording_of(data))
    assert (found.complete, found.unknown_frees) == (False, 1)


def test_frees_without_their_completion_count_too() -> None:
    data = recorded()
    data["device_traces"][0] = [e for e in data["device_traces"][0] if e["action"] != "free_completed"]
    assert compare_with_recorded(snapshot.recording_of(data)).first_difference is None


def test_a_written_snapshot_says_on_which_stream_all_of_it_was() -> None:
    """b is freed while the default stream uses it, so it is complete at the next request; d never is."""
    data = recorded(SIDE)
    seen = [(e["action"], e["stream"], e["size"] // MIB) for e in data["device_traces"][0]]
    assert seen == [
        ("segment_alloc", 0, 30), ("alloc", 0, 30), ("free_requested", 0, 30), ("free_completed", 0, 30),
        ("segment_alloc", 9, 20), ("alloc", 9, 20), ("segment_alloc", 9, 2), ("alloc", 9, 0), ("free_requested", 9, 20),
        ("free_completed", 9, 20), ("alloc", 0, 25), ("alloc", 9, 10), ("free_requested", 9, 10),
    ]  # fmt: skip
    assert [(s["stream"], s["allocated_size"] // MIB, s["active_size"] // MIB) for s in data["segments"]] == [
        (0, 25, 25), (9, 0, 10), (9, 0, 0),
    ]  # fmt: skip
    states = {block["size"] // MIB: block["state"] for segment in data["segments"] for block in segment["blocks"]}
    assert states[25] == "active_allocated"
    assert data["segments"][1]["blocks"][0]["state"] == "active_pending_free"


@pytest.mark.parametrize("way", WAYS)
def test_a_recording_is_replayed_on_its_streams(way: Settings) -> None:
    found = compare_with_recorded(snapshot.recording_of(recorded(SIDE, way)))
    assert (found.first_difference, found.complete) == (None, True)
    assert {entry.stream for entry in found.simulated} == {0, 9}


def test_memory_that_another_stream_took_is_a_difference() -> None:
    """The default stream may not take what was freed on another one: where a recording says it did, it is told."""
    data = recorded(SIDE)
    for entry in data["device_traces"][0]:
        entry["stream"] = 0
    assert compare_with_recorded(snapshot.recording_of(data)).first_difference is not None


@pytest.mark.parametrize("stream", ["0", 1.5, None, [0]])
def test_a_stream_that_is_no_number_is_one_sentence(stream: object) -> None:
    data = recorded()
    data["device_traces"][0][1]["stream"] = stream
    with pytest.raises(ValueError, match="entry 1 of its history needs whole numbers as addr, size and stream"):
        snapshot.recording_of(data)


def test_a_recording_of_thousands_of_streams_is_replayed() -> None:
    side = [event for n in range(1, 3000) for event in (("stream", n, 0), ("alloc", n, 100), ("free", n, 0))]
    found = compare_with_recorded(snapshot.recording_of(recorded(side)))
    assert (found.first_difference, len(found.simulated)) == (None, 2999)


sizes = st.one_of(st.integers(1, 3 * MIB), st.integers(1, 60).map(lambda n: n * MIB))
programs = st.lists(st.one_of(sizes, sizes, st.integers(-1000, -1), st.just(0)), max_size=40)


def events_of(program: list[int]) -> list[tuple[str, Any, int]]:
    live: list[int] = []
    events: list[tuple[str, Any, int]] = []
    for id, number in enumerate(program):
        if number > 0:
            live.append(id)
            events.append(("alloc", id, number))
        elif number == 0:
            events.append(("empty_cache", None, 0))
        elif live:
            events.append(("free", live.pop(number % len(live)), 0))
    return events


@settings(deadline=None)
@given(programs, st.sampled_from(WAYS))
def test_any_program_written_and_read_again_agrees(program: list[int], way: Settings) -> None:
    found = compare_with_recorded(snapshot.parse(pickle.dumps(export(events_of(program), {}, way))))
    assert (found.first_difference, found.complete) == (None, True)


# -- writing -----------------------------------------------------------------------------------------------


def test_names_and_categories_reach_the_history_and_the_segments() -> None:
    data = recorded()
    births = [entry for entry in data["device_traces"][0] if entry["action"] == "alloc"]
    assert [entry["frames"][0]["name"] for entry in births] == [
        "transformer.wte.weight",
        "h.0.mlp.c_fc",
        "step",
        "h.0.mlp.c_fc",
    ]
    assert births[0]["frames"][1]["name"] == "embedding"
    assert [entry["category"] for entry in births] == ["weights", "activations", "unknown", "activations"]
    blocks = [block for segment in data["segments"] for block in segment["blocks"]]
    named = [block["frames"][0]["name"] for block in blocks if block["state"] == "active_allocated"]
    assert sorted(named) == ["h.0.mlp.c_fc", "step", "transformer.wte.weight"]
    assert {segment["segment_type"] for segment in data["segments"]} == {"small", "large"}
    assert sum(segment["total_size"] for segment in data["segments"]) == 82 * MIB


def test_an_empty_program_is_a_snapshot_too() -> None:
    assert export([], {})["device_traces"] == [[]]
    assert snapshot_of(Lifetimes(), lambda id: Label("never"))["segments"] == []


@pytest.mark.parametrize("way", WAYS)
def test_pytorch_opens_what_is_written(way: Settings) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    events = [*EVENTS, ("free", "x", 0), ("empty_cache", None, 0), ("alloc", "y", 20 * MIB)]
    data = export(events, LABELS, way)
    for plot in (viz.trace_plot, viz.segment_plot):
        assert "snapshot.pickle" in plot(copy.deepcopy(data))
    assert "Active Cached Memory Timeline" in viz.trace_plot(copy.deepcopy(data), plot_segments=True)
    summary = viz.segsum(data)  # checks that the blocks add up to their segments
    assert "total_allocated: 50.0MiB" in summary
    assert "= cudaMalloc(" in viz.trace(data) or way.expandable_segments
    names = viz.segments(data, format_flamegraph=lambda text: text)
    assert "transformer.wte.weight" in names
    assert "transformer.wte.weight" in viz.memory(data, format_flamegraph=lambda text: text)


def test_pytorch_opens_a_history_that_ends_in_out_of_memory() -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    text = viz.trace(export(EVENTS, LABELS, limit_bytes=40 * MIB))
    assert "raise OutOfMemoryError # 50.0MiB requested, 10.0MiB free" in text


def test_a_trace_is_written_to_a_file_as_a_whole(tmp_path: Path) -> None:
    recorder = Recorder()
    first = recorder.alloc(30 * MIB, "empty", "wte", (30, MIB), "int8")
    second = recorder.alloc(10 * MIB, "mm", "h.0", (10, MIB), "int8")
    recorder.free(first)
    recorder.alloc(0, "empty", "h.0", (0,), "int8")
    recorder.free(second)
    trace = recorder.finish()
    label = lambda id: Label(f"tensor {id}", "activations", (trace.allocations[id].op,))  # noqa: E731
    write(snapshot_of(trace, label), tmp_path / "trace.pickle")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.pickle"]
    recording = snapshot.read(tmp_path / "trace.pickle")
    assert [entry.action for entry in recording.entries] == [
        "segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "free_completed",
        "free_requested", "free_completed",
    ]  # fmt: skip
    assert compare_with_recorded(recording).first_difference is None


# -- a real card -------------------------------------------------------------------------------------------

# Allocates and frees at random, and writes what PyTorch recorded and counted.
PROGRAM = """
import json, random, sys, torch
torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
generator, live = random.Random(7), []
for _ in range(5000):
    if live and generator.random() < 0.48:
        live.pop(generator.randrange(len(live)))
    else:
        nbytes = generator.choice([generator.randrange(1, 4096), generator.randrange(1, 3 << 20),
                                   generator.randrange(1, 64) << 20, 1 << 20, 10 << 20, 20 << 20])
        live.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
    if generator.random() < 0.002:
        torch.cuda.empty_cache()
torch.cuda.memory._dump_snapshot(sys.argv[1])
json.dump(torch.cuda.memory_stats(), open(sys.argv[2], "w"))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_the_simulator_is_pytorchs_allocator_on_a_card(way: Settings, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA card")
    dumped, counted = tmp_path / "snapshot.pickle", tmp_path / "stats.json"
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": way.text()}
    subprocess.run([sys.executable, "-c", PROGRAM, dumped, counted], env=environment, check=True)
    recording = snapshot.read(dumped)
    assert recording.settings == way
    found = compare_with_recorded(recording)
    assert found.complete
    assert found.first_difference is None
    stats = json.loads(counted.read_text("utf-8"))
    assert found.simulated_peak_reserved_bytes == stats["reserved_bytes.all.peak"]
    assert found.simulated_peak_allocated_bytes == stats["allocated_bytes.all.peak"]
