"""Processes of our own: what they say, how they end, and that nothing of them is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foretrain.base import processes
from foretrain.base.processes import Child, Frame, ProcessExit
from tests.kit.command import REPO

Start = Callable[..., Child]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Child] = []

    def begin(what: str, **options: object) -> Child:
        started.append(Child("tests.kit.a_child", what, **options))  # type: ignore[arg-type]
        return started[-1]

    yield begin
    for child in started:
        child.end()


def ends(pid: int) -> bool:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
        if not listed.stdout.strip() or listed.stdout.startswith("Z"):
            return True
        time.sleep(0.05)
    return False


def test_frames_go_both_ways_and_what_is_printed_is_none(start: Start) -> None:
    child = start("echoes")
    for value, payload in (({"a": [1, None, "é"]}, b""), (2.5, b"abc"), ("", os.urandom(3_000_000))):
        child.send(value, payload[:5], memoryview(payload)[5:])
        found = child.receive(60)
        assert found == Frame({"value": value, "bytes": len(payload)}, payload[::-1])
    assert child.receive(0.01) is None


@pytest.mark.parametrize(
    ("what", "code", "printed"),
    [("raises", 1, "ValueError: no such thing\n"), ("exits", 7, ""), ("is killed", -signal.SIGKILL, "")],
)
def test_how_it_ended_is_told_with_what_it_printed(what: str, code: int, printed: str, start: Start) -> None:
    child = start(what)
    frames = list(child)
    assert frames == ([Frame(1)] if what == "raises" else [])
    for _ in range(2):  # whoever asks again hears it again
        died = child.receive()
        assert isinstance(died, ProcessExit)
        assert (died.code, died.is_killed) == (code, what == "is killed")
        assert died.printed.endswith(printed)
    child.send("nobody hears it")


def test_a_module_that_is_not_there_is_an_end_as_well() -> None:
    child = Child("foretrain.no_such_module")
    died = child.receive(60)
    child.end()
    assert isinstance(died, ProcessExit)
    assert "No module named 'foretrain.no_such_module'" in died.printed


def test_a_child_waits_for_room_and_can_be_ended_meanwhile(start: Start) -> None:
    child = start("floods", most_waiting=2)
    assert child.receive(60) == Frame(0, bytes(10_000))
    time.sleep(0.3)
    assert child.process.poll() is None  # 10 MB do not lie here
    assert child.end() == -processes.KILL
    died = child.receive()
    assert isinstance(died, ProcessExit)
    assert [frame.value for frame in start("floods", most_waiting=2)] == list(range(1000))


def test_what_it_started_ends_with_it(start: Start) -> None:
    child = start("starts another")
    found = child.receive(60)
    assert isinstance(found, Frame)
    child.end()
    assert ends(found.value)


@pytest.mark.parametrize("what", ["starts another", "cleans up"])
def test_it_ends_with_its_parent(what: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import sys, time\nfrom foretrain.base.processes import Child\n"
        f"child = Child('tests.kit.a_child', {what!r}, log=open({str(log)!r}, 'wb'))\n"
        "print(child.pid, child.receive().value, flush=True)\ntime.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=REPO)
    pids = parent.stdout.readline().split()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all(ends(int(pid)) for pid in pids)
    assert log.read_text() == ("cleaned up\n" if what == "cleans up" else "")


def test_variables_can_be_given_and_kept_back(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT_BACK", "1")
    child = start("echoes", env={"GIVEN": "2"}, without=("KEPT_BACK",))
    child.send(0)
    assert child.receive(60) is not None
    if (environ := Path(f"/proc/{child.pid}/environ")).exists():
        listed = environ.read_bytes().split(b"\0")
        assert b"GIVEN=2" in listed
        assert b"KEPT_BACK=1" not in listed
