"""foretrain against nanoGPT: a training step of the same model, weights and batches, or whole processes with its own train.py.

    python benchmarks/against_nanogpt.py                       (steps of three models, half an hour on two cores)
    python benchmarks/against_nanogpt.py --only 4x128 --threads 1
    git clone https://github.com/karpathy/nanoGPT && git -C nanoGPT checkout 3adf61e1
    python benchmarks/against_nanogpt.py --real nanoGPT        (four runs from a shell, an hour on two cores)
    python benchmarks/against_nanogpt.py --real nanoGPT --device cuda --out gpu_real.json

Steps: all contestants stand in one process and train a block of steps in turn; a round's ratio is between blocks that
follow each other. Blocks during which other programs took more than OUTSIDE of the cores are not counted. With
--threads 1 a block is timed by the process's CPU time, which other programs hardly move. The losses of all steps are
compared with those of nanoGPT. For steps on a card see gpu/ways.py.

--real: both read the same prepared folder with the same options: imports, compilation, choosing, evaluation and saving
are in the wall time. `first start` is foretrain's with empty caches, the others are later ones. Resident memory is the
highest of the process, as the system counted it. nanoGPT runs without torch.compile on a CPU, as its README says, and
compiled on a card; there foretrain runs with its step as one CUDA graph and without. With `--caches FOLDER` both sides
compile there first, all runs side by side, and no first start is reported: on a card that is lent by the minute.
"""

import argparse
import json
import os
import pickle
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from common import OUTSIDE, RESULTS, Load, versions
from nanogpt_step import Contestant, Foretrain, NanoGptTraining, tokens_like_text

from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.data.builtin import prepare_built_in
from foretrain.data.dataset import DatasetInfo
from foretrain.hardware.cpu import cpu_flags, usable_cores
from foretrain.training import starting
from foretrain.training.device import Placement, keep_memory, place

# Two curves are the same within the rounding of bfloat16 when no loss differs by more than a unit in its last place.
ROUNDING = 2**-8
RECIPE = {
    "gradient_accumulation_steps": 1, "dataset": "python-stdlib", "learning_rate": 1e-3, "min_lr": 1e-4,
    "warmup_iters": 100, "max_iters": 2000, "lr_decay_iters": 2000, "beta2": 0.99,
}  # fmt: skip
SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12}
MIDDLE = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 8}
LARGE = {"block_size": 512, "batch_size": 8}


def machine(device: str) -> dict[str, Any]:
    flags = sorted(cpu_flags() & {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile"})
    gpu = place(RunConfig(device=device, compile=False)).gpu
    return {"device": gpu.name, "flags": flags, "cores": usable_cores(), "system": f"{platform.system()} {platform.machine()}",
            "capability": torch.backends.cpu.get_cpu_capability()}  # fmt: skip


def keep(out: Path, found: dict[str, Any], device: str, list_name: str, key: Callable[[Any], Any]) -> None:
    """Add a result to the file, replacing one with the same key."""
    known = json.loads(out.read_text("utf-8")) if out.exists() else {list_name: []}
    found |= {"date": date.today().isoformat(), "machine": machine(device), "versions": versions()}
    known[list_name] = [*(each for each in known[list_name] if key(each) != key(found)), found]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**known, "what": (__doc__ or "").splitlines()[0]}, indent=1) + "\n", "utf-8")


@dataclass(frozen=True)
class Model:
    """One model: options, steps in a block, rounds, and a loss that a run should reach."""

    name: str
    settings: dict[str, Any]
    block: int
    rounds: int
    target: float


