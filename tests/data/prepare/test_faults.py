"""Preparing through kills, full disks, signals and changes: what comes out is what an undisturbed run makes."""

import contextlib
import errno
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from foretrain.base.errors import ExitCode, UserError
from foretrain.data.prepare import engine, writer
from tests.kit import prepare as kit
from tests.kit.prepare import Disk, Killed

ROWS = kit.texts(80) + kit.texts(20)  # the last are duplicates
SETTINGS: dict[str, Any] = {"shard_tokens": 6_000, "dedup": True, "shuffle_buffer": 50}


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine as it is, with reader and workers in this process, in small batches, a snapshot after each second."""
    kit.in_one_process(monkeypatch)
    monkeypatch.setattr("foretrain.data.prepare.reader.BATCH_DOCUMENTS", 9)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # counted where that matters; waiting for disks is not


@pytest.fixture
def reference(own_directory: Path, inline: None) -> dict[str, str]:
    kit.write_jsonl(Path("a.jsonl"), ROWS)
    kit.run("a.jsonl", out="reference", **SETTINGS)
    found = kit.digests("reference")
    assert len(found) > 5
    return found


@pytest.mark.parametrize(("every_batch", "step"), [(True, 17), (False, 5), pytest.param(True, 1, marks=pytest.mark.slow),
                                                   pytest.param(False, 1, marks=pytest.mark.slow)])  # fmt: skip
def test_killed_at_any_operation_on_the_disk(
    every_batch: bool, step: int, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write (left half done), fsync and rename of a whole preparation in turn, and a second kill later on.

    Snapshots after each batch, and only with each shard; among the fast tests every 17th and every 5th operation.
    """
    monkeypatch.setattr(engine, "SNAPSHOT_S", -1.0 if every_batch else 1e9)
    killed_everywhere(monkeypatch, reference, step, SETTINGS)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_where_workers_read(step: int, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without a reader: its workers are given small ranges of the file."""
    monkeypatch.setattr(engine, "SNAPSHOT_S", -1.0)
    kit.small_ranges(monkeypatch)
    settings = {"shard_tokens": 6_000}
    kit.run("a.jsonl", out="by-workers", **settings)
    killed_everywhere(monkeypatch, kit.digests("by-workers"), step, settings)


def killed_everywhere(
    monkeypatch: pytest.MonkeyPatch, reference: dict[str, str], step: int, settings: dict[str, Any]
) -> None:
    at, finished = 1, False
    while not finished:
        shutil.rmtree("out", ignore_errors=True)
        for kill_at in (at, at // 2 + 3, None):
            with monkeypatch.context() as patch:
                Disk(patch, kill_at=kill_at)
                try:
                    kit.run("a.jsonl", **settings)
                    finished = kill_at == at
                    break
                except Killed:
                    continue
        assert kit.digests("out") == reference, at
        assert not Path("out/.progress").exists()
        at += step
    assert at > 30


def test_a_full_disk_at_any_offset(reference: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is needed and free is said, what was committed stays, and with room the rest is made as if nothing was."""
    sizes = [p.stat().st_size for p in Path("reference").glob("*.bin")]
    for room in random.Random(0).sample(range(2 * sum(sizes)), 25):
        shutil.rmtree("out", ignore_errors=True)
        with monkeypatch.context() as patch:
            Disk(patch, room_bytes=room)
            try:
                kit.run("a.jsonl", **SETTINGS)
            except UserError as error:
                assert (error.id, error.exit_code) == ("disk.full_prepare", ExitCode.DISK_FULL)
                assert error.values["free"] > 0
                assert error.values["needs"] > 0
                committed = kit.digests("out")
                assert all(reference[n] == d for n, d in committed.items() if n.endswith(".bin") and _in_state(n))
        kit.run("a.jsonl", **SETTINGS)
        assert kit.digests("out") == reference


def _in_state(name: str) -> bool:
    path = Path("out/.progress/state.json")
    return path.is_file() and f'"file": "{name}"' in path.read_text("utf-8")


def test_a_limit_of_the_system_on_file_size() -> None:
    """RLIMIT_FSIZE, in a process of its own: the kernel refuses, not a stand-in."""
    kit.write_jsonl(Path("a.jsonl"), kit.texts(2000))
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000));"
        "from foretrain.cli import main; sys.argv = ['foretrain', *sys.argv[1:]]; main()"
    )
    words = ["prepare", "a.jsonl", "--tokenizer", "byte", "--out", "o", "--workers", "1"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.DISK_FULL, done.stderr
    assert "left to write" in done.stderr
    assert Path("o/.progress/state.json").is_file()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shuffle_buffer": 7}, "shuffle_buffer was 50, is 7"),
        ({"tokenizer": "gpt2"}, "tokenizer was byte, is gpt2"),
        ({"max_tokens": 100}, "max_tokens was None, is 100"),
    ],
)
def test_other_settings_are_refused(
    changes: dict[str, Any], said: str, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(monkeypatch)
    for folder in ("out", "reference"):  # unfinished, and finished
        with pytest.raises(UserError, match="started with other settings") as caught:
            kit.run("a.jsonl", out=folder, **{**SETTINGS, **changes})
        assert said in str(caught.value)
    assert kit.run("a.jsonl", **{**SETTINGS, "workers": 3}).index is not None  # which decide nothing
    assert kit.digests("out") == reference


def stopped(monkeypatch: pytest.MonkeyPatch, out: str = "out") -> engine.Outcome:
    calls = iter(range(1000))
    done = engine.prepare(kit.options("a.jsonl", out=out, **SETTINGS), lambda: "SIGTERM" if next(calls) > 10 else "")
    assert done.index is None
    assert (done.signal, done.tokens > 6000) == ("SIGTERM", True)
    return done


def test_another_source_is_refused_and_restart_begins_anew(
    reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(monkeypatch)
    text = Path("a.jsonl").read_text("utf-8")
    Path("a.jsonl").write_text(text.replace("1", "2"), "utf-8")
    with pytest.raises(UserError, match="other contents"):
        kit.run("a.jsonl", **SETTINGS)
    os.utime("a.jsonl", ns=(5, 5))
    Path("a.jsonl").write_text(text, "utf-8")
    with pytest.raises(UserError, match="written to"):
        kit.run("a.jsonl", **SETTINGS)
    Path("out/notes.md").write_text("mine", "utf-8")
    assert kit.run("a.jsonl", restart=True, **SETTINGS).index is not None
    assert Path("out/notes.md").read_text("utf-8") == "mine"
    Path("out/notes.md").unlink()
    assert kit.digests("out") == reference


@pytest.mark.parametrize("what", ["train-00000.bin", ".progress/train", ".progress/state.json", ".progress/seen.bin"])
def test_damage_to_what_is_unfinished_is_noticed(
    what: str, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(monkeypatch)
    path = next(Path("out").glob(what + "*"))
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:-16] if path.suffix == ".bin" and "seen" not in what else data[:7])
    with pytest.raises(UserError, match="--restart"):
        kit.run("a.jsonl", **SETTINGS)


def test_two_preparations_in_one_folder(reference: dict[str, str]) -> None:
    from filelock import FileLock

    Path("out").mkdir()
    with FileLock(Path("out") / engine.LOCK), pytest.raises(UserError, match="another process"):
        kit.run("a.jsonl", **SETTINGS)
    assert kit.run("a.jsonl", **SETTINGS).index is not None


def test_files_of_others_are_left_alone(reference: dict[str, str]) -> None:
    for name in ("train.bin", "train-00000.bin"):
        shutil.rmtree("out", ignore_errors=True)
        Path("out").mkdir()
        Path("out", name).write_bytes(b"mine")
        for restart in (False, True):
            with pytest.raises(UserError, match="did not make"):
                kit.run("a.jsonl", restart=restart, **SETTINGS)
        assert Path("out", name).read_bytes() == b"mine"


def test_stdin_again_must_be_the_same(inline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read before is read again, checked, and not prepared twice."""
    rows = [json.dumps({"text": row}) + "\n" for row in ROWS]
    Path("in").write_text("".join(rows), "utf-8")
    Path("other").write_text("".join(rows[:20] + rows[21:]), "utf-8")

    def run(name: str, out: str, stop_at: int = 10_000) -> engine.Outcome:
        calls = iter(range(100_000))
        monkeypatch.setattr("foretrain.data.prepare.opened.os.fdopen", lambda *_, **__: io.FileIO(name))
        return engine.prepare(kit.options("-", out=out, dedup=True), lambda: "SIGINT" if next(calls) > stop_at else "")

    run("in", "reference")
    assert run("in", "out", stop_at=12).index is None
    with pytest.raises(UserError, match="stdin has other contents"):
        run("other", "out")
    assert run("in", "out").resumed
    assert kit.digests("out") == kit.digests("reference")


# -- real processes ----------------------------------------------------------------------------------------


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "foretrain", "prepare", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip


def written_bytes(out: Path) -> int:
    found = 0
    for path in out.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


def kill_and_go_on(kills: int, seed: int, out: str, words: list[str], longest_s: float, most_bytes: int) -> int:
    """Kill -9 at random times, at the latest once `most_bytes` were written, until it was killed that often or has
    finished; how often it was killed."""
    chance, killed = random.Random(seed), 0
    while True:
        before = written_bytes(Path(out))
        process = start(*words, "--out", out)
        if killed < kills:
            end = time.monotonic() + chance.uniform(0.1, longest_s)
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.005)
                now = written_bytes(Path(out))
                before = min(before, now)  # what was not whole is written again
                if now > before + most_bytes:
                    break
            process.kill()
        errors = process.communicate(timeout=600)[1]
        if process.returncode == -signal.SIGKILL:
            killed += 1
            continue
        assert process.returncode == 0, errors
        return killed


def prepared_by_kills(kills: int, rows: int, longest_s: float) -> int:
    for i in range(3):
        kit.write_kind(Path(f"in{i}.jsonl{'.gz' if i == 1 else ''}"), kit.texts(rows, seed=i) + kit.texts(50))
    words = ["in*", "--tokenizer", "byte", "--dedup", "--shuffle-buffer", "500", "--shard-tokens", "100k"]
    reference = start(*words, "--workers", "2", "--out", "reference")
    assert reference.communicate(timeout=600)[1] is not None
    assert reference.returncode == 0
    most_bytes = written_bytes(Path("reference")) // (2 * kills)
    killed = kill_and_go_on(kills, 1, "out", [*words, "--workers", "1"], longest_s, most_bytes)
    assert kit.digests("out") == kit.digests("reference")
    return killed


@pytest.mark.fault(
    "`kill -9` while data are prepared", row="B.4",
    sees="nothing; the same command goes on",
    safe="everything that was written: no document is lost or twice there",
)  # fmt: skip
def test_kill_9() -> None:
    assert prepared_by_kills(1, 3000, 1.2) == 1


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGTERM, signal.SIGHUP))]
)
def test_signals_stop_it_with_nothing_lost(number: signal.Signals) -> None:
    kit.write_jsonl(Path("a.jsonl"), kit.texts(40_000))
    words = ["a.jsonl", "--tokenizer", "byte", "--workers", "1", "--shard-tokens", "500k", "--out", "out"]
    process = start(*words)
    while not Path("out/train-00000.bin").exists():
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(number)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 75, errors
    assert "The same command continues" in errors
    state = json.loads(Path("out/.progress/state.json").read_text("utf-8"))
    assert state["splits"]["train"]["shards"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_limit_is_not_called_a_full_disk(number: int, tmp_path: Path) -> None:
    error = writer.as_user_error(OSError(number, os.strerror(number)), tmp_path, 2**20)
    assert error.exit_code == ExitCode.DISK_FULL
    assert ("disk is full" in str(error)) == (number == errno.ENOSPC)
    assert "1.0 MiB" in str(error)
