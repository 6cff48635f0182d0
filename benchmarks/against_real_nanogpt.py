"""nanoGPT's own train.py against `foretrain train`, as a user starts both: whole processes, in turn.

    git clone https://github.com/karpathy/nanoGPT && git -C nanoGPT checkout 3adf61e1
    python benchmarks/against_real_nanogpt.py --nanogpt nanoGPT                     (four runs, an hour on two cores)
    python benchmarks/against_real_nanogpt.py --nanogpt nanoGPT --only 4x128-1000 --rounds 1
    python benchmarks/against_real_nanogpt.py --nanogpt nanoGPT --device cuda --out gpu_real.json

Both read the same prepared folder with the same options, and start from a shell: imports, compilation, choosing,
evaluation and saving are in the wall time. `first start` is foretrain's with empty caches, the others are later ones.
Resident memory is the highest of the process, as the system counted it. A round in which other programs used a tenth
of the cores is told. nanoGPT runs without torch.compile on a CPU, as its README says, and compiled on a card. There
foretrain runs with its step as one CUDA graph and without. With `--caches FOLDER` both sides compile there first, all
runs side by side, and no first start is told: on a card that is lent by the minute.
"""

import argparse
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from against_nanogpt import OUTSIDE, Load, machine
from common import RESULTS, show, versions
from nanogpt_step import tokens_like_text

