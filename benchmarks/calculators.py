"""One config through the calculators of training memory that install from the Python package index.

    python benchmarks/calculators.py [--only deepspeed --only accelerate] [--keep DIR] [--out FILE]

GPT-2 124M, micro-batch 12, context 1024, vocabulary 50304, fp16 autocast, AdamW, eager, flash attention, one GPU. Each
calculator is installed at a pinned version into a virtual environment of its own and asked by calculator_snippets.py;
one that cannot be installed or run has its reason in the table. The last row is foretrain's ledger. All are compared
with a published trace of nanoGPT's step, which is emulated: no GPU has measured any figure here. The ledger's tests
hold it to that same trace, so its row shows agreement of two predictions and no accuracy on a card.

On Linux only a CPU build of torch is installed, never the CUDA build of gigabytes: pip must be able to find one (an
index of CPU builds in PIP_EXTRA_INDEX_URL, or a folder of wheels in PIP_FIND_LINKS). About 1 GB of disk a calculator.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, report

from foretrain.base.units import GIB
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import find
from foretrain.predict.memory import predict
from foretrain.predict.spec import StepSpec

HERE = Path(__file__).parent
CONSTRAINTS = HERE.parent / "constraints.txt"
SNIPPETS = HERE / "calculator_snippets.py"
INSTALL_LIMIT_S, RUN_LIMIT_S = 1800, 900
# nanoGPT's eager step traced with fake tensors on PyTorch 2.15, 2026-11-20. tests/test_ledger.py holds the ledger to this
# trace, so the ledger's row is no independent check of it: that takes a card (benchmarks/gpu).
EMULATED_GIB = 12.86
EMULATED = "allocated peak, accumulation of 2 or more; published, emulated, not measured on a GPU"


@dataclass(frozen=True)
class Calculator:
    """`alone` is installed without its dependencies; `free`: pins of constraints.txt that it cannot live with."""

    name: str
    requirements: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    free: tuple[str, ...] = ()


CALCULATORS = (
    Calculator("accelerate", ("accelerate==1.15.0",)),
    Calculator("deepspeed", ("deepspeed==0.19.8",)),
    Calculator("torch-kitsune", ("torch-kitsune==0.7.0",)),
    Calculator("llm-analysis", ("llm-analysis==0.2.2",), free=("huggingface_hub", "tokenizers")),
    Calculator("megatron-core", alone=("megatron-core==0.16.1",)),
    # What it declares (Transformer Engine, mamba-ssm, causal-conv1d) exists for CUDA only; its formula needs torch.
    Calculator("megatron-bridge", ("torch", "numpy"), alone=("megatron-bridge==0.3.1",)),
    Calculator("vram-check", ("vram-check==0.1.1", "torch", "numpy")),
    Calculator("gpu-estimator", ("gpu-estimator==0.2.0", "transformers==5.23.0")),
    Calculator("qmemcalc", ("qmemcalc==0.1.1", "transformers==5.23.0")),
    Calculator("torchinfo", ("torchinfo==1.8.0", "torch", "numpy")),
    Calculator("torch", ("torch", "numpy")),
)


class Failed(Exception):
    """Why a calculator has no figure, in one sentence."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def sentence(text: str) -> str:
    """The line that names the error, without addresses and folders of this machine."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and "ResolutionImpossible" not in line]
    errors = [line for line in lines if re.match(r"(ERROR:|[\w.]*(Error|Exception|Failed)\b)", line)]
    line = (errors or lines or ["it said nothing"])[-1].removeprefix("ERROR: ")
    conflict = re.search(r"The conflict is caused by:\n((?: +\S.*\n)+)", text)
    if conflict:
        line = "pip found no versions that agree: " + "; ".join(part.strip() for part in conflict[1].splitlines())
    line = re.sub(r"\b[a-z+]+://\S+", "(an address)", line)
    line = re.sub(r"(?<![\w.])(?:/|[A-Z]:\\)[^\s'\"]*[/\\]([^\s'\"/\\]+)", r"\1", line)
    return line if len(line) <= 300 else line[:297] + "…"


def call(command: Sequence[str | Path], limit_s: int, env: dict[str, str], what: str) -> str:
    """Its standard output; Failed with the reason where it does not end well."""
    try:
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, encoding="utf-8", errors="replace",
            timeout=limit_s, env=env, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Failed(f"{what}: not done after {limit_s} s") from None
    if done.returncode:
        raise Failed(f"{what}: {sentence(done.stdout + done.stderr)}")
    return done.stdout


def constraints(calculator: Calculator, folder: Path) -> Path:
    """constraints.txt without the pins it cannot live with; on Linux torch's version becomes its CPU build."""
    kept = []
    for line in CONSTRAINTS.read_text("utf-8").splitlines():
        name, _, pin = line.partition("==")
        if name == "torch" and platform.system() == "Linux":
            line = f"torch=={pin}+cpu"
        if name not in calculator.free:
            kept.append(line)
    path = folder / f"{calculator.name}.constraints.txt"
    path.write_text("\n".join(kept) + "\n", "utf-8")
    return path


