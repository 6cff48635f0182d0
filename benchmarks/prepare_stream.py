"""A long source without its disk: a generator's documents go through `foretrain prepare -`; time and memory by size.

The generator stands in the place of files: it writes JSON lines into a pipe, texts of this machine (as in
benchmarks/prepare.py), each with a head of its own, so no two are the same. Shards are written to memory
(/dev/shm, where it is there) and deleted as soon as they are complete, since 100 GB of text are 50 to 200 GB of ids.
What is measured is foretrain's: the generator's memory and processor time are left out, its waits are not.

    python benchmarks/prepare_stream.py --size 500MB --size 1GB          a BPE of GPT-2's size
    python benchmarks/prepare_stream.py --tokenizer byte --size 100GB    bytes as ids stand in for a tokenizer

Sizes add up over calls; the slopes are those of log(seconds) and log(peak bytes) over log(size), by least squares.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
import prepare

from foretrain.base.quantities import parse_bytes
from foretrain.base.units import format_bytes

TOKENIZERS = ("bench", "byte")
_BODIES_BYTES = 32 * 2**20


def generate(size: int) -> None:
    """`size` bytes of JSON lines on stdout."""
    bodies, held = [], 0
    for text in prepare.originals():
        bodies.append(json.dumps(text)[1:].encode() + b"}\n")
        held += len(bodies[-1])
        if held > _BODIES_BYTES:
            break
    made = copy = 0
    out = sys.stdout.buffer
    while made < size:
        for number, body in enumerate(bodies):
            made += out.write(b'{"text": "copy %d of %d ' % (copy, number)) + out.write(body)
            if made >= size:
                break
        copy += 1
    out.flush()


def emptied(folder: Path, over: threading.Event) -> None:
    """Delete shards that are complete."""
    while not over.wait(0.2):
        for path in folder.glob("*-*.bin"):
            path.unlink(missing_ok=True)


def measure(size: str, tokenizer: str, work: Path, cores: int) -> dict[str, Any]:
    """One pass."""
    place = Path(tempfile.mkdtemp(prefix="bench-prepare-", dir="/dev/shm" if Path("/dev/shm").is_dir() else work))
    (place / "tokenizer").symlink_to((work / "tokenizer").resolve())
    source = subprocess.Popen(
        [sys.executable, __file__, "--generate", str(parse_bytes(size))], stdout=subprocess.PIPE
    )  # fmt: skip
    over = threading.Event()
    thread = threading.Thread(target=emptied, args=(place / "out-foretrain", over))
    thread.start()
    start, (busy, own) = time.perf_counter(), prepare.processor_s()
    try:
        found = prepare.foretrain_run("-", place, cores, tokenizer, source.stdout)
        processor_s = prepare.processor_s()[1] - own
        source.wait()
        later_busy, later_own = prepare.processor_s()
    finally:
        over.set()
        thread.join()
        source.kill()
        shutil.rmtree(place)
    outside = (later_busy - busy - (later_own - own)) / (time.perf_counter() - start) / (os.cpu_count() or 1)
    return {
        "size": size,
        "tokenizer": tokenizer,
        "cores": cores,
        **found,
        "processor_s": processor_s,
        "outside": outside,
    }


def slopes(passes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each tokenizer's passes: how seconds and peak bytes grow with size (1: linear, 0: constant)."""
    made = []
    for tokenizer in TOKENIZERS:
        own = [p for p in passes if p["tokenizer"] == tokenizer]
        sizes = np.log([parse_bytes(p["size"]) for p in own])
        if len(set(sizes.tolist())) > 1:
            slope = {key: float(np.polyfit(sizes, np.log([p[key] for p in own]), 1)[0])
                     for key in ("wall_s", "processor_s", "peak_bytes")}  # fmt: skip
            made.append({"tokenizer": tokenizer, **slope})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", default=[], help="such as 1GB; several may be given")
    parser.add_argument("--tokenizer", choices=TOKENIZERS, default="bench")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path, default=Path("bench-prepare"), help="where prepare.py has its tokenizer")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "prepare_stream.json")
    parser.add_argument("--generate", type=int, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.generate:
        generate(words.generate)
        return
    kept = words.work / "stream.jsonl"
    for size in words.size:
        line = measure(size, words.tokenizer, words.work, words.cores)
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)
    passes = [json.loads(line) for line in kept.read_text("utf-8").splitlines()]
    passes.sort(key=lambda p: (p["tokenizer"], parse_bytes(p["size"])))
    rows = [
        [f"{p['size']} {p['tokenizer']}", f"{p['tokens']:,}", f"{p['wall_s']:.1f} s", f"{p['processor_s']:.1f} s",
         f"{p['outside']:.0%}", format_bytes(p["peak_bytes"])] for p in passes
    ]  # fmt: skip
    columns = ["size, tokenizer", "tokens", "wall", "processor", "others", "peak of the tree"]
    common.report(words.out, "A generated source", columns, rows, {"passes": passes, "slopes": slopes(passes)})


if __name__ == "__main__":
    main()