PROGRAM = ("train.py", "model.py", "configurator.py")
LINE = re.compile(r"^iter (\d+): loss ([\d.]+|nan), time ([\d.]+)ms", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """A run that both do. `characters`: on text by characters, as nanoGPT's README has it; else on 50,304 tokens."""

    name: str
    options: dict[str, Any]
    steps: int
    characters: bool = True
    most_minutes: float = 15.0
    ways: dict[str, dict[str, Any]] = field(default_factory=lambda: {"foretrain": {}})  # options of foretrain alone


# The options of nanoGPT's README for a CPU, on its config/train_shakespeare_char.py.
CHARACTERS = {
    "gradient_accumulation_steps": 1, "learning_rate": 1e-3, "min_lr": 1e-4, "beta2": 0.99, "warmup_iters": 100,
    "eval_iters": 20, "eval_interval": 250, "log_interval": 1, "dropout": 0.0, "always_save_checkpoint": False,
}  # fmt: skip
SMALL = {**CHARACTERS, "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12}
MIDDLE = {**CHARACTERS, "n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 8, "eval_iters": 5}
LARGE = {
    "gradient_accumulation_steps": 1, "block_size": 512, "batch_size": 8, "eval_iters": 1, "eval_interval": 1000,
    "log_interval": 1, "warmup_iters": 100,
}  # fmt: skip
ON_CPU = [
    Run("4x128-1000", SMALL, 1000),
    Run("4x128-2000", SMALL, 2000),
    Run("6x384-120", MIDDLE, 120),
    Run("124M", LARGE, 8, characters=False),
]
GRAPH = {"foretrain": {"cuda_graph": "on"}, "no graph": {"cuda_graph": "off"}}
ON_CARD = [
    Run("4x128-2000", SMALL, 2000, ways=GRAPH),
    Run("6x384-500", {**MIDDLE, "batch_size": 64, "eval_iters": 20}, 500, ways=GRAPH),
    Run("124M", {**LARGE, "block_size": 1024, "batch_size": 12, "gradient_accumulation_steps": 5, "eval_iters": 5}, 60,
        characters=False, ways={**GRAPH, "masters": {"master_weights": True}}),
]  # fmt: skip


def prepare(folder: Path) -> None:
    """A text by characters with its meta.pkl, and tokens of 50,304, as nanoGPT's prepare.py leaves them."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = "".join(path.read_text("utf-8", errors="ignore") for path in sources)[:6_000_000]
    text = "".join(c for c in text if c.isascii())
    letters = sorted(set(text))
    ids = np.array([letters.index(chr(c)) if chr(c) in letters else 0 for c in range(128)], dtype=np.uint16)
    data = ids[np.frombuffer(text.encode("ascii"), dtype=np.uint8)]
    draw = np.random.default_rng(0)
    many = tokens_like_text(draw, 4_000_000)
    for name, tokens in (("characters", data), ("many", many)):
        place = folder / "data" / name
        place.mkdir(parents=True)
        cut = int(len(tokens) * 0.9)
        tokens[:cut].tofile(place / "train.bin")
        tokens[cut:].tofile(place / "val.bin")
    meta = {"vocab_size": len(letters), "stoi": {c: i for i, c in enumerate(letters)}, "itos": dict(enumerate(letters))}
    (folder / "data" / "characters" / "meta.pkl").write_bytes(pickle.dumps(meta))


def words(options: dict[str, Any]) -> list[str]:
    return [f"--{key}={value}" for key, value in options.items()]


@dataclass
class Card:
    """The highest memory in use on the card while a process runs, asked of the driver ten times a second."""

    on: bool
    peak_bytes: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        while not self.stop.wait(0.1):
            self.peak_bytes = max(self.peak_bytes, int(pynvml.nvmlDeviceGetMemoryInfo(handle).used))

    def __enter__(self) -> "Card":
        if self.on:
            threading.Thread(target=self.watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()


def timed(
    command: list[str], cwd: Path, environment: dict[str, str], log: Path, most_s: float, on_card: bool
) -> dict[str, Any]:
    """A whole process: seconds, highest resident memory, and what it left on standard output."""
    load, began = Load(), time.perf_counter()
    with log.open("w") as out, Card(on_card) as card:
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=out, stderr=subprocess.STDOUT)
        killer = threading.Timer(most_s, process.kill)
        killer.start()
        _, status, usage = os.wait4(process.pid, 0)
        killer.cancel()
    code = os.waitstatus_to_exitcode(status)
    if code:
        raise RuntimeError(f"{command[1]} ended with {code}: {log.read_text()[-400:]}")
    return {
        "wall_s": time.perf_counter() - began, "resident_bytes": usage.ru_maxrss * 1024, "card_bytes": card.peak_bytes,
        "outside_share": load.outside(),
    }  # fmt: skip


def steady(times: list[float]) -> float:
    """The median of the later half: what is compiled, chosen and warmed up is over by then."""
    return median(times[len(times) // 2 :])


def caching(caches: Path) -> dict[str, str]:
    """The environment of a process whose compiled kernels and choices are kept in a folder of its own."""
    return {
        **os.environ, "FORETRAIN_CACHE": str(caches / "foretrain"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }  # fmt: skip


def nanogpt(run: Run, home: Path, device: str, out: Path, caches: Path) -> dict[str, Any]:
    """nanoGPT's train.py, to its end."""
    options = {
        **run.options, "max_iters": run.steps, "lr_decay_iters": run.steps, "dataset": "characters" if run.characters else "many",
        "device": device, "compile": device != "cpu", "out_dir": str(out), "wandb_log": False,
    }  # fmt: skip
    log, command = out.with_suffix(".log"), [sys.executable, "train.py", *words(options)]
    found = timed(command, home, caching(caches), log, run.most_minutes * 60, device != "cpu")
    lines = LINE.findall(log.read_text())
    return {**found, "step_s": steady([float(ms) / 1e3 for _, _, ms in lines]), "loss": float(lines[-1][1])}


def foretrain(run: Run, way: str, home: Path, device: str, out: Path, caches: Path) -> dict[str, Any]:
    """`foretrain train`, to its end."""
    options = {
        **run.options, **run.ways[way], "max_iters": run.steps, "lr_decay_iters": run.steps, "device": device,
        "dataset": str(home / "data" / ("characters" if run.characters else "many")), "out_dir": str(out),
    }  # fmt: skip
    command = [sys.executable, "-m", "foretrain", "train", *words(options)]
    found = timed(command, home, caching(caches), out.with_suffix(".log"), run.most_minutes * 60, device != "cpu")
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if step["kind"] == "step"]
    told = json.loads((out / "run.json").read_text()) if (out / "run.json").exists() else {}
    return {
        **found, "step_s": steady([step["step_s"] for step in steps]), "loss": steps[-1]["loss"],
        "first_step_s": steps[0]["elapsed_s"], "dtype": told.get("dtype"), "compiled": told.get("compiled"),
        "notes": [note["id"] for note in told.get("notes", [])], "phases": (told.get("memory") or {}).get("phases"),
    }  # fmt: skip


def ran(run: Run, who: str, home: Path, device: str, out: Path, caches: Path) -> dict[str, Any]:
    """A process of either side; nanoGPT's caches are its own."""
    found = (
        nanogpt(run, home, device, out, caches / f"{run.name}-nanogpt")
        if who == "nanogpt"
        else foretrain(run, who, home, device, out, caches / run.name)
    )
    shutil.rmtree(out, ignore_errors=True)
    return found


def warm(runs: list[Run], home: Path, device: str, folder: Path, caches: Path) -> None:
    """A few steps of every side of every run, side by side: what is compiled is in the caches then."""
    few = [replace(run, steps=6, options={**run.options, "eval_iters": 2}) for run in runs]
    jobs = [(run, who) for run in few for who in ("nanogpt", *run.ways)]

    def start(job: tuple[Run, str]) -> None:
        run, who = job
        try:
            took_s = ran(run, who, home, device, folder / f"warm-{run.name}-{who}", caches)["wall_s"]
            print(f"{run.name} {who}: compiled in {took_s:.1f} s", flush=True)
        except (RuntimeError, OSError, LookupError) as error:  # the run itself will say it again
            print(f"{run.name} {who}: {error}", flush=True)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 3)) as pool:
        list(pool.map(start, jobs))