MODELS = [
    Model("4x128", {**SMALL, "vocab_size": 256}, 20, 10, 2.0),
    Model("6x384", {**MIDDLE, "vocab_size": 256}, 2, 11, 3.0),
    Model("124M", {**LARGE, "vocab_size": 50304}, 1, 3, 4.2),
]
TINY = Model(
    "tiny", {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_size": 4, "vocab_size": 256}, 2, 2, 0
)


@dataclass
class Entry:
    """A contestant and what it did. `block_s`: seconds a step of each block, None where it was disturbed."""

    name: str
    compiled: bool
    dtype: str
    make: Callable[[], Contestant]
    chosen: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    block_s: list[float | None] = field(default_factory=list)
    first_s: float = 0.0
    own: Any = None

    @property
    def label(self) -> str:
        return f"{self.name} {'compiled' if self.compiled else 'eager'} {self.dtype}"

    @property
    def clean_s(self) -> list[float]:
        return [each for each in self.block_s if each is not None]

    def start(self, steps: int) -> None:
        """Build, and take the steps that compile and warm up."""
        began = time.perf_counter()
        self.own = self.make()
        self.train(steps)
        self.first_s = time.perf_counter() - began

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.losses.append(self.own.step(len(self.losses)))


def entries(config: RunConfig, placement: Placement, info: DatasetInfo, *, patched: bool) -> list[Entry]:
    """Return nanoGPT eager and compiled, and foretrain as it would train, compiled and not. `patched`: nanoGPT with
    autocast on a CPU, too, whose losses show the effect of rounding to bfloat16.
    """
    device, found = placement.device, list[Entry]()
    modes = [False, True] if placement.compiled else [False]
    for compiled in modes:
        make = lambda c=compiled: NanoGptTraining(config, device, "float32", info, compiled=c)  # noqa: E731
        found.append(Entry("nanoGPT", compiled, "float32", make))
    if patched:
        make = lambda: NanoGptTraining(config, device, "bfloat16", info, compiled=False, autocast=True)  # noqa: E731
        found.append(Entry("nanoGPT with autocast", False, "bfloat16", make))
    own = starting.decide(config, placement, set()).config
    for compiled in modes:
        make = lambda c=compiled: Foretrain(own, device, own.dtype, info, compiled=c)  # noqa: E731
        found.append(Entry("foretrain", compiled, own.dtype, make, {key: getattr(own, key) for key in starting.CHOSEN}))
    return found


def alternate(all: list[Entry], model: Model, threads: int, end: float) -> None:
    """Train a block of each in turn, round by round, every other round backwards."""
    clock = time.process_time if threads == 1 else time.perf_counter
    for entry in all:
        entry.start(min(2, model.block))  # a block of one is a large model, whose first step is like the others
    for round in range(model.rounds):
        if time.monotonic() > end and round >= 2:
            break
        for entry in all if round % 2 == 0 else reversed(all):
            load, began = Load(), clock()
            entry.train(model.block)
            took = (clock() - began) / model.block
            entry.block_s.append(took if threads == 1 or load.outside() <= OUTSIDE else None)


def results(all: list[Entry], config: RunConfig, placement: Placement) -> list[dict[str, Any]]:
    rivals, rows = [entry for entry in all if entry.name == "nanoGPT" and entry.clean_s], []
    for entry in all:
        row: dict[str, Any] = {
            "name": entry.name, "label": entry.label, "compiled": entry.compiled, "dtype": entry.dtype,
            "chosen": entry.chosen, "first_steps_s": entry.first_s, "losses": entry.losses, "blocks_s": entry.block_s,
        }  # fmt: skip
        rows.append(row)
        if not entry.clean_s or not rivals:
            continue
        row["step_s"], row["lowest_s"], row["highest_s"] = median(entry.clean_s), min(entry.clean_s), max(entry.clean_s)
        row["tokens_per_s"] = config.tokens_per_step / row["step_s"]
        peak = placement.gpu.peak_flop_per_s(entry.dtype)  # type: ignore[arg-type]
        row["mfu"] = row["tokens_per_s"] * ModelShape.of(config).flops_per_token / peak if peak else None
        base = min(rivals, key=lambda rival: median(rival.clean_s))
        ratios = [a / b for a, b in zip(base.block_s, entry.block_s, strict=False) if a is not None and b is not None]
        if ratios:
            row["ratio"], row["lowest_ratio"], row["highest_ratio"] = median(ratios), min(ratios), max(ratios)
        apart = [abs(a - b) / b for a, b in zip(entry.losses, rivals[0].losses, strict=False)]
        row["loss_difference"] = {"steps": len(apart), "largest": max(apart), "mean": sum(apart) / len(apart)}
    return rows


def contest_of_steps(args: argparse.Namespace) -> None:
    os.environ["FORETRAIN_CACHE"] = tempfile.mkdtemp()  # foretrain's choices are measured here
    keep_memory()  # as `foretrain train` does; it serves both sides
    torch.set_num_threads(args.threads)
    end, clock = time.monotonic() + args.minutes * 60, "CPU time of one thread" if args.threads == 1 else "wall time"
    for model in [m for m in [*MODELS, TINY] if (m.name in args.only if args.only else m is not TINY)]:
        config = RunConfig.model_validate({**RECIPE, **model.settings, "device": "cpu", "compile": not args.eager})
        placement = place(config)
        long = config.model_copy(update={"max_iters": 10**7})  # so that foretrain measures its choices
        all = entries(long, placement, prepare_built_in(config), patched=model.name != "124M")
        all = [entry for entry in all if not any(words in entry.label for words in args.skip)]
        alternate(all, model, args.threads, end)
        rows = results(all, config, placement)
        for row in rows:
            step = f"{row['step_s'] * 1e3:,.1f} ms" if "step_s" in row else "disturbed throughout"
            print(f"{model.name}, {row['label']}: {step}, {row.get('ratio', 0):.2f} times nanoGPT", flush=True)
        found = {"model": model.name, "knobs": model.settings, "target": model.target, "threads": args.threads, "clock": clock,
                 "rounding": ROUNDING, "contestants": rows}  # fmt: skip
        keep(args.out, found, "cpu", "models", lambda each: (each["model"], each["threads"]))


PROGRAM = ("train.py", "model.py", "configurator.py")
LINE = re.compile(r"^iter (\d+): loss ([\d.]+|nan), time ([\d.]+)ms", re.MULTILINE)
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A run that both do. `characters`: on text by characters, as in nanoGPT's README; else on 50,304 tokens."""

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
TOKENS = {
    **LARGE,
    "gradient_accumulation_steps": 1,
    "eval_iters": 1,
    "eval_interval": 1000,
    "log_interval": 1,
    "warmup_iters": 100,
}
ON_CPU = [
    Run("4x128-1000", {**CHARACTERS, **SMALL}, 1000),
    Run("4x128-2000", {**CHARACTERS, **SMALL}, 2000),
    Run("6x384-120", {**CHARACTERS, **MIDDLE, "eval_iters": 5}, 120),
    Run("124M", TOKENS, 8, characters=False),
]
GRAPH = {"foretrain": {"cuda_graph": "on"}, "no graph": {"cuda_graph": "off"}}
ON_CARD = [
    Run("4x128-2000", {**CHARACTERS, **SMALL}, 2000, ways=GRAPH),
    Run("6x384-500", {**CHARACTERS, **MIDDLE, "batch_size": 64}, 500, ways=GRAPH),
    Run("124M", {**TOKENS, "block_size": 1024, "batch_size": 12, "gradient_accumulation_steps": 5, "eval_iters": 5}, 60,
        characters=False, ways={**GRAPH, "masters": {"master_weights": True}}),
]  # fmt: skip


def prepare(folder: Path) -> None:
    """Write a text by characters with its meta.pkl, and tokens of 50,304, as nanoGPT's prepare.py leaves them."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = "".join(path.read_text("utf-8", errors="ignore") for path in sources)[:6_000_000]
    text = "".join(c for c in text if c.isascii())
    letters = sorted(set(text))
    ids = np.array([letters.index(chr(c)) if chr(c) in letters else 0 for c in range(128)], dtype=np.uint16)
    data = ids[np.frombuffer(text.encode("ascii"), dtype=np.uint8)]
    for name, tokens in (("characters", data), ("many", tokens_like_text(np.random.default_rng(0), 4_000_000))):
        place = folder / "data" / name
        place.mkdir(parents=True)
        cut = int(len(tokens) * 0.9)
        tokens[:cut].tofile(place / "train.bin")
        tokens[cut:].tofile(place / "val.bin")
    meta = {"vocab_size": len(letters), "stoi": {c: i for i, c in enumerate(letters)}, "itos": dict(enumerate(letters))}
    (folder / "data" / "characters" / "meta.pkl").write_bytes(pickle.dumps(meta))


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


@dataclass(frozen=True)
class Race:
    """Where processes run: a copy of nanoGPT with data, a folder for what they write, and the compilers' caches."""

    home: Path
    folder: Path
    caches: Path
    device: str

    def ran(self, run: Run, who: str, name: str) -> Row:
        """Run one side to its end, with caches of its own."""
        out, of_nanogpt = self.folder / name, who == "nanogpt"
        options = {
            **run.options,
            "max_iters": run.steps,
            "lr_decay_iters": run.steps,
            "device": self.device,
            "out_dir": str(out),
        }
        dataset = "characters" if run.characters else "many"
        if of_nanogpt:
            options |= {"dataset": dataset, "compile": self.device != "cpu", "wandb_log": False}
        else:
            options |= {"dataset": str(self.home / "data" / dataset), **run.ways[who]}
        command = [sys.executable, *(["train.py"] if of_nanogpt else ["-m", "foretrain", "train"])]
        command += [f"--{key}={value}" for key, value in options.items()]
        caches, log = self.caches / f"{run.name}{'-nanogpt' * of_nanogpt}", out.with_suffix(".log")
        kept = {"FORETRAIN_CACHE": "foretrain", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        environment = {**os.environ, **{key: str(caches / name) for key, name in kept.items()}}
        load, began = Load(), time.perf_counter()
        with log.open("w") as file, Card(self.device != "cpu") as card:
            process = subprocess.Popen(command, cwd=self.home, env=environment, stdout=file, stderr=subprocess.STDOUT)
            killer = threading.Timer(run.most_minutes * 60, process.kill)
            killer.start()
            _, status, usage = os.wait4(process.pid, 0)
            killer.cancel()
        if code := os.waitstatus_to_exitcode(status):
            raise RuntimeError(f"{command[1]} ended with {code}: {log.read_text()[-400:]}")
        found = {
            "wall_s": time.perf_counter() - began, "resident_bytes": usage.ru_maxrss * 1024, "card_bytes": card.peak_bytes,
            "outside_share": load.outside(),
        }  # fmt: skip
        found |= from_log(log) if of_nanogpt else from_records(out)
        shutil.rmtree(out, ignore_errors=True)
        return found


def steady(times: list[float]) -> float:
    """Return the median of the later half, after compiling, choosing and warming up."""
    return median(times[len(times) // 2 :])


def from_log(log: Path) -> Row:
    lines = LINE.findall(log.read_text())
    return {"step_s": steady([float(ms) / 1e3 for _, _, ms in lines]), "loss": float(lines[-1][1])}


def from_records(out: Path) -> Row:
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if step["kind"] == "step"]
    record = json.loads((out / "run.json").read_text()) if (out / "run.json").exists() else {}
    return {
        "step_s": steady([step["step_s"] for step in steps]), "loss": steps[-1]["loss"],
        "first_step_s": steps[0]["elapsed_s"], "dtype": record.get("dtype"), "compiled": record.get("compiled"),
        "notes": [note["id"] for note in record.get("notes", [])], "phases": (record.get("memory") or {}).get("phases"),
    }  # fmt: skip


def warm(runs: list[Run], race: Race) -> None:
    """Take a few steps of every side of every run, side by side, to fill the compilers' caches."""

    def start(job: tuple[Run, str]) -> None:
        run, who = job
        few = replace(run, steps=6, options={**run.options, "eval_iters": 2})
        try:
            print(
                f"{run.name} {who}: compiled in {race.ran(few, who, f'warm-{run.name}-{who}')['wall_s']:.1f} s",
                flush=True,
            )
        except (RuntimeError, OSError, LookupError) as error:  # the run itself will report it
            print(f"{run.name} {who}: {error}", flush=True)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 3)) as pool:
        list(pool.map(start, [(run, who) for run in runs for who in ("nanogpt", *run.ways)]))


def contest(run: Run, race: Race, rounds: int, *, warmed: bool) -> dict[str, Any]:
    """Run foretrain's first start unless all is compiled, then rounds of all in turn."""
    ways: dict[str, Any] = {"nanogpt": {}, **run.ways}
    found: dict[str, Any] = {
        "run": run.name,
        "steps": run.steps,
        "options": run.options,
        "ways": ways,
        **{who: [] for who in ways},
    }
    for turn in range(0 if warmed else -1, rounds):
        for who in ("foretrain",) if turn < 0 else list(ways)[:: 1 - 2 * (turn % 2)]:
            try:
                row = race.ran(run, who, f"{run.name}-{who}-{turn}")
            except (RuntimeError, OSError, LookupError) as error:
                if race.device == "cpu":
                    raise
                found[who].append({"error": str(error)[-400:]})  # time on a card is expensive: the others continue
                print(f"{run.name} {who}: {error}", flush=True)
                continue
            if turn < 0:
                found["first_start"] = row
            else:
                found[who].append(row)
            noisy = race.device == "cpu" and row["outside_share"] > OUTSIDE
            others = f", others used {row['outside_share']:.0%}" if noisy else ""
            print(f"{run.name} {who}: {row['wall_s']:.1f} s, {row['step_s'] * 1e3:.1f} ms a step, {row['resident_bytes'] / 1e6:.0f} MB{others}", flush=True)  # fmt: skip
    return {**found, **verdict(found)}


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """Return medians and ratios of a contest; disturbed rounds count only where there is no other."""

    def of(who: str, key: str) -> float:
        ended = [row for row in found[who] if "error" not in row]
        quiet = [row for row in ended if row["outside_share"] <= OUTSIDE] or ended
        return median(row[key] for row in quiet) if quiet else float("nan")

    first = found.get("first_start")
    keys = ("wall_s", "step_s", "resident_bytes", "card_bytes")
    return {
        "wall_ratio": of("nanogpt", "wall_s") / of("foretrain", "wall_s"),
        "first_start_ratio": of("nanogpt", "wall_s") / first["wall_s"] if first else None,
        "step_ratio": of("nanogpt", "step_s") / of("foretrain", "step_s"),
        "memory_ratio": of("foretrain", "resident_bytes") / of("nanogpt", "resident_bytes"),
        "card_memory_ratio": of("foretrain", "card_bytes") / (of("nanogpt", "card_bytes") or 1),
        **{f"{who}_{key}": of(who, key) for who in ("nanogpt", "foretrain") for key in keys},
    }


def contest_of_processes(args: argparse.Namespace) -> None:
    runs = [run for run in (ON_CPU if args.device == "cpu" else ON_CARD) if not args.only or run.name in args.only]
    with tempfile.TemporaryDirectory() as name:
        race = Race(Path(name) / "nanoGPT", Path(name), args.caches or Path(name) / "caches", args.device)
        race.home.mkdir()
        for file in PROGRAM:
            shutil.copy(args.real / file, race.home)
        prepare(race.home)
        if args.caches and not args.caches.exists():
            warm(runs, race)
        for run in runs if args.rounds else []:
            found = contest(run, race, args.rounds, warmed=bool(args.caches))
            keep(args.out, found, args.device, "runs", lambda each: (each["run"], each["machine"]["device"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--real", type=Path, metavar="NANOGPT", help="whole processes: a clone of karpathy/nanoGPT at 3adf61e1"
    )
    parser.add_argument("--only", action="append", default=[], help="a model or run by its name; may be repeated")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    steps = parser.add_argument_group("steps")
    steps.add_argument("--threads", type=int, default=usable_cores())
    steps.add_argument(
        "--skip", action="append", default=[], help='contestants to leave out, such as "nanoGPT compiled"'
    )
    steps.add_argument("--eager", action="store_true", help="nothing compiled")
    steps.add_argument("--minutes", type=float, default=30.0, help="start no further round after this long")
    real = parser.add_argument_group("whole processes")
    real.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    real.add_argument("--rounds", type=int, default=3)
    real.add_argument("--caches", type=Path, help="compile there first, all runs side by side; --rounds 0: no more")
    args = parser.parse_args()
    args.out = args.out or RESULTS / f"against_{'real_' if args.real else ''}nanogpt.json"
    if not args.real:
        return contest_of_steps(args)
    if missing := [name for name in PROGRAM if not (args.real / name).exists()]:
        parser.error(f"{args.real} has no {missing[0]}; give the folder of a clone of nanoGPT")
    return contest_of_processes(args)


if __name__ == "__main__":
    main()
