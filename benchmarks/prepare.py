"""Preparing text: peak memory and tokens/s of `foretrain prepare`, of the bare tokenizer, and of two usual ways.

The source is the text that is on every machine: the sources of Python's standard library and what lies in
/usr/share/doc, repeated with variation (each copy has its lines cut in other places and its own head) to the wanted size as JSON
lines. All ways use the same GPT-2-sized BPE of it, trained once, through tiktoken.

- bare: as many processes as cores, each tokenizing its share of the documents, ids thrown away. What is possible.
- foretrain: `foretrain prepare`, its processes together.
- nanogpt: data/openwebtext/prepare.py re-enacted without its libraries: every document's ids kept as a Python list,
  then written into one memmap of train.bin (the list is what `datasets` holds in Arrow; it maps in num_proc processes).
- llm.c: dev/data/fineweb.py re-enacted, which is build-nanogpt's too: pool.imap over documents in chunks of 16, into
  one array of a shard (here 100 M tokens) in the main process. Both scripts leave two cores free; this one none.
- datatrove: its own JsonlReader and DocumentTokenizer (with its shuffle), a task for each core, each with its part of
  the source (datatrove and orjson may lie in a Python of their own); documents in batches of 1,000, since 10,000 of
  this source do not fit into memory. Its tokenizer is the same vocabulary in Hugging Face's tokenizers. Its merge into
  one file is left out.

Ways take turns, a round of all after the other. What others take of the processor meanwhile (busy or stolen time that
is not ours) is kept with each; a round with more than 5% of it counts for memory and processor time alone.

    python benchmarks/prepare.py --size 256MB                one more round of all; rounds are kept and add up
    python benchmarks/prepare.py --size 1GB --only bare foretrain --rounds 2
    python benchmarks/prepare.py --stream bench --size 1GB   a long source without its disk: a BPE of GPT-2's size
    python benchmarks/prepare.py --stream byte --size 100GB  bytes as ids stand in for a tokenizer

--stream: a generator stands in the place of files: it writes JSON lines into a pipe, texts of this machine, each with a
head of its own, so no two are the same. Shards are written to memory (/dev/shm, where it is there) and deleted as soon
as they are complete, since 100 GB of text are 50 to 200 GB of ids. What is measured is foretrain's: the generator's
memory and processor time are left out, its waits are not. Sizes add up over calls; the slopes are those of
log(seconds) and log(peak bytes) over log(size), by least squares.
"""

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import common
import numpy as np

from foretrain.base.quantities import parse_bytes

WAYS = ("bare", "foretrain", "nanogpt", "llm.c", "datatrove")
MOST_OUTSIDE = 0.05
SHARD_TOKENS = 100_000_000
_DOCS = Path("/usr/share/doc")
_encoding: Any = None


def originals() -> Iterator[str]:
    places = [(Path(sysconfig.get_paths()["stdlib"]), "*.py"), (_DOCS, "*")]
    for folder, pattern in places:
        for path in sorted(folder.rglob(pattern)) if folder.is_dir() else ():
            if path.is_file() and "site-packages" not in path.parts and 500 < path.stat().st_size < 200_000:
                try:
                    yield path.read_text("utf-8")
                except (UnicodeDecodeError, OSError):
                    continue


