"""The page docs/before-and-after.md: nine wrong answers as a new user met them, and what the same commands say now.

`BEFORE` is quoted from the notes of that trial, at a34ef7a. What stands under "now" is printed by the commands,
which run in a folder of their own: nanoGPT's settings (examples/nanogpt), two logs and two runs that are written below.

    python docs/before_after.py            write the page (half a minute: each command is a process of its own)
    python docs/before_after.py --check    exit with 1 where it is out of date
"""

import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foretrain.config.options import RunConfig
from foretrain.data.dataset import DatasetInfo
from foretrain.hardware.catalogue import find
from foretrain.training.store import SCHEMA, RunRecord

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "before-and-after.md"
HEAD = """# Nine answers, before and after

Somebody who had never seen foretrain cloned it at commit a34ef7a, followed the README, and wrote down nine answers that were wrong, crashed or
did nothing. This page shows each: what was seen then, quoted, and what the same commands print now. `docs/before_after.py` runs them
and writes the page. The configs have the settings of nanoGPT's own files (`examples/nanogpt`); the logs and the runs of S1, S3 and S8
are made up, so their speeds are not those of a GPU.

"""
MOST_LINES, WIDTH = 12, 100
TINY = (
    "--n_layer=1 --n_head=1 --n_embd=16 --block_size=16 --batch_size=2 --gradient_accumulation_steps=1 --max_iters=3 "
    "--warmup_iters=1 --lr_decay_iters=3 --eval_iters=1 --device=cpu --compile=false --dataset=python-stdlib --tokenizer=byte"
)


@dataclass(frozen=True)
class Case:
    """`ready` runs first and is not shown. Of what `commands` print, the lines from the one with `start` on, at most
    `lines`, with those alone that hold one of `only`."""

    id: str
    title: str
    before: str
    commands: tuple[str, ...]
    ready: tuple[str, ...] = ()
    start: str = ""
    only: tuple[str, ...] = ()
    lines: int = MOST_LINES


CASES = (
    Case(
        "S1", "Two logs of nanoGPT that print log_interval",
        "40 lines of raw Python traceback, KeyError: 'run', exit code 1.",
        ("foretrain compare run1.log run2.log",),
    ),
    Case(
        "S2", "nanoGPT's most used config, its data not prepared",
        "30.0 M parameters, 6.73 GiB, 93 ms a step, and no word about the guessed vocabulary of 50,304.\n"
        "True for that data (65 ids): 10.7 M, 1.9 GiB, 35 ms.",
        ("foretrain plan config/train_shakespeare_char.py --gpu 4070",),
    ),
    Case(
        "S3", "A watched run in nanoGPT's folder, explained",
        "This config does not belong to this log: Vocabulary: 85 in the log, 50,304 of the config.",
        ("foretrain explain watch --gpu 4070",),
        ready=("foretrain watch -- python train.py config/train_shakespeare_char.py",), start="What to know", lines=2,
    ),
    Case(
        "S4", "Advice for a fine-tuning that does not fit",
        "The only advice: A100 PCIe 40GB, needs 35.51 GiB, saves 0 B. --apply 1 --write ft.toml wrote a file that still\n"
        "did not fit, exit code 0.",
        ("foretrain advise config/finetune_shakespeare.py --gpu 4070",),
    ),
    Case(
        "S5", "Advice that is written to a file",
        "n1.toml planned to \"nanoGPT does not fit\" as before; --write new.py was refused.",
        (
            "foretrain advise config/train_gpt2.py --gpu 4070 --used-by-others 2GB --apply 1 --write n1.py",
            "foretrain advise config/train_gpt2.py --gpu 4070 --used-by-others 2GB --apply 4 --write n4.py --quiet",
            "foretrain plan n4.py --gpu 4070 --used-by-others 2GB --check",
        ),
        lines=8,
    ),
    Case(
        "S6", "--check in a script that starts nanoGPT",
        "Exit code 0, while the headline said that nanoGPT does not fit.",
        ("foretrain plan config/train_gpt2.py --gpu 4070 --used-by-others 2GB --check",), lines=6,
    ),
    Case(
        "S7", "A rented card beside one's own",
        "RTX 4090: power 82.90 + rent 221.58 = 304.48, and the cheapest card was decided on that sum.",
        ('foretrain plan config/train_gpt2.py --gpu "3060,4070,4090" --price "4090=0.35"',), lines=24,
    ),
    Case(
        "S8", "One run that was resumed and changed its speed",
        "Four figures for one step: compare RUN and the report 802 ms, explain RUN 1.75 s, compare RUN RUN2 1,629 ms.",
        ("foretrain compare out-my", "foretrain explain out-my", "foretrain compare out-my out-demo", "foretrain runs"),
        only=(
            "one step", "A steady step takes", "speed changed", "Every command", "ms per iteration", "  tokens/s", "  finished  ",
        ),
    ),
    Case(
        "S9", "--resume auto on a run that is finished",
        '"nothing to resume under out; starting a new run", and 60 steps were trained again into out-2.',
        (f"foretrain train {TINY} --out_dir=out --resume auto",),
        ready=(f"foretrain train {TINY} --out_dir=out",), lines=4,
    ),
)  # fmt: skip

