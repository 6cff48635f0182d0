"""macOS and Windows, as far as Linux can stand in for them: without what these systems lack, commands work or say so.

In a process of its own, what Linux alone has is taken away after Python's own library is loaded: functions of `os`,
signals, modules, and every file below /proc and /sys. `sys.platform` then names the other system. Nothing here shows
that a real Mac or a real Windows does the rest; .github/workflows/versions.yml asks them.
"""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from foretrain.base import processes
from foretrain.base.errors import UserError
from tests.kit.command import REPO
from tests.kit.runs import write_measured_run
from tests.kit.tiny import TINY, write_dataset

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux stands in for the others")

LACKS: dict[str, dict[str, list[str]]] = {
    "darwin": {
        "os": ["sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "memfd_create", "pipe2"],
        "signal": ["SIGRTMIN", "SIGPWR"], "modules": [],
    },
    "win32": {
        "os": [
            "fork", "killpg", "wait4", "wait3", "sched_getaffinity", "sched_setaffinity", "posix_fadvise", "nice", "getuid",
            "getloadavg", "sysconf", "statvfs", "mkfifo", "setsid", "getpgid", "uname", "pipe2",
            "tcgetpgrp", "tcsetpgrp", "WNOHANG", "posix_spawn", "chown", "getpriority", "openpty",
        ],
        "signal": ["SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGCONT", "SIGSTOP", "SIGWINCH", "SIGTTOU", "setitimer"],
        "modules": ["resource", "fcntl", "termios", "pty", "tty", "pwd", "grp", "posix"],
    },
}  # fmt: skip
WORK = """
import json, os, sys
asked = json.load(sys.stdin)
import asyncio, concurrent.futures, ctypes, logging, multiprocessing, platform, shutil, signal, subprocess, tempfile
import sysconfig, zoneinfo, pydantic.main, pydantic.fields, pydantic.root_model, yaml, rich.table, rich.progress
import email, http.client, ssl, unittest.mock, urllib.request, uuid, zipfile, psutil, numpy, filelock, rich.console, click
sysconfig.get_config_vars()
for name in asked["first"]:
    __import__(name)
for name in asked["os"]:
    if hasattr(os, name):
        delattr(os, name)
for name in asked["signal"]:
    if hasattr(signal, name):
        delattr(signal, name)
for name in asked["modules"]:
    sys.modules[name] = None

def of_psutil(depth=2):  # it reads /proc here, and asks the system's own functions elsewhere
    frame = sys._getframe(depth)
    return any("psutil" in name for name in (frame.f_globals["__name__"], frame.f_back.f_globals["__name__"]))

def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        path = os.fsdecode(arguments[0])
        if path.startswith(("/proc", "/sys/")) and not of_psutil():
            raise FileNotFoundError(2, "No such file or directory", path)

sys.addaudithook(hook)
sys.platform = asked["platform"]
if sys.platform == "win32":  # psutil says this of Windows alone
    from types import SimpleNamespace
    memory_info = psutil.Process.memory_info
    psutil.Process.memory_info = lambda self: SimpleNamespace(**memory_info(self)._asdict(), peak_wset=memory_info(self).rss)
import contextlib, io, importlib
for name in asked["imported"]:
    importlib.import_module(name)
from foretrain.cli import main
for words in asked["commands"]:
    sys.argv = ["foretrain", *words]
    text, code = io.StringIO(), 0
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            main()
        except SystemExit as end:
            code = end.code
    print("\\n" + json.dumps([words, code, text.getvalue()[-3000:]]), flush=True)
"""
CASES = REPO / "examples" / "real-cases"
CARD = ("--gpu", "RTX 4070")
PLANNED: list[tuple[str, ...]] = [
    ("plan", str(CASES / "c.py"), *CARD), ("plan", "baby", "--gpu", "cpu"),
    ("plan", "gpt2-124m", "--gpu", "Apple M1 Max", "--memory_limit=24GB"),
    ("plan", "smollm2-135m", "--method", "lora", "--seq-len=128", "--batch-size=1", *CARD), ("advise", "baby", *CARD),
    ("explain", str(REPO / "examples/logs/c-out-of-memory.log"), "--config", str(CASES / "c.py"), *CARD),
    ("compare", "one", "other"), ("report", "one", "--out", "one.html"), ("runs",), ("gpus",), ("--version",),
]  # fmt: skip


def run(
    platform: str, commands: list[tuple[str, ...]], *, first: tuple[str, ...] = (), modules: bool = False
) -> list[Any]:
    imported = sorted({*_modules()} - _needing_torch() - {ON_LINUX}) if modules else []
    asked = {**LACKS[platform], "platform": platform, "commands": commands, "first": first, "imported": imported}
    done = subprocess.run(
        [sys.executable, "-c", WORK], input=json.dumps(asked), capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(REPO), "COLUMNS": "100", "FORETRAIN_CACHE": str(Path("cache").absolute())},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]


