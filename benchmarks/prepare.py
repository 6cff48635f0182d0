"""Preparing text: peak memory and tokens/s of `foretrain prepare`, of the bare tokenizer, and of two usual ways.

The source is the text that is on every machine: the sources of Python's standard library and what lies in
/usr/share/doc, repeated with variation (each copy has its lines cut anew and its own head) to the wanted size as JSON
lines. All ways use the same GPT-2-sized BPE of it, trained once, through tiktoken.

- bare: as many processes as cores, each tokenizing its share of the documents, ids thrown away. What is possible.
- foretrain: `foretrain prepare`, its processes together.
- nanogpt: data/openwebtext/prepare.py re-enacted without its libraries: every document's ids kept as a Python list,
  then written into one memmap of train.bin (the list is what `datasets` holds in Arrow; it maps in num_proc processes).
- build-nanogpt: fineweb.py re-enacted: pool.imap over documents one by one, shards of 100 M tokens.

    python benchmarks/prepare.py --size 1GB --size 4GB       what the project asks for; each part is kept and resumed
    python benchmarks/prepare.py --size 100MB --only foretrain bare
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import common
import numpy as np

from foretrain.base.quantities import parse_bytes
from foretrain.base.units import format_bytes

WAYS = ("bare", "foretrain", "nanogpt", "build-nanogpt")
SHARD_TOKENS = 100_000_000
_DOCS = Path("/usr/share/doc")
_encoding: Any = None


# -- the source --------------------------------------------------------------------------------------------


def originals() -> Iterator[str]:
    """Text of this machine, file by file."""
    places = [(Path(sysconfig.get_paths()["stdlib"]), "*.py"), (_DOCS, "*")]
    for folder, pattern in places:
        for path in sorted(folder.rglob(pattern)) if folder.is_dir() else ():
            if path.is_file() and "site-packages" not in path.parts and 500 < path.stat().st_size < 200_000:
                try:
                    yield path.read_text("utf-8")
                except (UnicodeDecodeError, OSError):
                    continue


def make_source(path: Path, size: int) -> None:
    """JSON lines of `size` bytes; no two documents are the same."""
    texts, made, chance = list(originals()), 0, random.Random(0)
    staging = path.with_suffix(".part")
    with staging.open("w", encoding="utf-8") as file:
        copy = 0
        while made < size:
            chance.shuffle(texts)
            for text in texts:
                lines = text.splitlines(keepends=True)
                cut = chance.randrange(len(lines)) if lines else 0
                body = f"copy {copy} " + "".join(lines[cut:] + lines[:cut])
                made += file.write(json.dumps({"text": body}) + "\n")
                if made >= size:
                    break
            copy += 1
    staging.rename(path)


def documents(path: Path) -> Iterator[str]:
    """The texts of the source."""
    with path.open("r", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


# -- the ways ----------------------------------------------------------------------------------------------


def load_encoding(folder: str) -> None:
    """The tokenizer of a worker."""
    global _encoding
    from foretrain.data.tokenizer import TiktokenTokenizer

    _encoding = TiktokenTokenizer.load(Path(folder), "bench")._encoding


def bare(source: str, part: int, parts: int, folder: str) -> tuple[int, float]:
    """(tokens, seconds) of tokenizing every parts-th document; reading is not counted."""
    load_encoding(folder)
    tokens, spent = 0, 0.0
    held: list[str] = []
    for number, text in enumerate(documents(Path(source))):
        if number % parts == part:
            held.append(text)
        if len(held) == 500:
            start = time.perf_counter()
            tokens += sum(len(_encoding.encode_to_numpy(text, disallowed_special=())) for text in held)
            spent += time.perf_counter() - start
            held.clear()
    start = time.perf_counter()
    tokens += sum(len(_encoding.encode_to_numpy(text, disallowed_special=())) for text in held)
    return tokens, spent + time.perf_counter() - start


def ids_of(text: str) -> list[int]:
    """As both scripts have it: ids and the separator, a list."""
    return [*_encoding.encode_ordinary(text), _encoding.eot_token]


def array_of(text: str) -> np.ndarray:
    """build-nanogpt's worker: uint16 ids of a document."""
    ids = np.array(ids_of(text))
    assert (ids >= 0).all()
    assert (ids < 2**16).all()
    return ids.astype(np.uint16)


