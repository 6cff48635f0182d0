"""Does training wait for its data? Batches of GPT-2 124M's size from sharded, digested tokens; and how fast they read.

python benchmarks/data_wait.py [--out FILE]

240 MB of shards are made first (120 M random ids below 50,257, with separators). Then:

- reading: random rows of 1,025 ids, one thread, from the page cache: without digests, with every digest still to be
  looked at, and with all of them looked at already;
- stand-in: steps of nanoGPT's default size (12 x 1,024 x 40) whose micro-batches are a sleep of as long as a card needs
  (27 ms: 450,000 tokens/s, an H100; 76 ms: 162,000 tokens/s, an RTX 4090). A card computes beside the host, as a sleep
  does. With the reading thread, and without it (rows are read between the micro-batches);
- trained: real optimizer steps of foretrain's trainer on this CPU: a narrow model with 124M's micro-batch and
  vocabulary, and the 124M model itself with one sequence at a time.

Two threads, of which one reads. `wait share` is the time until a batch was there, of all their time; the first step, which waits for the
first reads, is shown by itself. Nothing here was measured on a GPU.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
import torch
from common import arguments, report

from foretrain.config.options import RunConfig
from foretrain.data.batches import Batch, TokenFile, train_batches
from foretrain.data.dataset import DatasetInfo, read_info
from foretrain.data.prepare.writer import SplitState, SplitWriter
from foretrain.data.shards import PROGRESS, DatasetIndex, Settings, Source, TokenizerInfo, index_text
from foretrain.runs.folder import RunDirectory
from foretrain.training.device import place
from foretrain.training.feed import Feed
from foretrain.training.trainer import Trainer

CPU = torch.device("cpu")
TOKENS, SHARD_TOKENS, VOCABULARY = {"train": 120_000_000, "val": 1_000_000}, 30_000_000, 50_257
CARDS = (("H100", 0.027), ("RTX 4090", 0.076))  # seconds of a micro-batch of 12 x 1024
STEPS, STAND_IN_STEPS = 3, 3
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768}
NARROW = {"n_layer": 1, "n_head": 1, "n_embd": 64, "loss_chunk_size": 1024}


def make(folder: Path) -> DatasetInfo:
    """The dataset, by the writer of `foretrain prepare`."""
    (folder / PROGRESS).mkdir(parents=True)
    random, splits = np.random.default_rng(0), {}
    for split, tokens in TOKENS.items():
        writer = SplitWriter(folder, split, "uint16", SHARD_TOKENS, SplitState())
        for _ in range(tokens // 1_000_000):
            ids = random.integers(0, VOCABULARY - 1, 1_000_000, dtype=np.uint16)
            ids[999::1000] = VOCABULARY - 1
            writer.append(ids, np.full(1000, 1000, dtype=np.uint32), 4_500_000)
        splits[split] = writer.finish()
    index = DatasetIndex(
        dtype="uint16", vocab_size=VOCABULARY,
        tokenizer=TokenizerInfo(name="gpt2", sha256="0" * 64, separator=VOCABULARY - 1),
        source=Source(fingerprint="random", description="random ids", files=1),
        settings=Settings(
            seed=0, shuffle_buffer=0, val_share=0.01, dedup=False, text_column="text", max_document_bytes=2**24,
            shard_tokens=SHARD_TOKENS,
        ),
        splits=splits,
    )  # fmt: skip
    (folder / "dataset.json").write_text("".join(index_text(index)), "utf-8")
    return read_info(folder)


def config_of(**changes: Any) -> RunConfig:
    base = {"vocab_size": 50_304, "device": "cpu", "dtype": "float32", "compile": False, "max_iters": STEPS,
            "lr_decay_iters": STEPS, "warmup_iters": 1, "eval_iters": 1, "eval_interval": 10**6, "eval_block_size": 64,
            "attention": "sdpa", "cpu_threads": torch.get_num_threads()}  # fmt: skip
    return RunConfig.model_validate({**base, **changes})


def reading(info: DatasetInfo) -> list[dict[str, Any]]:
    """Rows a second of one thread."""
    random, found = np.random.default_rng(1), []
    for name, verify, warm in (("without digests", False, False), ("first touch", True, False), ("again", True, True)):
        file = TokenFile(info, "train", 50_304, verify=verify)
        for _ in range(4 if warm else 0):
            file.rows(random.integers(0, file.tokens - 1025, 1000), 1025)
        first = random.integers(0, file.tokens - 1025, 300 if name == "first touch" else 20_000)
        before, verified = time.perf_counter(), file.readers[0].verified_bytes
        file.checked_rows(first, 1025)
        took = time.perf_counter() - before
        found.append({
            "what": name, "rows": len(first), "rows_per_s": len(first) / took, "bytes_per_s": len(first) * 2050 / took,
            "verified_bytes_per_s": (file.readers[0].verified_bytes - verified) / took,
        })  # fmt: skip
    return found


def stand_in(info: DatasetInfo, micro_s: float, *, ahead: bool) -> dict[str, Any]:
    """Steps whose micro-batches are a sleep."""
    file, config = TokenFile(info, "train", 50_304), config_of()
    waits, steps = [], []
    with Feed(file, CPU) as feed:
        for step in range(STAND_IN_STEPS):
            began, waited = time.perf_counter(), 0.0
            found: Iterator[Batch] = (
                feed.batches(config, step) if ahead else train_batches(
                    file, config.seed, step, batch_size=config.batch_size, block=config.block_size, device=CPU,
                    accumulation=config.gradient_accumulation_steps,
                )
            )  # fmt: skip
            while True:
                before = time.perf_counter()
                if next(found, None) is None:
                    break
                waited += time.perf_counter() - before
                time.sleep(micro_s)
            waits.append(waited)
            steps.append(time.perf_counter() - began)
    return {
        "micro_batch_s": micro_s, "reads_ahead": ahead, "first_step_wait_s": waits[0], "first_step_s": steps[0],
        "step_s": sum(steps[1:]) / (STAND_IN_STEPS - 1), "wait_s": sum(waits[1:]) / (STAND_IN_STEPS - 1),
        "wait_share": sum(waits[1:]) / sum(steps[1:]), "wait_share_with_first": sum(waits) / sum(steps),
    }  # fmt: skip


def trained(info: DatasetInfo, folder: Path, name: str, **model: Any) -> dict[str, Any]:
    """Real steps of the trainer, its own figures."""
    config = config_of(out_dir=str(folder), **model)
    folder.mkdir()
    directory = RunDirectory(folder)
    directory.acquire()
    try:
        record = Trainer(config, info, directory, place(config)).run()
    finally:
        directory.release()
    lines = [line for line in directory.read_lines("metrics") if line["kind"] == "step"]
    waited, took = (sum(line[key] for line in lines[1:]) for key in ("data_wait_s", "step_s"))
    return {
        "model": name, "n_params": record.n_params, "batch_size": config.batch_size,
        "accumulation": config.gradient_accumulation_steps, "block_size": config.block_size, "steps": len(lines),
        "first_step_wait_s": lines[0]["data_wait_s"], "step_s": took / (len(lines) - 1),
        "wait_s": waited / (len(lines) - 1), "wait_share": waited / took,
    }  # fmt: skip


def main() -> None:
    options = arguments("data_wait", (__doc__ or "").splitlines()[0])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        info = make(folder / "set")
        reads = reading(info)
        stands = [{"card": card, **stand_in(info, s, ahead=ahead)} for card, s in CARDS for ahead in (True, False)]
        runs = [
            trained(
                info, folder / "narrow", "1 layer, width 64", batch_size=12, gradient_accumulation_steps=1, **NARROW
            ),
            trained(info, folder / "gpt2", "GPT-2 124M", batch_size=1, gradient_accumulation_steps=1, **GPT2),
        ]
    rows = [
        *[[f"stand-in, {s['card']}, {'read ahead' if s['reads_ahead'] else 'read in between'}",
           f"{s['step_s'] * 1e3:,.0f} ms", f"{s['wait_s'] * 1e3:.2f} ms", f"{s['wait_share']:.3%}",
           f"{s['first_step_wait_s'] * 1e3:.0f} ms"] for s in stands],
        *[[f"trained, {r['model']}, {r['batch_size']} x {r['block_size']} x {r['accumulation']}",
           f"{r['step_s'] * 1e3:,.0f} ms", f"{r['wait_s'] * 1e3:.2f} ms", f"{r['wait_share']:.3%}",
           f"{r['first_step_wait_s'] * 1e3:.0f} ms"] for r in runs],
        *[[f"reading, {r['what']}", f"{r['rows_per_s']:,.0f} rows/s", f"{r['bytes_per_s'] / 1e9:.2f} GB/s",
           f"{r['verified_bytes_per_s'] / 1e9:.2f} GB/s hashed", ""] for r in reads],
    ]  # fmt: skip
    data = {
        "what": (__doc__ or "").splitlines()[0], "threads": torch.get_num_threads(), "data_bytes": 2 * sum(TOKENS.values()),
        "shards": len(list(range(0, TOKENS["train"], SHARD_TOKENS))), "reading": reads, "stand_in": stands,
        "trained": runs,
    }  # fmt: skip
    report(options.out, "Waiting for data", ["", "step", "waits", "share", "first step waits"], rows, data)


if __name__ == "__main__":
    main()
