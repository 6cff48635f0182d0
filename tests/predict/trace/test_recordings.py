"""Recordings beside traces, allocation by allocation: what is told of a difference, and of a bad file."""

import gzip
import json
import pickle
from pathlib import Path

import pytest

from benchmarks.accuracy import recordings, table
from benchmarks.accuracy.recordings import BadRecording, Life
from tests.kit.snapshots import EVENTS
from tests.kit.snapshots import recorded as snapshot

PLAIN = [Life(512, 2), Life(1024, None), Life(2048, 4), Life(512, None)]


def test_the_same_allocations_are_all_in_order_and_freed_alike() -> None:
    found = recordings.compare(PLAIN, PLAIN)
    assert (found["recorded"], found["traced"], found["in_order"], found["freed_alike"]) == (4, 4, 4, 4)
    assert found["only_recorded"] == found["only_traced"] == []


def test_missing_allocation_is_named_and_shifts_nothing() -> None:
    more = [PLAIN[0]._replace(freed_before=3), Life(99, None, "mm"), *PLAIN[1:2], Life(2048, 5), PLAIN[3]]
    found = recordings.compare(more, PLAIN)
    assert (found["in_order"], found["freed_alike"]) == (4, 4)
    assert found["only_traced"] == [{"bytes": 99, "op": "mm", "count": 1}]
    found = recordings.compare(PLAIN, more)
    assert found["only_recorded"] == [{"bytes": 99, "count": 1}]


def test_another_order_and_another_size_are_differences() -> None:
    swapped = [PLAIN[1], PLAIN[0], *PLAIN[2:]]
    assert recordings.compare(swapped, PLAIN)["in_order"] == 3
    larger = [*PLAIN[:2], PLAIN[2]._replace(nbytes=4096), PLAIN[3]]
    assert recordings.compare(larger, PLAIN)["in_order"] == 3


def test_what_is_freed_later_is_counted() -> None:
    later = [PLAIN[0]._replace(freed_before=3), *PLAIN[1:]]
    found = recordings.compare(later, PLAIN)
    assert (found["in_order"], found["freed_alike"]) == (4, 3)


def test_two_recordings_of_other_programs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MOST_DIFFERENCES", 5)
    with pytest.raises(BadRecording, match="more than 5 allocations differ"):
        recordings.in_order([1] * 10, [2] * 10)


def test_snapshots_and_their_events_are_read_alike(tmp_path: Path) -> None:
    data = snapshot(EVENTS)
    as_pickle, as_events = tmp_path / "a.pickle", tmp_path / "b.json.gz"
    as_pickle.write_bytes(pickle.dumps(data))
    events = [[e["action"], e.get("addr", 0), e["size"], 0] for e in data["device_traces"][0]]
    as_events.write_bytes(gzip.compress(json.dumps({"events": events}).encode()))
    lives = recordings.recorded(as_pickle)
    assert lives == recordings.recorded(as_events)
    assert len(lives) == sum(kind == "alloc" for kind, _, _ in EVENTS)
    assert recordings.find(tmp_path, "a") == as_pickle
    assert recordings.find(tmp_path, "b") == as_events
    with pytest.raises(BadRecording, match=r"has neither c\.pickle nor c\.json\.gz"):
        recordings.find(tmp_path, "c")


def packed(text: bytes) -> bytes:
    """The same at all times, or xdist's workers would not find the same tests."""
    return gzip.compress(text, mtime=0)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json.gz", b""),
        ("a.json.gz", b"no gzip"),
        ("a.json.gz", packed(b"{}")),
        ("a.json.gz", packed(b"[" * 100_000)),
        ("a.json.gz", packed(b'{"events": [["alloc", 1]]}')),
        ("a.json.gz", packed(b'{"events": [["alloc", "x", "y"]]}')),
        ("a.pickle", b"cos\nsystem\n(S'true'\ntR."),
        ("a.pickle", b""),
    ],
)
def test_a_damaged_or_hostile_recording_is_one_sentence(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadRecording, match="is not a recording"):
        recordings.recorded(tmp_path / name)


def test_the_record_is_of_all_recordings_and_says_what_differs() -> None:
    rows = json.loads(recordings.OUT.read_text("utf-8"))["rows"]
    known = {case.id for case in table.read().cases}
    assert [row["case"] for row in rows] == list(recordings.FILES)
    assert set(recordings.FILES) <= known
    for row in rows:
        assert row["recorded"] > 3000
        assert row["recorded"] - row["in_order"] == sum(one["count"] for one in row["only_recorded"])
        assert row["in_order"] == row["recorded"] or row["named"] != recordings.SWAPPED