def nanogpt(source: Path, out: Path, folder: str, cores: int) -> int:
    """All documents mapped, then one memmap."""
    with get_context("spawn").Pool(cores, load_encoding, (folder,)) as pool:
        made = pool.map(ids_of, list(documents(source)), chunksize=64)
    total = sum(len(ids) for ids in made)
    array = np.memmap(out / "train.bin", dtype=np.uint16, mode="w+", shape=(total,))
    at = 0
    for ids in made:
        array[at : at + len(ids)] = ids
        at += len(ids)
    array.flush()
    return total


def build_nanogpt(source: Path, out: Path, folder: str, cores: int) -> int:
    """One document at a time from a pool, into shards."""
    held, filled, shards, total = np.empty(SHARD_TOKENS, dtype=np.uint16), 0, 0, 0
    with get_context("spawn").Pool(cores, load_encoding, (folder,)) as pool:
        for ids in pool.imap(array_of, documents(source), chunksize=16):
            total += len(ids)
            while len(ids):
                room = min(len(ids), SHARD_TOKENS - filled)
                held[filled : filled + room] = ids[:room]
                filled, ids = filled + room, ids[room:]
                if filled == SHARD_TOKENS:
                    np.save(out / f"shard_{shards:06d}", held)
                    shards, filled = shards + 1, 0
    np.save(out / f"shard_{shards:06d}", held[:filled])
    return total


# -- measuring ---------------------------------------------------------------------------------------------


def tree_rss_bytes(root: int) -> int:
    """Resident bytes of a process and all below it; shared pages are counted once for each, so it is an upper bound."""
    children: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
                sizes[int(entry.name)] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
            except (OSError, IndexError, ValueError):
                continue
    total, todo = 0, [root]
    while todo:
        pid = todo.pop()
        total += sizes.get(pid, 0)
        todo += children.get(pid, [])
    return total


def watched(command: list[str]) -> tuple[str, float, int]:
    """(stdout, seconds, peak bytes of the process tree, asked ten times a second)."""
    start, peak, over = time.perf_counter(), 0, threading.Event()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.1):
            peak = max(peak, tree_rss_bytes(process.pid))

    thread = threading.Thread(target=watch)
    thread.start()
    output, _ = process.communicate()
    over.set()
    thread.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return output, time.perf_counter() - start, peak


def one(way: str, source: Path, work: Path, cores: int) -> None:
    """A way in this process; prints its tokens (and, of the bare tokenizer, its seconds) as JSON."""
    folder, out = str(work / "tokenizer"), work / f"out-{way}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    if way == "bare":
        with get_context("spawn").Pool(cores) as pool:
            parts = pool.starmap(bare, [(str(source), part, cores, folder) for part in range(cores)])
        result = {"tokens": sum(tokens for tokens, _ in parts), "wall_s": max(seconds for _, seconds in parts)}
    else:
        start = time.perf_counter()
        run: Callable[..., int] = nanogpt if way == "nanogpt" else build_nanogpt
        tokens = run(source, out, folder, cores)
        result = {"tokens": tokens, "wall_s": time.perf_counter() - start}
    print(json.dumps(result))
    shutil.rmtree(out)


def foretrain_run(source: Path, work: Path, cores: int) -> dict[str, Any]:
    """`foretrain prepare` from its start to its index."""
    out = work / "out-foretrain"
    shutil.rmtree(out, ignore_errors=True)
    command = [
        sys.executable, "-c", RUN, str(source), str(out), str(work / "tokenizer"), str(cores),
    ]  # fmt: skip
    output, wall_s, peak = watched(command)
    shutil.rmtree(out)
    return {"tokens": json.loads(output)["tokens"], "wall_s": wall_s, "peak_bytes": peak}