def _modules() -> list[str]:
    paths = sorted((REPO / "foretrain").rglob("*.py"))
    names = [".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if not name.endswith("__main__")]


ON_LINUX = "foretrain.predict.trace.worker"  # the process that traces, which is started nowhere else
TORCH = "a library that not everybody has"
HEAVY = ("torch", "numpy", "starlette", "tokenizers", "transformers", "pyarrow", "safetensors", "uvicorn")


def _imports(name: str) -> set[str]:
    """What stands at the head of a module: names of ours, and TORCH for a library that not everybody has."""
    path = REPO / (name.replace(".", "/") + ".py")
    path = path if path.exists() else path.with_suffix("") / "__init__.py"
    source = path.read_text("utf-8")
    ours = re.findall(r"^from (foretrain[\w.]*) import (\([^)]*\)|.*)", source, re.MULTILINE)
    found = {room for room, _ in ours} | {
        f"{room}.{word}" for room, words in ours for word in re.findall(r"\w+", words)
    }
    return found | ({TORCH} if re.search(rf"^(import|from) ({'|'.join(HEAVY)})\b", source, re.MULTILINE) else set())


@cache
def _needing_torch() -> set[str]:
    """Modules that import torch or a library of an extra, themselves or through others of ours; they are asked in the
    training test, and not one by one."""
    imports, found = {name: _imports(name) for name in _modules()}, {TORCH}
    while more := {name for name, others in imports.items() if others & found} - found:
        found |= more
    return found


@pytest.fixture
def folder(own_directory: Path) -> Path:
    write_measured_run(own_directory / "one")
    write_measured_run(own_directory / "other", seed=2)
    write_dataset(own_directory / "data" / "toy")
    return own_directory


@pytest.mark.parametrize("platform", LACKS)
def test_planning_and_looking_back_work(platform: str, folder: Path) -> None:
    failed = [(words, code, text) for words, code, text in run(platform, PLANNED) if code]
    assert not failed


@pytest.mark.slow
@pytest.mark.parametrize("platform", LACKS)
def test_every_module_without_torch_can_be_imported(platform: str, folder: Path) -> None:
    ((_, code, _),) = run(platform, [("--version",)], modules=True)
    assert code == 0


@pytest.mark.parametrize("platform", LACKS)
def test_training_works(platform: str, folder: Path) -> None:
    words = ("train", *(f"--{name}={value}" for name, value in TINY.items()), "--out_dir=trained", "--json")
    done = run(
        platform, [words, ("sample", "trained", "--tokens", "2", "--prompt", "a")], first=("torch", "torch._dynamo")
    )
    (_, code, text), _ = done
    assert code == 0, text
    (record,) = Path().glob("trained/run.json")
    assert json.loads(record.read_text())["status"] == "finished"


def test_what_windows_cannot_do_is_said(folder: Path) -> None:
    commands = [("plan", "gpt2-30m", *CARD, "--exact"), ("tune", "baby", "--device=cpu", "--budget", "20s")]
    exact, tune = run("win32", commands, first=("torch", "torch._dynamo"))
    assert "exact tracing works on Linux; this is win32" in " ".join(exact[2].split())
    assert tune[1] == 4, tune[2]
    assert "Linux, macOS or WSL" in " ".join(tune[2].split())
    assert "Traceback" not in exact[2] + tune[2]


def test_mps_is_refused_in_a_sentence(folder: Path) -> None:
    ((_, code, text),) = run("darwin", [("train", "baby", "--device=mps")], first=("torch", "torch._dynamo"))
    assert code == 4
    assert "Apple" in text


def test_child_hears_of_its_parents_end_through_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.heeding(5) == {"pass_fds": (5,), "start_new_session": True}
    monkeypatch.setattr(os, "name", "nt")
    assert processes.heeding(5) == {}


def test_forks_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    processes.need_fork("x")
    monkeypatch.delattr(os, "fork")
    with pytest.raises(UserError, match="Linux, macOS or WSL"):
        processes.need_fork("x")