def contest(
    run: Run, home: Path, device: str, rounds: int, folder: Path, caches: Path, *, warmed: bool
) -> dict[str, Any]:
    """foretrain's first start unless all is compiled, then rounds of all in turn."""
    ways: dict[str, Any] = {"nanogpt": {}, **run.ways}
    sides = list(ways)
    found: dict[str, Any] = {
        "run": run.name,
        "steps": run.steps,
        "options": run.options,
        "ways": ways,
        **{who: [] for who in sides},
    }
    number = 0
    for turn in range(0 if warmed else -1, rounds):
        for who in ("foretrain",) if turn < 0 else sides[:: 1 - 2 * (turn % 2)]:
            number += 1
            try:
                row = ran(run, who, home, device, folder / f"{run.name}-{number}", caches)
            except (RuntimeError, OSError, LookupError) as error:
                if device == "cpu":
                    raise
                found[who].append({"error": str(error)[-400:]})  # time on a card is dear: the others go on
                print(f"{run.name} {who}: {error}", flush=True)
                continue
            if turn < 0:
                found["first_start"] = row
            else:
                found[who].append(row)
            noisy = (
                ""
                if device != "cpu" or row["outside_share"] <= OUTSIDE
                else f", others used {row['outside_share']:.0%}"
            )
            print(f"{run.name} {who}: {row['wall_s']:.1f} s, {row['step_s'] * 1e3:.1f} ms a step, {row['resident_bytes'] / 1e6:.0f} MB{noisy}", flush=True)  # fmt: skip
    return {**found, **verdict(found)}


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """Medians and ratios of a contest; of rounds that others disturbed only where there is no other."""

    def of(who: str, key: str) -> float:
        ended = [row for row in found[who] if "error" not in row]
        quiet = [row for row in ended if row["outside_share"] <= OUTSIDE] or ended
        return median(row[key] for row in quiet) if quiet else float("nan")

    first = found.get("first_start")
    return {
        "wall_ratio": of("nanogpt", "wall_s") / of("foretrain", "wall_s"),
        "first_start_ratio": of("nanogpt", "wall_s") / first["wall_s"] if first else None,
        "step_ratio": of("nanogpt", "step_s") / of("foretrain", "step_s"),
        "memory_ratio": of("foretrain", "resident_bytes") / of("nanogpt", "resident_bytes"),
        "card_memory_ratio": of("foretrain", "card_bytes") / (of("nanogpt", "card_bytes") or 1),
        **{f"{who}_{key}": of(who, key) for who in ("nanogpt", "foretrain") for key in ("wall_s", "step_s", "resident_bytes", "card_bytes")},
    }  # fmt: skip


def _place(found: dict[str, Any]) -> tuple[str, str]:
    """Where a contest stands in the results: each machine keeps its own."""
    return found["run"], found["machine"]["device"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a clone of karpathy/nanoGPT at 3adf61e1")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", action="append", help="a run by its name; may be repeated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--caches", type=Path, help="compile there first, all runs side by side; --rounds 0: no more")
    parser.add_argument("--out", type=Path, default=RESULTS / "against_real_nanogpt.json")
    args = parser.parse_args()
    missing = [name for name in PROGRAM if not (args.nanogpt / name).exists()]
    if missing:
        parser.error(f"{args.nanogpt} has no {missing[0]}; give the folder of a clone of nanoGPT")
    document: dict[str, Any] = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {"runs": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home = folder / "nanoGPT"
        home.mkdir()
        for file in PROGRAM:
            shutil.copy(args.nanogpt / file, home)
        prepare(home)
        runs = [r for r in (ON_CPU if args.device == "cpu" else ON_CARD) if not args.only or r.name in args.only]
        caches = args.caches or folder / "caches"
        if args.caches and not caches.exists():
            warm(runs, home, args.device, folder, caches)
        for run in runs if args.rounds else []:
            found = contest(run, home, args.device, args.rounds, folder, caches, warmed=bool(args.caches))
            found |= {"date": date.today().isoformat(), "machine": machine(args.device), "versions": versions()}
            others = [each for each in document["runs"] if _place(each) != _place(found)]
            document["runs"] = sorted([*others, found], key=lambda each: each["machine"]["device"])
            document["what"] = (__doc__ or "").splitlines()[0]
            args.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    table = [
        [
            each["run"], *(f"{each[f'{who}_wall_s']:.1f}" for who in ("nanogpt", "foretrain")), f"{each['first_start']['wall_s']:.1f}" if "first_start" in each else "",
            f"{each['wall_ratio']:.2f}", f"{each['step_ratio']:.2f}", f"{each['foretrain_step_s'] * 1e3:.1f}",
            *(f"{each[f'{who}_resident_bytes'] / 1e6:,.0f}" for who in ("nanogpt", "foretrain")),
            *(f"{each[f'{who}_card_bytes'] / 2**30:.2f}" for who in ("nanogpt", "foretrain")),
        ]
        for each in document["runs"]
    ]  # fmt: skip
    columns = ["run", "nanoGPT s", "foretrain s", "first start", "ratio", "of steps", "ms a step", "nanoGPT MB", "MB", "GiB", "GiB"]  # fmt: skip
    show("nanoGPT's train.py against foretrain train", columns, table)


if __name__ == "__main__":
    main()
