"""The command line as a user runs it, within this process."""

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO
from unittest import mock

import pytest
from rich.console import Console

from foretrain.base.errors import UserError

REPO = Path(__file__).parents[2]


def foretrain(
    *words: str,
    cwd: Path | None = None,
    timeout: float = 600,
    apart: bool = False,
    code: int | None = None,
    says: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does, and check that it ends with `code`, `says` this on stderr, and shows no
    traceback. Within this process, as importing torch takes seconds; `apart`: in its own."""
    command = [sys.executable, "-c", "from foretrain.cli import main; main()", *words]
    if apart or cwd is not None:
        env = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
        result = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout, check=False, env=env)
    else:
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="\n") for _ in range(2))
        ended, texts = _main(words, out, err), []
        for stream in (out, err):
            stream.flush()
            texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
        result = subprocess.CompletedProcess(command, ended, *texts)
    assert code is None or result.returncode == code, (result.returncode, result.stdout, result.stderr)
    assert says in " ".join(result.stderr.replace("│", " ").split()) or says in result.stderr, result.stderr
    assert "Traceback" not in result.stderr or os.environ.get("FORETRAIN_DEBUG"), result.stderr
    return result


@contextlib.contextmanager
def refused(
    id: str | None = None, *, code: int | None = None, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Check that what is inside ends in an error of the user's with this id, exit code and text."""
    with pytest.raises(UserError, match=match) as caught:
        yield caught
    assert id is None or caught.value.id == id, str(caught.value)
    assert code is None or caught.value.exit_code == code, str(caught.value)


def first_screen(command: str, *words: str, most_lines: int) -> subprocess.CompletedProcess[str]:
    """What a command prints at 80 columns, in the repository's folder: it succeeds, in so many lines, none wider."""
    with mock.patch.dict(os.environ, {"COLUMNS": "80"}), contextlib.chdir(REPO):
        result = foretrain(command, *words)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) <= most_lines
    assert max(map(len, lines)) <= 80
    return result


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def watched(*words: str, code: int = 0) -> str:
    """What somebody sees move on stderr while a command runs, and ends with this exit code."""
    from foretrain.cli import common

    screen = Terminal()
    with mock.patch.object(common, "ERR", Console(file=screen, force_terminal=True, width=120)):
        assert _main(words, io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()) == code
    return screen.getvalue()


def _main(words: Sequence[str], out: TextIO, err: TextIO) -> int:
    from foretrain.cli import common, main

    common.OUT.width = common.ERR.width = int(os.environ.get("COLUMNS", "120"))  # as a process of its own would begin
    threads = torch.get_num_threads() if (torch := sys.modules.get("torch")) else 0
    on_term = signal.getsignal(signal.SIGTERM)  # a stopped run leaves it ignored, as its process ends
    with (
        mock.patch.object(sys, "argv", ["foretrain", *words]), mock.patch.object(sys, "stdout", out),
        mock.patch.object(sys, "stderr", err), mock.patch.dict(os.environ, TERM="xterm"), warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        try:
            main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0
        except Exception:
            traceback.print_exc(file=err)
            return 1
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_term)
            if torch and threads:
                torch.set_num_threads(threads)
    return 0


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints, run in this process."""
    from foretrain.cli import app

    capsys.readouterr()
    with contextlib.suppress(SystemExit):
        app(list(words))
    return capsys.readouterr().out


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
