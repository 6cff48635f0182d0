"""Nothing goes out by itself: no command that was given files of this machine asks for an address, or connects to one.

The commands run in processes with an audit hook that Python itself calls (PEP 578) before it looks a name up, connects
or sends; their own children have it too. A hook does not see what a C library does by itself:
`python release/empty_root.py --train` runs the first commands where there is no network at all.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit.command import REPO
from tests.kit.runs import write_measured_run
from tests.kit.tiny import TINY, write_dataset

# In each process, before anything of ours. `refused`: as a machine without a network says it.
HOOK = """
import json, os, sys

def hook(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request"):
        with open(os.environ["NETWORK_LOG"], "a") as log:
            log.write(json.dumps([event, repr(arguments[:2])]) + "\\n")
        raise OSError(101, "Network is unreachable")

sys.addaudithook(hook)
"""
# All commands one after another in a process, as each would import torch anew.
WORK = """
import contextlib, io, json, sys
from foretrain.cli import main
for words in json.load(sys.stdin):
    sys.argv = ["foretrain", *words]
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([words, code, text.getvalue()[-2000:]]), flush=True)
"""
CASES = REPO / "examples" / "real-cases"
CARD = ("--gpu", "RTX 4070")
PLANNED: tuple[tuple[str, ...], ...] = (
    ("plan", str(CASES / "c.py"), *CARD, "--full"),
    ("plan", str(REPO / "examples/small-memory/gpt2-124m.toml"), "--gpu", "3060,4070", "--json"),
    ("plan", "baby", "--gpus", "2 x RTX 4090", "--gradient_accumulation_steps=2"),
    ("plan", "smollm2-135m", "--method", "lora", "--seq-len=128", "--batch-size=1", *CARD),
    ("plan", "baby", *CARD, "--within", "12h"),
    ("advise", "baby", *CARD),
    ("mfu", str(CASES / "b1.py"), "--tokens-per-s", "134k", *CARD),
    ("compare", f"B1={CASES}/b1.log+{CASES}/b1.py", f"B2={CASES}/b2.csv+{CASES}/b2.py", *CARD),
    ("compare", "one", "other"),
    ("explain", str(REPO / "examples/logs/c-out-of-memory.log"), "--config", str(CASES / "c.py"), *CARD),
    ("explain", str(REPO / "examples/snapshots/fragmented.pickle")),
    ("explain", "one"),
    ("report", "one", "--out", "one.html"),
    ("runs", "--json"),
    ("gpus",),
    ("languages",),
    ("doctor",),
    ("--help",),
    ("--version",),
)
TRAINED: tuple[tuple[str, ...], ...] = (
    ("prepare", "texts", "--out", "data/mine", "--tokenizer", "byte", "--val", "0.2"),
    ("data", "info", "data/mine"),
    ("data", "verify", "data/mine"),
    ("train", *(f"--{name}={value}" for name, value in TINY.items()), "--out_dir=trained"),
    ("train", *(f"--{name}={value}" for name, value in TINY.items()), "--dataset=data/mine", "--vocab_size=257",
     "--out_dir=mine", "--compile=false"),
    ("sample", "mine", "--tokens", "4", "--prompt", "a"),
    ("export", "mine", "--to", "hf", "--out", "written"),
    ("explain", "mine"),
    ("report", "mine", "--out", "mine.html"),
)  # fmt: skip


def run(commands: Sequence[tuple[str, ...]], folder: Path) -> tuple[list[Any], list[Any]]:
    """([words, exit code, what was printed] of each command, [event, its arguments] of the network)."""
    hooks, log = folder / "hooks", folder / "network.log"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(HOOK)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(hooks), str(REPO)]), "NETWORK_LOG": str(log), "COLUMNS": "100",
        "FORETRAIN_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "hf"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", WORK], input=json.dumps(list(commands)), cwd=folder, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [json.loads(line) for line in done.stdout.splitlines()], events


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_measured_run(tmp_path / "one")
    write_measured_run(tmp_path / "other", seed=2)
    return tmp_path


def assert_quiet(commands: Sequence[tuple[str, ...]], folder: Path) -> None:
    done, events = run(commands, folder)
    assert [words for words, _, _ in done] == [list(words) for words in commands]
    failed = [(words, text) for words, code, text in done if code]
    assert not failed
    assert not events


def test_planning_and_looking_back_reach_for_no_network(folder: Path) -> None:
    assert_quiet(PLANNED, folder)


def test_preparing_training_and_exporting_reach_for_no_network(folder: Path) -> None:
    write_dataset(folder / "data" / "toy")
    (folder / "texts").mkdir()
    for number in range(20):
        (folder / "texts" / f"{number}.txt").write_text(f"line {number} of a text, and one more of it. " * 20)
    assert_quiet(TRAINED, folder)


@pytest.mark.slow
def test_tracing_reaches_for_no_network(folder: Path) -> None:
    traced = ("--n_layer=2", "--compile=false", *CARD)
    assert_quiet(
        [("plan", "gpt2-30m", *traced, "--exact"), ("plan", "smollm2-135m", "--method", "lora", *CARD, "--exact")],
        folder,
    )


def test_what_is_asked_of_the_hub_is_seen_and_ends_in_a_sentence(folder: Path) -> None:
    """The hook sees the network, so that the tests above can fail."""
    pytest.importorskip("huggingface_hub")
    done, events = run([("plan", "hf:nobody/nothing", "--method", "lora", *CARD)], folder)
    (_, code, text) = done[0]
    assert code == 4
    assert "nobody/nothing" in text
    assert "Traceback" not in text
    assert events
