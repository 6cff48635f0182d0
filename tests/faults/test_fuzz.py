"""The targets of the fuzzer read what is whole, its judge can say no, and what it once found stays repaired."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretrain.base.errors import UserError
from tests.faults.fuzz import targets
from tests.faults.fuzz.__main__ import fate_of
from tests.faults.fuzz.mutate import mutated, smallest
from tests.faults.fuzz.targets import TARGETS, Target, by_function
from tests.faults.harness import random_of
from tests.faults.inputs import alone
from tests.faults.limits import trials

FOUND = Path(targets.__file__).parent / "found"
PARTS = {
    "checkpoint"
}  # its seeds lack a model's weights; tests/training/exports/test_compatibility.py reads whole ones
CHANGED = 12  # files of each target in the suite; `make fuzz` reads thousands


@pytest.fixture(autouse=True)
def folder(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before = dict(os.environ)
    alone()
    yield own_directory
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("name", TARGETS)
def test_whole_files_are_read_and_changed_ones_end_well(name: str) -> None:
    seeds = TARGETS[name].seeds()
    read = {TARGETS[name].read(data) for data in seeds}
    assert read == {"refused"} if name in PARTS else "accepted" in read
    for number in range(CHANGED):
        data = mutated(seeds, random_of(7, name, number))
        assert not fate_of(name, data), data[:500]


@pytest.mark.parametrize("path", sorted(FOUND.glob("*--*")), ids=lambda path: path.name)
def test_what_was_found_stays_repaired(path: Path) -> None:
    assert not fate_of(path.name.split("--")[0], path.read_bytes())


def _raises(error: BaseException) -> Target:
    def read(path: Path) -> None:
        if b"x" in path.read_bytes():
            raise error

    return Target(lambda: [b"a"], by_function(read, name="f"))


def test_the_judge_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, said in (
        (ValueError("no"), "ValueError: no"), (MemoryError(), "MemoryError"), (KeyboardInterrupt(), "KeyboardInterrupt"),
        (UserError("data.snapshot", problem="\x1b[2J"), "UserError says"),
    ):  # fmt: skip
        monkeypatch.setitem(TARGETS, "made-up", _raises(error))
        assert fate_of("made-up", b"a") == ""
        assert fate_of("made-up", b"x").startswith(said)
    monkeypatch.setitem(TARGETS, "made-up", _raises(UserError("data.snapshot", problem="it is damaged")))
    assert fate_of("made-up", b"x") == ""


def test_what_never_ends_and_what_takes_all_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.faults import limits

    def grow(path: Path) -> object:
        return bytearray(8 << 30) if path.read_bytes() == b"m" else None

    def wait(path: Path) -> None:
        while path.read_bytes() == b"h":
            pass

    monkeypatch.setattr(limits, "CPU_S", 0.2)
    monkeypatch.setitem(TARGETS, "grows", Target(list, by_function(grow, name="f")))
    monkeypatch.setitem(TARGETS, "waits", Target(list, by_function(wait, name="f")))
    fates = trials(2, lambda n: {"fate": fate_of(*(("grows", b"m"), ("waits", b"h"))[n])}, alone)
    assert [each["fate"] for each in fates] == ["MemoryError", "hang"]


def test_a_file_is_made_as_small_as_still_fails() -> None:
    assert smallest(b"aaaaaaaaXbbbbbbbbbbbYcc", lambda data: b"X" in data and b"Y" in data) == b"XY"