def make_source(path: Path, size: int) -> None:
    """Write JSON lines of `size` bytes; no two documents are the same."""
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
    with path.open("r", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def load_encoding(folder: str) -> None:
    global _encoding
    from foretrain.data.tokenizer import TiktokenTokenizer

    _encoding = TiktokenTokenizer.load(Path(folder), "bench")._encoding


def bare(source: str, part: int, parts: int, folder: str) -> tuple[int, float, float]:
    """Return (tokens, seconds, processor seconds) of tokenizing every parts-th document; reading is not counted."""
    load_encoding(folder)
    tokens, spent, processor = 0, 0.0, 0.0
    held: list[str] = []

    def tokenize() -> None:
        nonlocal tokens, spent, processor
        start, before = time.perf_counter(), time.process_time()
        tokens += sum(len(_encoding.encode_to_numpy(text, disallowed_special=())) for text in held)
        spent, processor = spent + time.perf_counter() - start, processor + time.process_time() - before
        held.clear()

    for number, text in enumerate(documents(Path(source))):
        if number % parts == part:
            held.append(text)
        if len(held) == 500:
            tokenize()
    tokenize()
    return tokens, spent, processor


def ids_of(text: str) -> list[int]:
    """Return ids and the separator as a list, as both scripts do."""
    return [*_encoding.encode_ordinary(text), _encoding.eot_token]


def array_of(text: str) -> np.ndarray:
    """Return uint16 ids of a document, in its worker."""
    ids = np.array(ids_of(text))
    assert (ids >= 0).all()
    assert (ids < 2**16).all()
    return ids.astype(np.uint16)


def nanogpt(source: Path, out: Path, folder: str, cores: int) -> int:
    """Map all documents, then write one memmap."""
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


def llm_c(source: Path, out: Path, folder: str, cores: int) -> int:
    """Take one document at a time from a pool, into an array of a shard."""
    held, filled, shards, total = np.empty(SHARD_TOKENS, dtype=np.uint16), 0, 0, 0
    with get_context("spawn").Pool(cores, load_encoding, (folder,)) as pool:
        for ids in pool.imap(array_of, documents(source), chunksize=16):
            total += len(ids)
            while len(ids):
                room = min(len(ids), SHARD_TOKENS - filled)
                held[filled : filled + room] = ids[:room]
                filled, ids = filled + room, ids[room:]
                if filled == SHARD_TOKENS:
                    llm_c_file(out / f"shard_{shards:06d}.bin", held)
                    shards, filled = shards + 1, 0
    llm_c_file(out / f"shard_{shards:06d}.bin", held[:filled])
    return total


def llm_c_file(path: Path, ids: np.ndarray) -> None:
    """Write a header of 256 int32, then the ids."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, len(ids)
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.write(ids.tobytes())


def make_parts(source: Path, parts: int) -> None:
    """Split the source into one file for each of datatrove's tasks."""
    folder = source.with_suffix(".parts")
    if folder.exists():
        return
    staging = source.with_suffix(".parts-new")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    size, part, written = source.stat().st_size, 0, 0
    with source.open("rb") as lines:
        file = (staging / "0.jsonl").open("wb")
        for line in lines:
            if written >= (part + 1) * size / parts:
                file.close()
                part += 1
                file = (staging / f"{part}.jsonl").open("wb")
            written += file.write(line)
        file.close()
    staging.rename(folder)


def tree_rss_bytes(root: int) -> int:
    """Return resident bytes of a process tree, an upper bound as shared pages count once for each."""
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


def processor_time() -> tuple[float, float]:
    """Return (seconds that all cores were busy or stolen, seconds of ended children)."""
    user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    return busy, own.ru_utime + own.ru_stime


def watched(command: list[str], stdin: Any = None) -> tuple[str, float, int]:
    """Return (stdout, seconds, peak bytes of the process tree, polled ten times per second)."""
    start, peak, over = time.perf_counter(), 0, threading.Event()
    process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True)

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
    """Run a variant in this process; print its tokens (and, of the bare tokenizer, its seconds) as JSON."""
    folder, out = str(work / "tokenizer"), work / f"out-{way}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    if way == "bare":
        with get_context("spawn").Pool(cores) as pool:
            parts = pool.starmap(bare, [(str(source), part, cores, folder) for part in range(cores)])
        tokens, seconds, processor = zip(*parts, strict=True)
        result = {"tokens": sum(tokens), "wall_s": max(seconds), "processor_s": sum(processor)}
    else:
        start = time.perf_counter()
        run: dict[str, Callable[..., int]] = {"nanogpt": nanogpt, "llm.c": llm_c}
        tokens = run[way](source, out, folder, cores)
        result = {"tokens": tokens, "wall_s": time.perf_counter() - start}
    print(json.dumps(result))
    shutil.rmtree(out)


def foretrain_run(source: str, work: Path, cores: int, tokenizer: str = "bench", stdin: Any = None) -> dict[str, Any]:
    out = work / "out-foretrain"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-c", RUN, source, str(out), str(work / "tokenizer"), str(cores), tokenizer]
    output, wall_s, peak = watched(command, stdin)
    shutil.rmtree(out)
    return {"tokens": json.loads(output)["tokens"], "wall_s": wall_s, "peak_bytes": peak}