# The engine with a tokenizer that is in no list of tiktoken's: put into its registry, as a plugin would.
RUN = """
import sys, json, tiktoken.registry
from pathlib import Path
from foretrain.data.tokenizer import TiktokenTokenizer
from foretrain.data.prepare.engine import prepare
from foretrain.data.prepare.options import PrepareOptions
source, out, folder, cores = sys.argv[1:]
tiktoken.registry.ENCODINGS["bench"] = TiktokenTokenizer.load(Path(folder), "bench")._encoding
done = prepare(PrepareOptions(sources=(source,), out=out, tokenizer="bench", workers=int(cores)))
print(json.dumps({"tokens": done.tokens}))
"""


def measure(way: str, source: Path, work: Path, cores: int) -> dict[str, Any]:
    """tokens, wall_s and peak_bytes of a way."""
    if way == "foretrain":
        return foretrain_run(source, work, cores)
    command = [
        sys.executable,
        __file__,
        "--run",
        way,
        "--work",
        str(work),
        "--source",
        str(source),
        "--cores",
        str(cores),
    ]
    output, _, peak = watched(command)
    return {**json.loads(output), "peak_bytes": peak}


def make_tokenizer(work: Path, source: Path) -> None:
    """A BPE of GPT-2's size from 16 MB of the source, as tiktoken has it."""
    import tiktoken

    from foretrain.data.hf_tokenizer import byte_characters
    from foretrain.data.tokenizer import BpeTokenizer, TiktokenTokenizer

    def sample() -> Iterator[bytes]:
        left = 16_000_000
        for text in documents(source):
            yield text.encode()
            left -= len(text)
            if left < 0:
                return

    vocabulary = json.loads(BpeTokenizer.train(sample(), 50257).text)["model"]["vocab"]
    bytes_of = {character: byte for byte, character in byte_characters().items()}
    tokens = sorted((id, token) for token, id in vocabulary.items() if token != BpeTokenizer.SEPARATOR)
    ranks = {bytes(bytes_of[c] for c in token): rank for rank, (_, token) in enumerate(tokens)}
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    encoding = tiktoken.Encoding(
        "bench", pat_str=pattern, mergeable_ranks=ranks, special_tokens={BpeTokenizer.SEPARATOR: len(ranks)}
    )
    staging = work / "tokenizer.part"
    staging.mkdir(exist_ok=True)
    TiktokenTokenizer("bench", encoding).save(staging)
    staging.rename(work / "tokenizer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", help="of the source, such as 1GB; several may be given")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path, default=Path("bench-prepare"), help="sources and unfinished results")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "prepare.json")
    parser.add_argument("--run", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.run:
        one(words.run, words.source, words.work, words.cores)
        return
    words.work.mkdir(parents=True, exist_ok=True)
    for size in words.size or ["1GB", "4GB"]:
        source = words.work / f"{size}.jsonl"
        if not source.exists():
            make_source(source, parse_bytes(size))
        if not (words.work / "tokenizer").exists():
            make_tokenizer(words.work, source)
        for way in words.only:
            kept = words.work / f"{size}-{way}-{words.cores}.json"
            if not kept.exists():
                found = measure(way, source, words.work, words.cores)
                kept.write_text(json.dumps({"size": size, "way": way, "cores": words.cores, **found}), "utf-8")
    # All that was ever measured in this folder, not the sizes of this call alone.
    parts = [json.loads(p.read_text("utf-8")) for p in words.work.glob(f"*-{words.cores}.json")]
    results = sorted(parts, key=lambda part: (parse_bytes(part["size"]), WAYS.index(part["way"])))
    rows = []
    for result in results:
        rate = result["tokens"] / result["wall_s"]
        base = next((r for r in results if r["size"] == result["size"] and r["way"] == "bare"), None)
        share = f"{rate / (base['tokens'] / base['wall_s']):.1%}" if base else "–"
        rows.append([
            f"{result['size']} {result['way']}", f"{result['tokens']:,}", f"{rate:,.0f}", share, f"{result['wall_s']:.1f} s",
            format_bytes(result["peak_bytes"]),
        ])  # fmt: skip
    columns = ["source, way", "tokens", "tokens/s", "of bare", "wall", "peak of the tree"]
    common.report(words.out, "Preparing text", columns, rows, {"results": results})


if __name__ == "__main__":
    main()
