"""Devices, pipes with a name and links to them are refused at once; pipes of the shell and stdin are read, to a bound."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from foretrain.base import files as bounded
from foretrain.base.errors import UserError
from foretrain.runs import training_log
from foretrain.runs.training_log import parse_log, read_log, read_stream
from tests.kit.command import REPO, foretrain

B1 = REPO / "examples" / "real-cases" / "b1.log"
pytestmark = pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no such devices here")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, target in (("zero.log", "/dev/zero"), ("random.pickle", "/dev/urandom"), ("far.json", "zero.log")):
        Path(name).symlink_to(target)
    os.mkfifo("pipe.log")
    os.mkfifo("pipe.pickle")
    return tmp_path


@pytest.mark.parametrize("verb", ["explain", "report"])
def test_what_has_no_end_is_refused_in_a_sentence(folder: Path, verb: str) -> None:
    for name, says in (
        ("zero.log", "it is a device"), ("random.pickle", "it is a device"), ("far.json", "it is a device"),
        ("pipe.log", "it is a pipe"), ("pipe.pickle", "it is a pipe"), ("/dev/zero", "it is a device"),
    ):  # fmt: skip
        words = [verb, name] + (["--out", "q.html"] if verb == "report" else [])
        ended = foretrain(*words)
        assert (ended.returncode, ended.stderr.count("\n")) == (7, 1), (words, ended.stderr)
        assert says in ended.stderr


def test_comparing_and_naming_configs_and_data_refuse_them_too(folder: Path) -> None:
    for words in (
        ("compare", "zero.log", str(B1)), ("compare", "pipe.log", "zero.log"), ("compare", str(B1), "far.json"),
        ("plan", "gpt2-124m", "--gpu", "4070", "--init_from=/dev/zero"), ("prepare", "zero.log", "--out", "data"),
        ("export", "zero.log"), ("sample", "pipe.log"), ("runs", "zero.log"), ("data", "verify", "pipe.log"),
    ):  # fmt: skip
        ended = foretrain(*words)
        assert ended.returncode in (2, 7), (words, ended.stderr)
        assert "bug in foretrain" not in ended.stderr


def test_system_file_that_would_block_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /proc/kmsg, which says that it is empty and blocks."""

    def waits(file: int, count: int) -> bytes:
        raise BlockingIOError

    Path("empty.log").touch()
    monkeypatch.setattr(bounded.os, "read", waits)
    with pytest.raises(UserError, match="it is a device"):
        read_log(Path("empty.log"))


def test_a_pipe_of_the_shell_and_stdin_are_read(folder: Path) -> None:
    script = f"{sys.executable} -m foretrain explain <(cat {B1}) && {sys.executable} -m foretrain explain - < pipe.log"
    writer = subprocess.Popen(["bash", "-c", f"cat {B1} > pipe.log"])
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env=env, timeout=600)
    writer.wait()
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("51 steps, 0 to 10,000") == 2


def test_a_pipe_without_an_end_is_read_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_log, "MAX_CHARS", 2**20)
    with pytest.raises(UserError, match="larger than"):
        read_stream(io.BytesIO(b"nothing of note\n" * 2**17), "stdin")
    monkeypatch.setattr(training_log, "MAX_LINE_CHARS", 2**19)
    with pytest.raises(UserError, match="larger than"):
        read_stream(io.BytesIO(b"\0" * 2**21), "stdin")


def test_the_rest_of_an_enormous_line_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By how many pieces are looked at, not by a time."""
    step = "iter 1: loss 4.0, time 100.00ms, mfu 1.00%"
    text = "x" * 3_000_000 + step + "\n" + step.replace("iter 1", "iter 2") + "\n"
    path = tmp_path / "long.log"
    path.write_text(text)
    seen = []
    real = training_log.Reader.line
    monkeypatch.setattr(training_log.Reader, "line", lambda self, line: (seen.append(len(line)), real(self, line))[1])
    found = read_log(path)
    assert list(found.steps.number) == [2]
    assert sum(seen) < len(text)  # by each of four readers
    assert parse_log([step]).last_step == 1


def test_direction_mark_is_made_visible_and_deep_config_refused(tmp_path: Path) -> None:
    config = tmp_path / "deep.py"
    config.write_text("n_layer = " + "-" * 20_000 + "1")
    ended = foretrain("plan", str(config), "--gpu", "4070", code=2)
    assert "it is nested too deeply" in ended.stderr
    assert "MemoryError" not in ended.stderr


def test_a_report_of_a_log_refuses_what_it_has_no_use_for(tmp_path: Path) -> None:
    out = str(tmp_path / "r.html")
    for option, value in (
        ("--price", "nonsense"),
        ("--used-by-others", "%s%n"),
        ("--price", "0.35/h"),
        ("--used-by-others", "2GB"),
    ):
        foretrain("report", str(B1), option, value, "--out", out, code=2, says="has no effect")
    assert foretrain("report", str(B1), "--price", "", "--out", out).returncode == 2
    assert foretrain("report", str(B1), "--out", out).returncode == 0