# The engine with a tokenizer that is not in tiktoken's list, registered as a plugin would.
RUN = """
import sys, json, tiktoken.registry
from pathlib import Path
from foretrain.data.tokenizer import TiktokenTokenizer
from foretrain.data.prepare.engine import prepare
from foretrain.data.prepare.sources import PrepareOptions
source, out, folder, cores, tokenizer = sys.argv[1:]
if tokenizer == "bench":
    tiktoken.registry.ENCODINGS["bench"] = TiktokenTokenizer.load(Path(folder), "bench")._encoding
done = prepare(PrepareOptions(sources=(source,), out=out, tokenizer=tokenizer, workers=int(cores)))
print(json.dumps({"tokens": done.tokens}))
"""


# datatrove's own reader, tokenizer and local executor, in a Python that may lack foretrain.
DATATROVE = """
import json, sys, time
from pathlib import Path
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
if __name__ == "__main__":
    parts, out, tokenizer, cores = sys.argv[1:]
    tokens = DocumentTokenizer(out, tokenizer, eos_token="<|endoftext|>", batch_size=1000, seed=0)
    start = time.perf_counter()
    LocalPipelineExecutor(
        [JsonlReader(parts), tokens], tasks=int(cores), workers=int(cores), logging_dir=out + "/logs",
    ).run()
    made = sum(path.stat().st_size for path in Path(out).glob("*.ds")) // 2
    print(json.dumps({"tokens": made, "wall_s": time.perf_counter() - start}))
"""


def measure(way: str, source: Path, work: Path, cores: int, datatrove: str) -> dict[str, Any]:
    """Return tokens, wall_s, processor_s, peak_bytes, and other programs' share of all cores."""
    start, (busy, own) = time.perf_counter(), processor_time()
    if way == "foretrain":
        found = foretrain_run(str(source), work, cores)
    else:
        command = [sys.executable, __file__, "--run", way, "--work", str(work), "--source", str(source)]
        command += ["--cores", str(cores)]
        out = work / "out-datatrove"
        if way == "datatrove":
            parts, tokenizer = source.with_suffix(".parts"), work / "tokenizer" / "tokenizer.json"
            command = [datatrove, "-c", DATATROVE, str(parts), str(out), str(tokenizer), str(cores)]
        shutil.rmtree(out, ignore_errors=True)
        output, _, peak = watched(command)
        shutil.rmtree(out, ignore_errors=True)
        found = {**json.loads(output.splitlines()[-1]), "peak_bytes": peak}
    later_busy, later_own = processor_time()
    found.setdefault("processor_s", later_own - own)  # of all its processes, from start to end
    others = later_busy - busy - (later_own - own)
    return {**found, "outside": others / (time.perf_counter() - start) / (os.cpu_count() or 1)}


def make_tokenizer(work: Path, source: Path) -> None:
    """Train a BPE of GPT-2's size on 16 MB of the source, for tiktoken."""
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

    trained = BpeTokenizer.train(sample(), 50257)
    vocabulary = json.loads(trained.text)["model"]["vocab"]
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
    (staging / "tokenizer.json").write_text(trained.text, "utf-8")
    staging.rename(work / "tokenizer")