_NANOGPT = """import sys
print(f"Overriding config with {sys.argv[1]}:")
print(open(sys.argv[1]).read())
print("tokens per iteration will be: 16,384")
print("found vocab_size = 85 (inside data/shakespeare_char/meta.pkl)")
for i in range(40):
    print(f"iter {i}: loss {4 - i / 50:.4f}, time 41.00ms, mfu -100.00%")
"""


def folder(path: Path) -> None:
    """Everything that the commands find: configs, two logs, a stand-in that prints what nanoGPT prints, two runs."""
    shutil.copytree(ROOT / "examples" / "nanogpt" / "config", path / "config")
    for name, rate, ms in (("run1", "1e-3", 41.0), ("run2", "3e-3", 41.4)):
        lines = [f"iter {i}: loss {4 - i / 50:.4f}, time {ms + i % 3 / 10:.2f}ms, mfu -100.00%" for i in range(40)]
        head = f"Overriding: log_interval = 1\nOverriding: learning_rate = {rate}\ntokens per iteration will be: 768\n"
        (path / f"{name}.log").write_text(head + "\n".join(lines) + "\n")
    _run(path / "out-my", lambda step: 1.75 if step < 46 else 0.8, resumed=True)
    _run(path / "out-demo", lambda step: 0.2, resumed=False)


def _data(path: Path) -> None:
    """The prepared data and the program of S3; S2 is about a folder without them."""
    (path / "configurator.py").write_text("")
    (path / "train.py").write_text(_NANOGPT)
    data = path / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        (data / f"{split}.bin").write_bytes(bytes(20_000))
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 85, "stoi": {}, "itos": {}}))


def _run(path: Path, step_s: Callable[[int], float], *, resumed: bool) -> None:
    """A run's folder as the trainer leaves it, with these times of its steps."""
    path.mkdir()
    config = RunConfig(
        n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=256, batch_size=8, gradient_accumulation_steps=1,
        max_iters=100, compile=False, dataset="text", out_dir=path.name,
    )  # fmt: skip
    record = RunRecord(
        id=path.name, name=path.name, status="finished", started_at="2026-11-22T00:00:00+00:00", config=config,
        gpu=find("RTX 4070"), dtype="float32", compiled=False, n_params=100_000, steps_done=100, wall_s=130.0,
        dataset=DatasetInfo(name="text", path="text", train_tokens=20_000, val_tokens=2_000, fingerprint="0" * 16),
        resumed_from=(46,) if resumed else (),
    )  # fmt: skip
    (path / "run.json").write_text(json.dumps(record.to_json(schema=SCHEMA)))
    lines = [
        {"kind": "step", "step": i, "loss": 5 - i / 50, "grad_norm": 1.0, "learning_rate": 1e-3, "step_s": step_s(i),
         "tokens_per_s": config.tokens_per_step / step_s(i), "mfu": None, "memory_bytes": None, "elapsed_s": float(i),
         "eta_s": 0.0}
        for i in range(100)
    ]  # fmt: skip
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def said(command: str, where: Path) -> str:
    """What a command prints, on both streams in their order, with its exit code at the end."""
    words = shlex.split(command)
    words = [sys.executable, "-m", *words] if words[0] == "foretrain" else words
    words = [sys.executable if word == "python" else word for word in words]
    environment = {
        **os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1", "PYTHONPATH": str(ROOT), "HOME": str(where),
        "FORETRAIN_CACHE": str(where / "cache"), "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    ended = subprocess.run(
        words, cwd=where, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return f"{ended.stdout.rstrip()}\n(exit code {ended.returncode})"


def _picked(text: str, case: Case) -> str:
    *lines, code = text.splitlines()
    start = next((i for i, line in enumerate(lines) if case.start in line), 0)
    kept = [line.rstrip() for line in lines[start:] if not case.only or any(word in line for word in case.only)]
    more = ["…"] if len(kept) > case.lines else []
    return "\n".join([*kept[: case.lines], *more, code])


def cases() -> str:
    """Every case: the commands, what was seen before, what they print now."""
    parts = []
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch)
        folder(where)
        for case in CASES:
            if case.id == "S3":
                _data(where)
            for command in case.ready:
                said(command, where)
            now = "\n\n".join(f"$ {command}\n{_picked(said(command, where), case)}" for command in case.commands)
            now = now.replace(scratch, "~")
            parts.append(
                f"## {case.id}. {case.title}\n\nBefore:\n\n```text\n{case.before}\n```\n\nNow:\n\n```text\n{now}\n```"
            )
    return "\n\n".join(parts)


if __name__ == "__main__":
    content = HEAD + cases() + "\n"
    if "--check" in sys.argv:
        sys.exit(int(not PAGE.is_file() or PAGE.read_text("utf-8") != content))
    PAGE.write_text(content, "utf-8")