def environment(calculator: Calculator, folder: Path) -> Path:
    """The interpreter of the calculator's own environment, made where it is not there yet."""
    home = folder / calculator.name
    python = home / ("Scripts/python.exe" if platform.system() == "Windows" else "bin/python")
    stamp, content = home / "installed.txt", "\n".join([*calculator.requirements, *calculator.alone])
    if stamp.is_file() and stamp.read_text("utf-8") == content:
        return python
    env = {**os.environ, "DS_BUILD_OPS": "0"}  # DeepSpeed would look for a CUDA compiler
    env.pop("PYTHONPATH", None)
    call([sys.executable, "-m", "venv", "--clear", home], INSTALL_LIMIT_S, env, "its environment was not made")
    pip = [python, "-m", "pip", "install", "--no-compile", "--progress-bar=off", "--disable-pip-version-check"]
    pins = ["--constraint", constraints(calculator, folder)]
    for options, names in ((pins, calculator.requirements), (["--no-deps"], calculator.alone)):
        if names:
            call([*pip, *options, *names], INSTALL_LIMIT_S, env, "not installed")
    stamp.write_text(content, "utf-8")
    return python


def ask(calculator: Calculator, folder: Path) -> dict[str, Any]:
    """What the calculator answers, with its version; or its failure."""
    pinned = next(
        (p for p in (*calculator.alone, *calculator.requirements) if p.startswith(f"{calculator.name}==")), ""
    )
    found: dict[str, Any] = {"calculator": calculator.name, "version": pinned.partition("==")[2] or None}
    started = time.monotonic()
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        say(f"{calculator.name}: installing")
        python = environment(calculator, folder)
        say(f"{calculator.name}: asking, after {time.monotonic() - started:.0f} s")
        printed = call([python, "-I", SNIPPETS, calculator.name], RUN_LIMIT_S, env, "not run")
        found |= json.loads(printed.splitlines()[-1])
    except Failed as failure:
        found["failure"] = str(failure)
    except (OSError, ValueError, IndexError) as error:
        found["failure"] = sentence(f"{type(error).__name__}: {error}")
    say(f"{calculator.name}: {found.get('failure') or 'answered'}, {time.monotonic() - started:.0f} s")
    return found


def ledger() -> dict[str, Any]:
    """foretrain's own figure for the same step."""
    memory = predict(
        StepSpec.of(RunConfig(batch_size=12), find("RTX 4090"), "nanogpt", dtype="float16", compiled=False)
    )
    worst = memory.worst
    parts = {component.id: component.size_bytes for component in worst.components}
    counts = f"{memory.source}: every tensor alive at its worst moment ({worst.phase}, {worst.moment})"
    return {"label": "nanoGPT's eager step", "bytes": worst.allocated_bytes, "counts": counts, "parts": parts}


def table_rows(found: dict[str, Any]) -> list[list[str]]:
    name = " ".join(filter(None, (found["calculator"], found["version"])))
    if "failure" in found:
        return [[name, "–", "–", found["failure"]]]
    return [
        [f"{name}: {a['label']}", f"{a['bytes'] / GIB:.2f}", f"{a['error']:+.0%}", a["counts"]]
        for a in found["answers"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [c.name for c in CALCULATORS]
    parser.add_argument("--only", action="append", choices=names, help="ask this calculator; may be repeated")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="make the environments here and keep them for repeats")
    parser.add_argument("--out", type=Path, help="where to write the JSON; with --only ./calculators.json")
    options = parser.parse_args()
    out = options.out or (Path("calculators.json") if options.only else RESULTS / "calculators.json")

    rows = []
    for calculator in CALCULATORS:
        if options.only and calculator.name not in options.only:
            continue
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            rows.append(ask(calculator, options.keep.resolve()))
        else:
            with tempfile.TemporaryDirectory(prefix="foretrain-calculator-", ignore_cleanup_errors=True) as folder:
                rows.append(ask(calculator, Path(folder)))
    rows.append({"calculator": "foretrain", "version": None, "answers": [ledger()]})
    for a in (a for row in rows for a in row.get("answers", ())):
        a["error"] = a["bytes"] / (EMULATED_GIB * GIB) - 1
    data = {
        "what": (__doc__ or "").splitlines()[0],
        "config": {"model": "GPT-2 124M", "batch_size": 12, "block_size": 1024, "vocab_size": 50304, "dtype": "float16",
                   "optimizer": "AdamW", "compile": False, "attention": "flash", "gpus": 1},
        "reference": {"allocated_gib": EMULATED_GIB, "what": EMULATED},
        "rows": rows,
    }  # fmt: skip
    columns = ["calculator", "GiB", f"against {EMULATED_GIB} (emulated)", "what it counts, or why it has no figure"]
    report(
        out,
        "GPT-2 124M, micro-batch 12, fp16, eager: memory (GiB)",
        columns,
        [r for f in rows for r in table_rows(f)],
        data,
    )
    print(f"{EMULATED_GIB} GiB: {EMULATED}")


if __name__ == "__main__":
    main()
