"""The cases of the golden net: config × card × command, drawn with a fixed seed or written out.

Everything here is literal: nothing is read from the package, as both trees must be asked exactly the same. Words are
those of the command line. A case runs in an empty folder; `inputs` are folders that are copied into it first: `repo`
holds examples/ of the base commit, `made` a run that the base commit trained.
"""

import hashlib
import random
import struct
from collections.abc import Iterator
from dataclasses import astuple, replace
from functools import cache
from typing import Any

from .case import Case, Step, case
from .kinds import clusters, finetunings, inferences, pages

SEED = 19


@cache
def listed() -> tuple[Case, ...]:
    """All cases, the slow ones first, so that the last minute is not one core's alone."""
    found = [
        *_made(), *_trains(), *_exact(), *_serves(), *pages(), *_of_runs(), *_advises(), *_searches(), *finetunings(),
        *clusters(), *_drawn(), *_presets(), *_comparisons(), *_explanations(), *_reports(), *_data(), *inferences(),
        *_small(), *_languages(), *_helps(), *_errors(), *_python(),
    ]  # fmt: skip
    names = [one.name for one in found]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
    return tuple(found)


def digest(case: Case) -> str:
    """Return what changes with all that a result depends on here: the case itself and those that make its inputs."""
    making = [one for one in listed() if one.kept_as and one.kept_as in case.inputs]
    parts = [astuple(replace(one, quick=False)) for one in (case, *making)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def input_folder(name: str) -> str:
    """The folder of an input: one that a case makes is another when that case changes."""
    making = [one for one in listed() if one.kept_as == name]
    return f"{name}-{digest(making[0])}" if making else name


# --- what cases are made of ---

PRESETS = ("gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1558m", "gpt2-40m", "gpt2-30m", "shakespeare-char", "baby")
CARDS = (
    "RTX 4070", "RTX 3060 12GB", "RTX 4090", "RTX 3050 Laptop 4GB", "T4", "V100 SXM2 16GB", "A100 SXM4 80GB",
    "H100 SXM5 80GB", "RTX 5090", "L4", "P100 SXM2 16GB", "Apple M1 Max", "cpu", "RTX 3080 10GB", "B200 SXM",
)  # fmt: skip
# (n_layer, n_head, n_embd, block_size, batch_size, gradient_accumulation_steps)
SHAPES = (
    (12, 12, 768, 1024, 8, 64), (6, 6, 384, 256, 64, 1), (12, 12, 384, 1024, 16, 32), (24, 16, 1024, 1024, 4, 128),
    (8, 8, 512, 512, 32, 8), (36, 20, 1280, 1024, 1, 512), (4, 2, 128, 128, 16, 2), (48, 25, 1600, 1024, 1, 512),
    (16, 8, 576, 2048, 3, 40), (10, 10, 640, 4096, 2, 16), (3, 3, 192, 64, 128, 1), (20, 12, 960, 768, 5, 24),
)  # fmt: skip
# Every option that changes a forecast, with values to draw; options that go together are one entry.
OPTIONS: tuple[tuple[str, ...], ...] = (
    ("--recipe=modern",), ("--recipe=modern", "--optimizer=adamw"), ("--bias=true",), ("--dropout=0.1",),
    ("--dropout=0.2", "--bias=true"), ("--vocab_size=65",), ("--vocab_size=50257",), ("--vocab_size=256000",),
    ("--activation_checkpointing=true",), ("--activation_checkpointing=true", "--checkpointed_blocks=3"),
    ("--recompute_norm_gelu=true", "--compile=false"), ("--activation_memory_budget=0.5",),
    ("--activation_memory_budget=0.25",), ("--loss_chunk_size=256",), ("--loss_chunk_size=4096", "--compile=false"),
    ("--optimizer=adamw8bit",), ("--optimizer=muon",), ("--optimizer=muon", "--muon_learning_rate=0.01"),
    ("--optimizer_offload=true",), ("--grad_clip=0",), ("--on_nonfinite=skip",), ("--decay_lr=false",),
    ("--lr_schedule=linear", "--cooldown=0.3"), ("--eval_interval=100", "--eval_iters=50"), ("--eval_batch_size=4",),
    ("--eval_sequences=128",), ("--eval_only=true",), ("--dtype=float32",), ("--dtype=float16",), ("--dtype=bfloat16",),
    ("--auto_chunker=true",), ("--matmul=fp8",), ("--matmul=int8",), ("--matmul=fp16_accumulation", "--dtype=float16"),
    ("--master_weights=true", "--dtype=bfloat16"), ("--compile=false",), ("--compile=false", "--dtype=float32"),
    ("--compile_mode=reduce-overhead",), ("--compile_mode=max-autotune",), ("--compile_blocks=true",),
    ("--attention=bmm",), ("--attention=sdpa",), ("--allocator_settings=expandable_segments:True",),
    ("--memory_limit=8GiB",), ("--memory_limit=9GiB",), ("--price_per_hour=0.35",), ("--co2_per_kwh=380",),
    ("--currency=USD", "--price_per_kwh=0.15"), ("--torch_version=2.6.0",), ("--torch_version=2.9.1",),
    ("--batch_size=auto", "--total_batch_size=524288"), ("--dataset_tokens=3680000000",), ("--max_iters=2000",
    "--lr_decay_iters=2000", "--warmup_iters=100"), ("--init_from=gpt2",), ("--keep_checkpoints=5",),
    ("--always_save_checkpoint=false",), ("--cpu_threads=2",), ("--seed=7",), ("--learning_rate=3e-4",
    "--min_lr=3e-5"), ("--beta2=0.99",), ("--weight_decay=0",), ("--tokenizer=gpt2",), ("--data_order=epochs",),
    ("--verify_data=false",), ("--backend=gloo", "--wandb_log=true"), ("--eval_block_size=64",),
)  # fmt: skip
# How a plan is asked for.
ASKED = (
    "--json", "--json", "--json", "--full", "", "--oneline", "--trainer nanogpt --json",
    "--trainer nanogpt --full", "--used-by-others 2GB", "--used-by-others 1.5GiB --json", "--step-time 1.25 --full",
    "--price 0.35/h", "--check", "--full --lang ar", "--logged-mfu 31 --json",
)  # fmt: skip

TINY = """n_layer = 2
n_head = 2
n_embd = 32
block_size = 16
vocab_size = 96
batch_size = 4
gradient_accumulation_steps = 2
max_iters = 12
lr_decay_iters = 12
warmup_iters = 2
eval_interval = 5
eval_iters = 2
learning_rate = 1e-2
min_lr = 1e-3
device = "cpu"
compile = false
dtype = "float32"
dataset = "toy"
log_interval = 1
cpu_threads = 1
"""


def _toy() -> dict[str, str | bytes]:
    draw, token = random.Random(SEED), 0
    files: dict[str, str | bytes] = {"tiny.toml": TINY}
    for split, count in (("train", 4000), ("val", 1000)):
        ids = []
        for _ in range(count):
            token = (token + draw.choice((1, 2))) % 96
            ids.append(token)
        files[f"toy/{split}.bin"] = struct.pack(f"<{count}H", *ids)
    return files


def _pinned(card: str, asked: str = "") -> list[str]:
    """On this machine's own memory what other programs use is measured, unless it is said."""
    return ["--used-by-others", "2GB"] if card == "cpu" and "--used-by-others" not in asked else []


def _shape(shape: tuple[int, ...]) -> list[str]:
    names = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "gradient_accumulation_steps")
    return [f"--{name}={value}" for name, value in zip(names, shape, strict=True)]