def summary(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each size and variant median and range, of tokens/s in quiet rounds, and against bare in the same
    round.

    Processor time does not depend on who else waits for the cores, so all rounds count there.
    """
    results = []
    known = {(r["size"], r["round"], r["way"]): r for r in rounds}
    keys = sorted({(r["size"], r["way"]) for r in rounds}, key=lambda k: (parse_bytes(k[0]), WAYS.index(k[1])))
    for size, way in keys:
        own = [r for r in rounds if (r["size"], r["way"]) == (size, way)]
        pairs = [(r, known[size, r["round"], "bare"]) for r in own if (size, r["round"], "bare") in known]
        quiet = [(r, bare) for r, bare in pairs if max(r["outside"], bare["outside"]) <= MOST_OUTSIDE]
        results.append({
            "size": size, "way": way, "cores": own[0]["cores"], "tokens": own[0]["tokens"], "rounds": len(own),
            "quiet_rounds": len(quiet),
            "tokens_per_s": spread_of([r["tokens"] / r["wall_s"] for r in own if r["outside"] <= MOST_OUTSIDE]),
            "of_bare": spread_of([r["tokens"] / r["wall_s"] * b["wall_s"] / b["tokens"] for r, b in quiet]),
            "of_bare_processor": spread_of([b["processor_s"] / r["processor_s"] for r, b in pairs]),
            "peak_bytes": max(r["peak_bytes"] for r in own),
        })  # fmt: skip
    return results


def spread_of(values: list[float]) -> list[float] | None:
    return [statistics.median(values), min(values), max(values)] if values else None


TOKENIZERS = ("bench", "byte")


def generate(size: int) -> None:
    bodies, held = [], 0
    for text in originals():
        bodies.append(json.dumps(text)[1:].encode() + b"}\n")
        held += len(bodies[-1])
        if held > 32 * 2**20:
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
    """Delete complete shards."""
    while not over.wait(0.2):
        for path in folder.glob("*-*.bin"):
            path.unlink(missing_ok=True)


def measure_stream(size: str, tokenizer: str, work: Path, cores: int) -> dict[str, Any]:
    place = Path(tempfile.mkdtemp(prefix="bench-prepare-", dir="/dev/shm" if Path("/dev/shm").is_dir() else work))
    (place / "tokenizer").symlink_to((work / "tokenizer").resolve())
    source = subprocess.Popen([sys.executable, __file__, "--generate", str(parse_bytes(size))], stdout=subprocess.PIPE)
    over = threading.Event()
    thread = threading.Thread(target=emptied, args=(place / "out-foretrain", over))
    thread.start()
    start, (busy, own) = time.perf_counter(), processor_time()
    try:
        found = foretrain_run("-", place, cores, tokenizer, source.stdout)
        processor_s = processor_time()[1] - own
        source.wait()
        later_busy, later_own = processor_time()
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
    """Return for each tokenizer how seconds and peak bytes grow with size (1: linear, 0: constant)."""
    made = []
    for tokenizer in TOKENIZERS:
        own = [p for p in passes if p["tokenizer"] == tokenizer]
        sizes = np.log([parse_bytes(p["size"]) for p in own])
        if len(set(sizes.tolist())) > 1:
            slope = {key: float(np.polyfit(sizes, np.log([p[key] for p in own]), 1)[0])
                     for key in ("wall_s", "processor_s", "peak_bytes")}  # fmt: skip
            made.append({"tokenizer": tokenizer, **slope})
    return made


def kept_lines(kept: Path, line: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return earlier measurements, with one more."""
    if line:
        print(line, flush=True)
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return [json.loads(each) for each in kept.read_text("utf-8").splitlines()] if kept.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="256MB", help="of the source")
    parser.add_argument("--stream", choices=TOKENIZERS, help="a generated source, with this tokenizer")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=1, help="more of them")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path, default=Path("bench-prepare"), help="sources, and what was measured")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--datatrove-python", default=sys.executable, help="a Python that has datatrove and orjson")
    parser.add_argument("--run", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--generate", type=int, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.generate:
        return generate(words.generate)
    if words.run:
        return one(words.run, words.source, words.work, words.cores)
    words.work.mkdir(parents=True, exist_ok=True)
    source = words.work / f"{'256MB' if words.stream else words.size}.jsonl"
    if words.stream != "byte":
        if not source.exists():
            make_source(source, parse_bytes(source.stem))
        if not (words.work / "tokenizer").exists():
            make_tokenizer(words.work, source)
    if words.stream:
        passes = kept_lines(
            words.work / "stream.jsonl", measure_stream(words.size, words.stream, words.work, words.cores)
        )
        passes.sort(key=lambda each: (each["tokenizer"], parse_bytes(each["size"])))
        out = words.out or common.RESULTS / "prepare_stream.json"
        return common.report(out, {"passes": passes, "slopes": slopes(passes)})
    make_parts(source, words.cores)
    kept = words.work / f"rounds-{words.cores}.jsonl"
    for _ in range(words.rounds):
        number = len(kept_lines(kept))
        for way in words.only if number % 2 else reversed(words.only):
            found = measure(way, source, words.work, words.cores, words.datatrove_python)
            kept_lines(kept, {"size": words.size, "way": way, "cores": words.cores, "round": number, **found})
    rounds = kept_lines(kept)
    return common.report(words.out or common.RESULTS / "prepare.json", {"results": summary(rounds), "rounds": rounds})


if __name__ == "__main__":
    main()