# --- plans ---


def _drawn() -> Iterator[Case]:
    """Random configs on random cards, asked for in every way; each entry of OPTIONS at least twice."""
    draw = random.Random(SEED)
    waiting: list[tuple[str, ...]] = []
    for number in range(80):
        words = _shape(draw.choice(SHAPES))
        for _ in range(draw.randint(2, 4)):
            if not waiting:
                waiting = draw.sample(OPTIONS, len(OPTIONS))
            words += waiting.pop()
        card = CARDS[number % len(CARDS)] if number % 3 else draw.choice(CARDS)
        how = ASKED[(number + number // len(CARDS)) % len(ASKED)]
        asked = " ".join([how, *_pinned(card, how)])
        yield case(
            f"plan drawn {number} {card} {asked}",
            ("plan", *words, "--gpu", card, *asked.split()),
            quick=number % 3 == 0 and number not in (9, 18, 30),  # these take ten seconds
        )


def _presets() -> Iterator[Case]:
    for number, preset in enumerate(PRESETS):
        card, other = CARDS[number], CARDS[-number]
        yield case(f"plan {preset} first screen", ("plan", preset, "--gpu", card), group="narrow", quick=number < 2)
        yield case(f"plan {preset} full", ("plan", preset, "--gpu", card, "--full"), quick=number == 2)
        yield case(
            f"plan {preset} json", ("plan", preset, "--gpu", other, "--json", *_pinned(other)), quick=number == 4
        )
    for number, card in enumerate(CARDS):
        words = ("plan", "baby", "--gpu", card, "--oneline", *_pinned(card))
        yield case(f"plan baby {card} oneline", words, quick=number == 4)
    real = "examples/real-cases"
    for name in ("a", "b1", "b2", "c", "d"):
        yield case(f"plan {name}.py", f"plan {real}/{name}.py --gpu 4070 --used-by-others 2.1GB", quick=name == "c")
        yield case(f"plan {name}.py json", f"plan {real}/{name}.py --gpu 4070 --json --trainer foretrain")
        yield case(f"plan {name}.py show-config", f"plan {real}/{name}.py --batch_size=8 --gpu 4070 --show-config")
    for name in ("case-c", "gpt2-124m-half", "gpt2-124m", "gpt2-350m", "gpt2-774m"):
        yield case(f"plan small-memory {name}", f"plan examples/small-memory/{name}.toml --gpu 3060 --full")
    nano = "examples/nanogpt/config"
    for name in ("finetune_shakespeare", "train_gpt2", "train_shakespeare_char"):
        yield case(f"plan nanogpt {name}", f"plan {nano}/{name}.py --gpu 4090", quick=name == "train_gpt2")
    yield from (
        case("plan several cards", "plan gpt2-124m --gpu 3060,4070,4090"),
        case("plan several cards json", "plan gpt2-124m --gpu 3060,4070,4090 --json", quick=True),
        case(
            "plan several cards price",
            ("plan", "gpt2-124m", "--gpu", "4070,4090,A100-SXM4-80GB", "--price", "4090=0.35,A100-SXM4-80GB=1.2"),
        ),
        case("plan co2", "plan gpt2-124m --gpu 4090 --co2 380 --full"),
        case("plan co2 json", "plan gpt2-124m --gpu 4090 --co2 380 --price 0.4/h --json"),
        case("plan logged", "plan examples/real-cases/b1.py --gpu 4070 --logged-mfu 12.9 --full"),
        case("plan stdin", Step(("plan", "-", "--gpu", "4070", "--json"), stdin=TINY)),
        case("plan two files", "plan gpt2-124m tiny.toml --gpu 4070 --json", files={"tiny.toml": TINY}),
        case("plan own card", "plan gpt2-124m --gpu Mine --gpu-file mine.toml", files={"mine.toml": CARD}),
        case(
            "plan own card by variable", "plan gpt2-124m --gpu Mine --json", files={"mine.toml": CARD},
            env={"FORETRAIN_GPU_FILE": "mine.toml"},
        ),
        case("plan auto gpu", "plan baby --used-by-others 2GB"),
        case("plan check fails", "plan gpt2-1558m --gpu 4070 --check --batch_size=64"),
        case("plan quiet", "plan gpt2-124m --gpu 4070 --quiet"),
        case("plan dashes", "plan gpt2-124m --gpu 4070 --batch-size 4 --n-layer=6 --json"),
        case("plan old words", "plan gpt2-124m --gpu 4070 --others 2GB --grad_checkpoint=true"),
        case("plan with data", "plan tiny.toml --gpu 4070 --full", files=_toy()),
    )  # fmt: skip


CARD = """["Mine"]
architecture = "Ada"
compute_capability = "8.9"
sm_count = 46
boost_clock_ghz = 2.475
memory_gib = 12.0
fp16_flop_per_clock_per_sm = 512
fp32_flop_per_clock_per_sm = 256
memory_bus_bits = 192
memory_gbps_per_pin = 21.0
bandwidth_gb_per_s = 504.0
fp16_dense_tflops = 58.3
bf16_dense_tflops = 58.3
tf32_dense_tflops = 29.1
fp32_tflops = 29.1
board_power_w = 200.0
source = "a test"
"""


def _searches() -> Iterator[Case]:
    """--largest, --within, --tokens, --best, --write."""
    for option in ("batch_size", "block_size", "n_layer"):
        yield case(
            f"plan largest {option}", f"plan gpt2-124m --gpu 4070 --largest {option}", quick=option == "batch_size"
        )
        yield case(
            f"plan largest {option} json",
            f"plan gpt2-350m --gpu 3060 --used-by-others 2GB --largest {option} --json --compile=false",
        )
    for limit in ("12h", "90m", "1d12h", "3kWh", "5EUR"):
        yield case(f"plan within {limit}", f"plan gpt2-124m --gpu 4070 --within {limit}", quick=limit == "3kWh")
    yield from (
        case("plan within json", "plan gpt2-124m --gpu 4090 --within 12h --json"),
        case("plan within write", "plan examples/real-cases/d.py --gpu 4070 --within 6h --write shorter.toml"),
        case("plan tokens", "plan gpt2-124m --gpu 4090 --tokens 10B --write ten.toml", quick=True),
        case("plan tokens json", "plan gpt2-40m --gpu 4090 --tokens 2.5B --json"),
        case("plan best", "plan --gpu 4070 --best --within 20h --data-tokens 3.68B"),
        case("plan best json", "plan --gpu A100-SXM4-80GB --best --within 5EUR --price 1.2/h --json"),
        case("plan best write", "plan --gpu 3060 --best --within 8h --write best.toml --full"),
    )


# --- advice ---


def _advises() -> Iterator[Case]:
    real = "examples/real-cases"
    yield from (
        case("advise c.py", f"advise {real}/c.py --gpu 4070 --used-by-others 2.1GB", quick=True),
        case("advise c.py json", f"advise {real}/c.py --gpu 4070 --used-by-others 2.1GB --json"),
        case("advise c.py full", f"advise {real}/c.py --gpu 4070 --used-by-others 2.1GB --full"),
        case("advise c.py apply", f"advise {real}/c.py --gpu 4070 --used-by-others 2.1GB --apply 1"),
        case("advise c.py write", f"advise {real}/c.py --gpu 4070 --used-by-others 2.1GB --apply 1 --write less.toml"),
        case(
            "advise c.py write py",
            f"advise {real}/c.py --gpu 4070 --apply 1 --write less.py",
            f"advise {real}/c.py --gpu 4070 --used-by-others 2.1GB --goal fit --apply 2 --write two.py",
            f"advise {real}/c.py --gpu 4070 --used-by-others 2.1GB --goal fit --apply 4 --write four.py",
        ),
        case(
            "advise c.py foretrain", f"advise {real}/c.py --gpu 4070 --used-by-others 2.1GB --trainer foretrain --json"
        ),
        case("advise speed", f"advise {real}/b1.py --gpu 4070 --goal speed"),
        case("advise speed json", "advise gpt2-124m --gpu 4090 --goal speed --json", quick=True),
        case(
            "advise cost",
            (
                "advise",
                "gpt2-774m",
                "--gpu",
                "3060",
                "--goal",
                "cost",
                "--price",
                "3060=0.08,4090=0.35,A100-SXM4-80GB=1.2",
            ),
        ),
        case("advise quality", "advise gpt2-40m --gpu 4070 --goal quality"),
        case("advise quality json", f"advise {real}/d.py --gpu 4070 --goal quality --json"),
        case("advise fit json", "advise gpt2-1558m --gpu 4090 --goal fit --json"),
        case("advise top", "advise gpt2-350m --gpu 3060 --top 3 --full"),
        case("advise eager", "advise gpt2-124m --gpu T4 --compile=false --dtype=float16 --json"),
        case("advise modern", "advise gpt2-124m --gpu 4070 --recipe=modern --json"),
        case("advise small memory", "advise examples/small-memory/gpt2-774m.toml --gpu 3060 --json"),
        case("advise nanogpt", "advise examples/nanogpt/config/train_gpt2.py --gpu 4070"),
        case("advise cpu", "advise baby --gpu cpu --used-by-others 2GB"),
        case("advise cpu json", "advise gpt2-30m --gpu cpu --used-by-others 2GB --json"),
        case("advise nothing fits", "advise gpt2-1558m --gpu 3060 --block_size=4096 --batch_size=64"),
        case("advise ar", f"advise {real}/c.py --gpu 4070 --used-by-others 2.1GB --lang ar"),
        case("advise hi", f"advise {real}/c.py --gpu 4070 --used-by-others 2.1GB --lang hi --full"),
        case("advise narrow", f"advise {real}/c.py --gpu 4070 --used-by-others 2.1GB", group="narrow"),
    )
    draw = random.Random(SEED + 1)
    for number in range(8):
        words = [*_shape(draw.choice(SHAPES[:5])), *draw.choice(OPTIONS), *draw.choice(OPTIONS)]
        card = draw.choice(CARDS[:11])
        yield case(f"advise drawn {number}", ("advise", *words, "--gpu", card, "--json"), quick=number == 0)


# --- logs, comparisons, explanations, reports ---


def nanogpt_log(times_ms: list[float], evaluate: int = 0) -> str:
    lines = ["tokens per iteration will be: 524,288", "number of parameters: 40.56M"]
    for i, ms in enumerate(times_ms):
        if evaluate and i % evaluate == 0:
            lines.append(f"step {i}: train loss {5 - i / 1e3:.4f}, val loss {5.1 - i / 1e3:.4f}")
            lines += ["saving checkpoint to out"] if i else []
        mfu = -100.0 if i < 5 else 12.9
        lines.append(f"iter {i}: loss {10.8 * (i + 1) ** -0.15:.4f}, time {ms:.2f}ms, mfu {mfu:.2f}%")
    return "\n".join(lines) + "\n"


def _logs() -> dict[str, str | bytes]:
    draw = random.Random(SEED + 2)
    steady = [3900 + draw.uniform(-8, 8) for _ in range(60)]
    slowing = [3900 * (1 + 0.3 * (i > 30)) + draw.uniform(-8, 8) for i in range(60)]
    spikes = [3900 * (1 + 2.0 * (i % 9 == 4)) + draw.uniform(-8, 8) for i in range(60)]
    nanochat = [
        f"step {i:05d}/21400 ({i / 214:.2f}%) | loss: {9 * (i + 1) ** -0.2:.6f} | lrm: 1.00 | dt: {500 + i % 7:.2f}ms | "
        f"tok/sec: {1048576 - i:,} | bf16_mfu: 48.10 | epoch: 1 pq: 0 rg: {i} | total time: {i / 120:.2f}m | eta: 178.2m"
        for i in range(40)
    ]
    build = [
        f"step {i:5d} | loss: {10.9 - i / 20:.6f} | lr 6.0000e-05 | norm: 15.3659 | dt: {3500 + i % 5:.2f}ms | "
        f"tok/sec: {149796 - i:.2f}" for i in range(40)
    ]  # fmt: skip
    llmc = [
        f"step {i + 1:4d}/74 | loss {4.4 - i / 50:.6f} (+nanz)| norm 1.5494 (+nanz)| lr 3.00e-04 | "
        f"{168.7 + i % 3:.2f} ms | 39.0% bf16 MFU | 24333 tok/s" for i in range(40)
    ]  # fmt: skip
    table = ["step,train/loss,val/loss,time"]
    table += [f"{i},{9 * (i + 1) ** -0.1:.4f},{9.1 * (i + 1) ** -0.1:.4f},{i * 3.9:.2f}" for i in range(0, 400, 10)]
    other = [line.replace("9.", "8.") for line in table]
    return {
        "steady.log": nanogpt_log(steady, 20), "slowing.log": nanogpt_log(slowing), "spikes.log": nanogpt_log(spikes, 20),
        "nanochat.log": "\n".join(nanochat) + "\n", "build.log": "\n".join(build) + "\n",
        "llmc.log": "\n".join(llmc) + "\n", "a.csv": "\n".join(table) + "\n", "b.csv": "\n".join(other) + "\n",
        "empty.log": "", "prose.log": "nothing of use\n" * 5,
    }  # fmt: skip


LOGS = ("steady", "slowing", "spikes", "nanochat", "build", "llmc")
B1 = "examples/real-cases/b1.py"


def _comparisons() -> Iterator[Case]:
    files = _logs()
    yield from (
        case("compare configs", "compare home=gpt2-124m+gpu=4070 cloud=gpt2-124m+gpu=A100-SXM4-80GB", quick=True),
        case("compare configs json", "compare gpt2-124m gpt2-124m+batch_size=4 gpt2-350m --gpu 4090 --json", quick=True),
        case(
            "compare price",
            ("compare", "home=gpt2-124m+gpu=4070", "cloud=gpt2-124m+gpu=A100-SXM4-80GB", "--price", "A100-SXM4-80GB=1.2"),
        ),
        case("compare b1 b2", "compare examples/real-cases/b1.log+examples/real-cases/b1.py "
             "examples/real-cases/b2.csv+examples/real-cases/b2.py --gpu 4070 --column val_loss=val/loss"),
        case("compare logs", f"compare a=steady.log+{B1} b=slowing.log+{B1} --gpu 4070", files=files, quick=True),
        case("compare logs json", f"compare a=steady.log+{B1} b=spikes.log+{B1}+learning_rate=3e-4 --gpu 4070 --json", files=files),
        case("compare formats", "compare nanochat.log build.log llmc.log --json --gpu 4090", files=files),
        case("compare tables", f"compare a.csv+{B1} b.csv+{B1}+learning_rate=1e-4 --gpu 4070 "
             "--column train_loss=train/loss --column val_loss=val/loss", files=files),
        case("compare tables json", "compare a.csv b.csv --column train_loss=train/loss --column val_loss=val/loss --json", files=files),
        case("compare nanogpt configs", "compare examples/real-cases/b1.py examples/real-cases/b2.py --gpu 4070"),
        case("compare ar", "compare examples/real-cases/b1.py examples/real-cases/b2.py --gpu 4070 --lang ar"),
        case("compare hi json", "compare examples/real-cases/b1.py examples/real-cases/c.py --gpu 4070 --lang hi --json"),
        case("compare one config", "compare gpt2-124m --gpu 4070"),
        case("compare empty log", "compare empty.log steady.log --gpu 4070", files=files),
        case("compare narrow", f"compare a=steady.log+{B1} b=slowing.log+{B1} --gpu 4070", files=files, group="narrow"),
        case("compare others", "compare gpt2-124m gpt2-40m --gpu 4070 --used-by-others 2GB --json"),
    )  # fmt: skip
    plans = ("plan gpt2-124m --gpu 4070 --json", "plan gpt2-124m --gpu 4070 --batch_size=4 --json")
    write = "import subprocess, sys\nfor name, words in (('p.json', {0!r}), ('q.json', {1!r})):\n" \
        "    code = 'from foretrain.cli import main; main()'\n" \
        "    made = subprocess.run([sys.executable, '-c', code, *words.split()], capture_output=True, check=True)\n" \
        "    open(name, 'wb').write(made.stdout)\n"  # fmt: skip
    made = Step(python=write.format(*plans))
    yield case("compare plans", made, "compare p.json q.json", "compare p.json q.json --json", "report p.json --json")


def _explanations() -> Iterator[Case]:
    files = _logs()
    for name in LOGS:
        yield case(f"explain {name}", f"explain {name}.log --gpu 4090", files=files, quick=name == "spikes")
        yield case(f"explain {name} config json", f"explain {name}.log --gpu 4070 --config {B1} --json", files=files)
    snapshot, oom = "examples/snapshots/fragmented.pickle", "examples/logs/c-out-of-memory.log"
    yield from (
        case("explain snapshot", f"explain {snapshot}", quick=True),
        case("explain snapshot json", f"explain {snapshot} --json"),
        case("explain out of memory", f"explain {oom} --config examples/real-cases/c.py --gpu 4070"),
        case("explain out of memory json", f"explain {oom} --json", quick=True),
        case("explain b1", f"explain examples/real-cases/b1.log --config {B1} --gpu 4070"),
        case(
            "explain b1 options", f"explain examples/real-cases/b1.log --config {B1} --batch_size=8 --gpu 4070 --json"
        ),
        case("explain stdin", Step(("explain", "-", "--gpu", "4090"), stdin=str(files["steady.log"]))),
        case("explain ar", f"explain slowing.log --config {B1} --gpu 4070 --lang ar", files=files),
        case("explain hi", f"explain {snapshot} --lang hi"),
        case("explain narrow", f"explain spikes.log --config {B1} --gpu 4070", files=files, group="narrow"),
        case("explain empty", "explain empty.log", files=files),
        case("explain prose", "explain prose.log", files=files),
    )


def _reports() -> Iterator[Case]:
    files = _logs()
    yield from (
        case("report plan", "report gpt2-124m --gpu 4070 --batch_size=8 --out r.html", quick=True),
        case("report plan ar", "report gpt2-40m --gpu 3060 --out r.html --lang ar"),
        case("report plan hi", "report gpt2-350m --gpu T4 --out r.html --lang hi --json"),
        case("report real", "report examples/real-cases/c.py --gpu 4070 --used-by-others 2.1GB --json"),
        case("report modern", "report gpt2-124m --gpu H100-SXM5-80GB --recipe=modern --out r.html"),
        case("report log", f"report steady.log+{B1} --gpu 4070 --out r.html", files=files),
        case("report logs", f"report steady.log+{B1} slowing.log+{B1} --gpu 4070 --out r.html", files=files),
        case("report configs", "report gpt2-124m gpt2-350m --gpu 4090 --out r.html"),
        case("report snapshot", "report examples/snapshots/fragmented.pickle --out r.html"),
        case("report out of memory", "report examples/logs/c-out-of-memory.log+examples/real-cases/c.py --gpu 4070"),
        case("report tables", f"report a.csv+{B1} b.csv+{B1} --gpu 4070 --out r.html", files=files),
        case("report quiet", "report baby --gpu cpu --used-by-others 2GB --out r.html --quiet --price 0.2/h"),
    )


# --- small commands ---

TEXTS: dict[str, str | bytes] = {
    "books/one.txt": "It was the best of times.\n\nIt was the worst of times.\n" * 40,
    "books/two.txt": "Call me Ishmael. Some years ago…\n" * 60,
    "lines.jsonl": "".join(f'{{"text": "Line {i} of a file.", "other": {i}}}\n' for i in range(200)),
    "bad.jsonl": '{"text": "good"}\n{"text": 3}\nnot json\n',
}


def _data() -> Iterator[Case]:
    yield from (
        case("prepare plan", "prepare books --tokenizer byte --out set --plan", files=TEXTS, measured=True),
        case("prepare plan json", "prepare lines.jsonl --tokenizer byte --out set --plan --json", files=TEXTS, measured=True),
        case(
            "prepare byte", "prepare books --tokenizer byte --out set --val 10% --workers 1 --quiet --json",
            "data info set", "data info set --json", "data verify set", "data verify set --json",
            "data head set --tokens 40", "data head set --split val --document 0 --json",
            "data mix set=0.7 set=0.3 --out mix.toml --tokens 10k", "data mix one=1", files=TEXTS, measured=True,
            group="torch", quick=True,
        ),
        case(
            "prepare bpe", "prepare lines.jsonl --train-bpe 300 --out set --workers 1 --quiet --shuffle-buffer 50 --dedup",
            "data info set --json", "data head set --at 10 --tokens 30", files=TEXTS, measured=True, group="torch",
        ),
        case("prepare bad line", "prepare bad.jsonl --tokenizer byte --out set --workers 1 --quiet", files=TEXTS, measured=True),
        case("prepare skip bad", "prepare bad.jsonl --tokenizer byte --out set --workers 1 --skip-bad --quiet", files=TEXTS, measured=True),
        case("prepare nothing", "prepare nowhere --tokenizer byte --out set", files=TEXTS),
        case("data info nanogpt", "data info toy", "data info toy --json", "data info toy --count", "data verify toy", "data head toy", files=_toy()),
        case("data nowhere", "data info nowhere", "data verify nowhere --json", "data head nowhere"),
        case("data mix", "data mix toy=70 toy=30", "data mix toy=x", "data mix toy", files=_toy()),
    )  # fmt: skip


def _small() -> Iterator[Case]:
    yield from (
        case("gpus", "gpus", quick=True),
        case("gpus narrow", "gpus", group="narrow"),
        case("gpus json", "gpus --json", quick=True),
        case("gpus 4070", "gpus 4070"),
        case("gpus A100", "gpus A100"),
        case("gpus own", "gpus Mine --gpu-file mine.toml", files={"mine.toml": CARD}),
        case("gpus unknown", "gpus 4075", quick=True),
        case("mfu time", "mfu gpt2-124m --step-time 3.9 --gpu 4070", quick=True),
        case("mfu time json", "mfu gpt2-124m --step-time 3900ms --gpu 4070 --json"),
        case("mfu rate", "mfu gpt2-350m --tokens-per-s 34k --gpu A100-SXM4-80GB --clock 1.2GHz"),
        case("mfu several", "mfu gpt2-124m --tokens-per-s 134k --gpu 4090,A100-SXM4-80GB --json"),
        case(
            "mfu modern", "mfu gpt2-124m --recipe=modern --activation_checkpointing=true --tokens-per-s 90k --gpu 4090"
        ),
        case("languages", "languages"),
        case("languages json", "languages --json", quick=True),
        case("languages ar", "languages ar"),
        case("runs nothing", "runs"),
        case("runs nothing json", "runs --json"),
        case("calibrate show", "calibrate --show", "calibrate --show --json --device cpu"),
        case("verify show", "verify --show none.json"),
        case("version", "--version"),
        case("no words", ""),
    )


def _languages() -> Iterator[Case]:
    for language in ("en", "ar", "hi"):
        yield case(f"plan in {language}", f"plan gpt2-124m --gpu 4070 --full --lang {language}", quick=language == "hi")
        yield case(
            f"plan does not fit in {language}",
            f"--lang {language} plan gpt2-774m --gpu 3060 --batch_size=16 --compile=false",
        )
        yield case(f"error in {language}", "plan gpt2-124m --gpu 4711", env={"FORETRAIN_LANG": language}, quick=True)
        yield case(f"largest in {language}", f"plan gpt2-124m --gpu 4070 --largest batch_size --lang {language}")
        yield case(f"config error in {language}", f"plan gpt2-124m --n_head=7 --dropout=2 --gpu 4070 --lang {language}")
    yield case("unknown language", "plan gpt2-124m --gpu 4070 --lang xx")
    yield case("unknown language by variable", "gpus 4070", env={"FORETRAIN_LANG": "tlh"})


COMMANDS = (
    "plan", "advise", "train", "tune", "runs", "report", "compare", "explain", "watch", "mfu", "calibrate", "verify",
    "sample", "chat", "export", "prepare", "gpus", "languages", "serve", "demo", "data", "data info", "data verify",
    "data head", "data mix",
)  # fmt: skip


def _helps() -> Iterator[Case]:
    yield case("help", "--help", "-h", quick=True)
    yield case("help narrow", "--help", group="narrow")
    for command in COMMANDS:
        yield case(f"help {command}", f"{command} --help", quick=command in ("plan", "train", "data head"))


def _errors() -> Iterator[Case]:
    lines = (
        "nonsense", "plam gpt2-124m", "plan gpt2-125m --gpu 4070", "plan gpt2-124m --gpu 4075", "plan", "plan --gpu 4070",
        "plan gpt2-124m --gpu 4070 --batchsize=4", "plan gpt2-124m --gpu 4070 --batch_size=0",
        "plan gpt2-124m --gpu 4070 --batch_size=many", "plan gpt2-124m --gpu 4070 --n_embd=770",
        "plan gpt2-124m --gpu 4070 --dropout=1.5", "plan gpt2-124m --gpu 4070 --dtype=float8",
        "plan gpt2-124m --gpu 4070 --compile=perhaps", "plan gpt2-124m --gpu 4070 --used-by-others 900GB",
        "plan gpt2-124m --gpu 4070 --used-by-others lots", "plan gpt2-124m --gpu 4070 --step-time soon",
        "plan gpt2-124m --gpu 4070 --step-time -1", "plan gpt2-124m --gpu 4070 --price free",
        "plan gpt2-124m --gpu 4070 --within forever", "plan gpt2-124m --gpu 4070 --best", "plan --best --gpu 4070",
        "plan gpt2-124m --gpu 4070 --tokens some", "plan gpt2-124m --gpu 4070 --largest n_head",
        "plan gpt2-124m --gpu 4070 --observed 1GB", "plan gpt2-124m --gpu 4070 --trainer torchtitan",
        "plan gpt2-124m --gpu 4070 --jsno", "plan gpt2-124m --gpu 4070 --snapshot nowhere/s.pickle",
        "plan missing.toml --gpu 4070", "plan broken.toml --gpu 4070", "plan wrong.toml --gpu 4070",
        "plan code.py --gpu 4070", "plan binary.toml --gpu 4070", "plan folder --gpu 4070",
        "plan gpt2-124m --gpu 4070 --gpu-file broken.toml", "plan gpt2-124m --gpu-file missing.toml --gpu 4070",
        "plan gpt2-124m --gpu 4070 --torch_version=old", "plan gpt2-124m --gpu 4070 --memory_limit=much",
        "plan gpt2-124m --gpu 4070 --python /nowhere/python --exact", "plan gpt2-124m --gpu 4070 --lang",
        "plan gpt2-124m --gpu 4070 --matmul=fp8 --compile=false", "plan gpt2-124m --gpu 3060 --matmul=fp8",
        "plan gpt2-124m --gpu 4070 --price 0.3/h --json --n_layer=0", "plan gpt2-124m --gpu 4075 --json",
        "plan gpt2-124m --gpu 4070 --recipe=modern --dropout=0.1 --bias=true", "plan nanogpt.py --gpu 4070 --depth=12",
        "plan gpt2-124m --gpu 4070 --alloc-conf nonsense:1", "plan gpt2-124m --gpu 4070 --write w.toml",
        "advise gpt2-124m --gpu 4070 --goal fame", "advise gpt2-124m --gpu 4070 --apply 99",
        "advise gpt2-124m --gpu 4070 --write w.toml", "advise gpt2-124m --gpu 4070 --top 0", "advise missing.py --gpu 4070",
        "advise gpt2-124m --gpu 3060,4070",
        "compare", "compare missing-a missing-b", "compare broken.toml wrong.toml --gpu 4070", "compare binary.toml code.py",
        "compare gpt2-124m gpt2-40m --gpu 4070 --column nonsense", "explain missing", "explain binary.toml", "explain",
        "explain folder", "explain code.py --gpu 4075", "report missing", "report folder", "mfu gpt2-124m --gpu 4070",
        "mfu gpt2-124m --gpu 4070 --step-time 1 --tokens-per-s 5", "mfu gpt2-124m --gpu 4070 --step-time quick",
        "mfu gpt2-124m --gpu 4070 --tokens-per-s 100 --clock fast", "train missing.toml",
        "train wrong.toml", "sample missing", "export missing", "export folder --to onnx", "runs missing", "languages xx",
        "verify --show broken.toml", "verify --show missing.json", "prepare", "prepare books --out", "watch",
        "tune missing.toml", "tune gpt2-124m --budget never", "calibrate --device tpu", "serve --port 0", "demo --steps 3",
        "data", "data info", "data heads x", "data head x --tokens 0",
    )  # fmt: skip
    files: dict[str, str | bytes] = {
        "broken.toml": "n_layer = = 3\n", "wrong.toml": "n_layer = 'twelve'\nlayers = 3\nn_head = 5\n",
        "code.py": "import os\nn_layer = os.cpu_count()\n", "binary.toml": bytes(range(256)) * 4,
        "nanogpt.py": "n_layer = 3\nn_head = 3\n", "folder/readme.txt": "nothing\n",
    }  # fmt: skip
    for number, line in enumerate(lines):
        yield case(f"error: {line}", line, files=files, quick=number % 4 == 0)


# --- Python ---

PYTHON = {
    "plan": 'p = foretrain.plan("gpt2-124m", gpu="RTX 4070", batch_size=8, used_by_others="2GB")\n'
    "print(p); print(repr(p)); print(p._repr_html_()); print(json.dumps(p.to_json(), sort_keys=True))\n"
    'print(p.verdict_of("foretrain"), p.memory_of("foretrain").worst.needed_expected_bytes, p.timing.total_s.expected_s)',
    "plan of values": 'p = foretrain.plan({"n_layer": 4, "n_head": 4, "n_embd": 128}, gpu="4090", compile=False)\n'
    "print(p); print(json.dumps(p.to_json(), sort_keys=True))",
    "plan cpu": 'print(json.dumps(foretrain.plan("baby", gpu="cpu", used_by_others="2GB").to_json(), sort_keys=True))',
    "plan of a file": 'print(foretrain.plan("examples/real-cases/a.py", gpu="4070"))',
    "errors": 'for words in (("gpt2-125m", {}), ("gpt2-124m", {"batchsize": 2}), ("gpt2-124m", {"gpu": "4070,4090"}),\n'
    '              ("gpt2-124m", {"n_head": 7}), (3, {}), ("gpt2-124m", {"used_by_others": "900GB"})):\n'
    '    try:\n        foretrain.plan(words[0], **{"gpu": "4070", **words[1]})\n'
    '    except Exception as error:\n        print(type(error).__name__, getattr(error, "id", ""), error)\n'
    '        print([str(one) for one in getattr(error, "problems", ())])',
    "names": "print(sorted(dir(foretrain))); print(sorted(foretrain.__all__))\n"
    "for name in foretrain.__all__: print(name, type(getattr(foretrain, name)).__name__)",
    "cards": 'for name in ("4070", "RTX 3090", "A100 SXM4 80GB", "H100 SXM5 80GB"): print(foretrain.find_gpu(name))',
    "config": 'c = foretrain.resolve(["gpt2-124m", "--batch_size=4", "--compile=false"]); print(c)\n'
    "print(foretrain.RunConfig()); print(foretrain.RunConfig(n_layer=3, n_head=2, n_embd=64))",
}


def _python() -> Iterator[Case]:
    for name, source in PYTHON.items():
        yield case(f"python {name}", Step(python=f"import json\nimport foretrain\n{source}"), quick=name == "plan",
                   inputs=("repo",) if "examples/" in source else ())  # fmt: skip


# --- the page ---

RUNS_REQUESTS = (
    ("GET", "/api/runs"), ("GET", "/api/runs/{0}"), ("GET", "/api/runs/{1}"), ("GET", "/api/runs/{2}"),
    ("GET", "/api/runs/{0}/live?after=0"), ("GET", "/api/comparisons"), ("POST", "/api/compare", {"runs": ["{0}", "{1}"]}),
    ("POST", "/api/compare", {"runs": ["{0}"]}), ("GET", "/api/runs/unknown"),
    ("GET", "/api/runs/{0}/report"), ("GET", "/api/runs/{1}/report"), ("GET", "/api/runs/{2}/report"),
)  # fmt: skip
ASKED_PLANS: tuple[dict[str, Any], ...] = (
    {"model": "gpt2-124m", "values": {"batch_size": "12", "compile": "false"}, "gpu": "RTX 4090", "others": "2GB"},
    {"model": "gpt2-350m", "values": {"recipe": "modern"}, "gpu": "RTX 3060 12GB"},
    {"model": "baby", "values": {"price_per_hour": "0.3"}, "gpu": "T4"},
    {"model": "gpt2-1558m", "values": {"dtype": "float16"}, "gpu": "RTX 4070", "others": "1GB"},
    {"model": "gpt2-124m", "values": {"n_head": "7"}, "gpu": "RTX 4070"},
    {"model": "nothing", "values": {"nonsense": "1"}, "gpu": "RTX 4070"},
    {"values": {"n_layer": "3", "n_head": "3", "n_embd": "96"}, "gpu": "A100 SXM4 80GB"},
)


def _serves() -> Iterator[Case]:
    start = (("GET", "/api/start"), ("GET", "/"), ("GET", "/main.js"), ("GET", "/nothing"), ("GET", "/api/plan"))
    for language in ("en", "ar", "hi"):
        yield case(
            f"serve start {language}",
            Step(("--lang", language), requests=start[:1] if language != "en" else start),
            quick=language == "en",
        )
    plans = tuple(("POST", "/api/plan", asked) for asked in ASKED_PLANS)
    bad = (("POST", "/api/plan", "no json"), ("POST", "/api/plan", {"gpu": 3}), ("POST", "/api/plan", {"gpu": "4711"}))
    yield case("serve plans", Step(requests=plans + bad), quick=True)
    yield case("serve plans hi", Step(("--lang", "hi"), requests=plans[:3]))
    cards = {**ASKED_PLANS[0], "cards": ["RTX 3060 12GB", "RTX 4070", "A100 SXM4 80GB"]}
    pasted = [
        {"name": "a.toml", "text": TINY},
        {"name": "b.py", "text": "n_layer = 3\nn_head = 3\n"},
        {"name": "c", "text": "]"},
    ]
    yield case("serve forms", Step(requests=(
        ("POST", "/api/cards", cards), ("POST", "/api/toml", ASKED_PLANS[0]), ("POST", "/api/toml", ASKED_PLANS[4]),
        *(("POST", "/api/read", one) for one in pasted), ("GET", "/api/runs"), ("GET", "/api/comparisons"),
    )))  # fmt: skip
    advised = tuple(("POST", "/api/advice", asked) for asked in (ASKED_PLANS[3], ASKED_PLANS[0], ASKED_PLANS[4]))
    yield case("serve advice", Step(requests=advised))
    words = [one.partition("=") for one in SMALL.replace("--", "").split()]
    exact = {"model": "", "values": {name: value for name, _, value in words}, "gpu": "RTX 4070"}
    yield case("serve exact", Step(requests=(("POST", "/api/exact", exact), ("POST", "/api/exact", ASKED_PLANS[4]))))
    yield case("serve runs", Step(("--runs", "."), requests=RUNS_REQUESTS), inputs=("made",), quick=True)
    yield case("serve runs ar", Step(("--runs", ".", "--lang", "ar"), requests=RUNS_REQUESTS[:7]), inputs=("made",))


# --- runs: trained here, and one that the base commit trained ---

SMALL = (
    "--n_layer=2 --n_head=2 --n_embd=64 --block_size=64 --vocab_size=512 --batch_size=4 "
    "--gradient_accumulation_steps=2 --compile=false"
)
PREPARED = "prepare books lines.jsonl --tokenizer byte --out set --val 10% --workers 1 --quiet"
ON_SET = "train tiny.toml --dataset=set --vocab_size=256"
PROGRAM = """import time
print("tokens per iteration will be: 524,288")
print("number of parameters: 40.56M")
for i in range(12):
    print(f"iter {i}: loss {10.8 - i / 10:.4f}, time {100 + i % 3:.2f}ms, mfu {12.9 if i > 4 else -100:.2f}%", flush=True)
    time.sleep(0.1)
"""


def _made() -> Iterator[Case]:
    """Runs, a watched run and a calibration of the base commit: what reads them is given the same in both trees."""
    yield case(
        "made by BASE", PREPARED, f"{ON_SET} --out_dir=out-a", f"{ON_SET} --out_dir=out-b --learning_rate=3e-3",
        f"{ON_SET} --out_dir=out-c --seed=2", f"{ON_SET} --out_dir=out-m --recipe=modern --max_iters=8",
        Step(("watch", "--out", "watched", "--interval", "0.2", "--quiet", "--", "python3", "program.py")),
        "calibrate --quick --quiet", files={**_toy(), **TEXTS, "program.py": PROGRAM}, measured=True, group="torch",
        env={"FORETRAIN_CACHE": "cache"}, kept_as="made",
    )  # fmt: skip


def _of_runs() -> Iterator[Case]:
    runs = {"inputs": ("made",)}
    yield from (
        case("runs", "runs", "runs . --json", "runs out-a", **runs, quick=True),
        case("runs ar", "runs --lang ar", **runs),
        case("compare run", "compare out-a", "compare out-a --json", **runs, quick=True),
        case("compare run modern", "compare out-m", "compare out-m --lang hi", **runs),
        case("compare runs", "compare out-a out-b", "compare out-a out-b --json", **runs, quick=True),
        case("compare three runs", "compare out-a out-b out-c", "compare x=out-a y=out-c z=out-m --json", **runs),
        case("compare run and watched", "compare out-a watched", "compare watched", **runs),
        case("compare run and config", "compare out-a tiny.toml+batch_size=8 --gpu 4070 --json", **runs),
        case("explain run", "explain out-a", "explain out-a --json", **runs, quick=True),
        case("explain run modern", "explain out-m", "explain out-m --lang ar", **runs),
        case("explain watched", "explain watched", "explain watched --json", **runs),
        case("report run", "report out-a --out r.html", **runs, quick=True),
        case("report run here", "report out-b --json", **runs),
        case("report run ar", "report out-m --lang ar --out r.html", **runs),
        case("report runs", "report out-a out-b out-c --out r.html", **runs),
        case("report watched", "report watched --out r.html", **runs),
        case("report runs hi", "report x=out-a y=out-m --out r.html --lang hi", **runs),
        case("plan with a trained config", "plan out-a/config.toml --gpu 4070", "plan out-a --gpu 4070", **runs),
    )
    calibrated = {**runs, "env": {"FORETRAIN_CACHE": "cache"}}
    yield from (
        case("plan calibrated", "plan baby --gpu cpu --used-by-others 2GB", "plan tiny.toml --gpu cpu --used-by-others 2GB --json", **calibrated, quick=True),
        case("calibrate show stored", "calibrate --show", "calibrate --show --json", **calibrated),
        case("advise calibrated", "advise tiny.toml --gpu cpu --used-by-others 2GB --json", **calibrated),
        case("report calibrated", "report tiny.toml --gpu cpu --used-by-others 2GB --out r.html", **calibrated),
    )  # fmt: skip
    torch = {**runs, "group": "torch"}
    yield from (
        case("sample", "sample out-a --seed 3 --tokens 40", "sample out-m --seed 3 --tokens 40 --temperature 0 --json",
             "sample out-a --prompt It --tokens 20 --top-k 5 --json", **torch, quick=True, measured=True),
        case("export hf", "export out-a --out e", "export out-m --out f --json", **torch),
        case("export nanogpt", "export out-a --to nanogpt --out e --best --json", "export out-m --to nanogpt --out f", **torch),
        case("export safetensors", "export out-a --to safetensors", "export out-a --to safetensors --quiet", **torch, quick=True),
        case("train resumed", "train tiny.toml --dataset=set --vocab_size=256 --out_dir=out-a --max_iters=16 --resume auto", **torch, measured=True, quick=True),
        case("train from a run", f"{ON_SET} --init_from=out-a/ --out_dir=next --max_iters=4", **torch, measured=True),
        case("train from a run with moments", f"{ON_SET} --init_from=out-a/ --init_optimizer --out_dir=next --max_iters=16", **torch, measured=True),
        case("eval", f"{ON_SET} --init_from=out-a/ --eval_only=true --out_dir=judged --eval_sequences=16", **torch, measured=True),
    )  # fmt: skip


def _trains() -> Iterator[Case]:
    """A run of a second each: losses, weights, files and the keys of records; not its times."""
    more = {
        "": "", "modern": "--recipe=modern", "checkpointing": "--activation_checkpointing=true --loss_chunk_size=16",
        "adamw8bit": "--optimizer=adamw8bit", "muon": "--optimizer=muon --lr_schedule=linear", "bfloat16": "--dtype=bfloat16",
        "epochs": "--data_order=epochs --seed=7", "dropout": "--dropout=0.1 --bias=true",
        "offload": "--optimizer_offload=true --grad_clip=0", "half": "--dtype=bfloat16 --master_weights=true",
        "recomputed": "--recompute_norm_gelu=true --eval_batch_size=2", "accumulated": "--total_batch_size=256 --keep_checkpoints=1",
    }  # fmt: skip
    for name, words in more.items():
        yield case(
            f"train {name or 'plain'}", f"train tiny.toml {words} --max_iters={8 if name else 12}", files=_toy(),
            measured=True, group="torch", quick=name in ("", "modern"),
        )  # fmt: skip
    nano = "train examples/nanogpt/config/train_shakespeare_char.py tiny.toml"
    yield from (
        case("train nanogpt file", f"{nano} --max_iters=4 --json --quiet", files=_toy(), measured=True, group="torch"),
        case("train and resume", "train tiny.toml --max_iters=8 --quiet", "train tiny.toml --resume auto --quiet",
             "train tiny.toml --resume auto --max_iters=14 --quiet", files=_toy(), measured=True, group="torch"),
        case("train auto", "train tiny.toml --batch_size=auto --total_batch_size=256 --no-trial --max_iters=4 --memory_limit=2GiB",
             files=_toy(), measured=True, group="torch"),
        case("train compiled", "train tiny.toml --compile=true --n_layer=1 --max_iters=4", files=_toy(), measured=True, group="torch"),
        case("train no data", "train tiny.toml", files={"tiny.toml": TINY}, group="torch"),
        case("train diverges", "train tiny.toml --learning_rate=100 --min_lr=100 --grad_clip=0 --warmup_iters=0 --max_iters=60 --decay_lr=false",
             files=_toy(), measured=True, group="torch"),
        case("train bad shard", "train tiny.toml", files={**_toy(), "toy/train.bin": b"odd"}, group="torch", measured=True),
        case("watch", Step(("watch", "--out", "w", "--interval", "0.2", "--", "python3", "program.py")),
             Step(("watch", "--out", "w", "--json", "--", "false")), files={"program.py": PROGRAM}, measured=True),
    )  # fmt: skip


def _exact() -> Iterator[Case]:
    """Traces of small steps, eager and compiled, foretrain's and nanoGPT's."""
    plain = f"plan {SMALL} --gpu 4070 --exact"
    more = {
        "": "--json", "text": "", "explained": "--explain --observed 2GiB --process 1GiB", "nanogpt": "--trainer nanogpt --json",
        "modern": "--recipe=modern --json", "checkpointing": "--activation_checkpointing=true --json",
        "chunked": "--loss_chunk_size=64 --optimizer=adamw8bit --json", "float16": "--dtype=float16 --grad_clip=0 --json",
        "int8": "--matmul=int8 --json", "settings": "--alloc-conf expandable_segments:True --json",
        "snapshot": "--snapshot s.pickle --json", "offload": "--optimizer_offload=true --optimizer=muon --json",
        "offers": "--largest batch_size --vocab_size=64 --n_layer=1 --used-by-others 10GB",
        "compiled": "--compile=true --json", "compiled nanogpt": "--compile=true --trainer nanogpt --dtype=float16 --json",
        "compiled modern": "--compile=true --recipe=modern --json", "blocks": "--compile=true --compile_blocks=true --json",
    }  # fmt: skip
    for name, words in more.items():
        yield case(f"exact {name or 'plain'}", f"{plain} {words}", group="torch", quick=not name)
    trace = """import torch, foretrain
def train(on):
    model = torch.nn.Linear(784, 10).to(on.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        on.phase(f"step {step}")
        model(torch.empty(64, 784, device=on.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
found = foretrain.trace(train, gpu="RTX 4070")
print(found, found.fits(10 << 30))
"""
    yield from (
        case("exact python", Step(python=trace), group="torch"),
        case("exact explain", f"plan {SMALL} --gpu 4070 --explain", group="torch", quick=True),
        case("exact explain json", f"plan {SMALL} --gpu 3060 --explain --json --compile=true", group="torch"),
        case("exact cpu", f"plan {SMALL} --gpu cpu --used-by-others 2GB --exact --json", group="torch"),
        case("exact advise", f"advise {SMALL} --gpu 3060 --exact --top 1 --json", group="torch"),
        case("exact report", f"report gpt2-30m {SMALL} --gpu 4070 --exact --out r.html", group="torch"),
    )
