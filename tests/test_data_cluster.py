"""Shards from a datatrove pipeline: two tasks of its local executor give what `foretrain prepare` gives."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from foretrain.base.errors import UserError
from foretrain.data.checksums import verify
from foretrain.data.dataset import read_info
from foretrain.data.shards import read_index

pytest.importorskip("datatrove")

TEXTS = [f"document {i} " + "word " * (i % 37) + "é☕" * (i % 5) for i in range(400)]


class Own:
    """A reader: half of the documents for each of two tasks, as a datatrove reader deals files."""

    def __call__(self, data: Any, rank: int, world_size: int) -> Any:
        from datatrove.data import Document

        size = len(TEXTS) // world_size
        for number, text in enumerate(TEXTS[rank * size : (rank + 1) * size]):
            yield Document(text=text, id=str(number))


def tasks(out: str, shard_tokens: int = 3000, **options: Any) -> Any:
    from datatrove.executor import LocalPipelineExecutor

    from foretrain.data.prepare.cluster import Shards, Tokens

    settings = {"workers": 1, "skip_completed": False}
    tokens = LocalPipelineExecutor(
        [Own(), Tokens(out, tokenizer="byte", val_share=0.1)], tasks=2, logging_dir=f"{out}-logs/tokens", **settings
    )
    shards = LocalPipelineExecutor([Shards(out, shard_tokens, **options)], logging_dir=f"{out}-logs/shards", **settings)
    return tokens, shards


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    from loguru import logger

    logger.remove()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_two_tasks_give_the_shards_of_one_preparation() -> None:
    from foretrain.data.prepare.engine import prepare
    from foretrain.data.prepare.options import PrepareOptions

    for executor in tasks("cluster"):
        executor.run()
    Path("all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    options = PrepareOptions(
        sources=("all.jsonl",), out="one", tokenizer="byte", val_share=0.1, shard_tokens=3000, workers=1
    )
    prepare(options)
    ours, one = read_index(Path("cluster")), read_index(Path("one"))
    for split in ("train", "val"):
        assert ours.splits[split].shards == one.splits[split].shards
        assert ours.splits[split].length_histogram == one.splits[split].length_histogram
        assert ours.splits[split].source_bytes == one.splits[split].source_bytes
    assert ours.fingerprint == one.fingerprint
    assert ours.tokenizer == one.tokenizer
    assert len(ours.splits["train"].shards) > 3
    assert verify(read_info(Path("cluster"))).problems == ()
    assert not Path("cluster/.parts").exists()


def test_parts_that_are_missing_damaged_or_of_another_run() -> None:
    from foretrain.data.prepare.cluster import merge

    tokens, _ = tasks("out")
    tokens.run()
    merge(Path("out"), 3000, keep_parts=True)
    parts = Path("out/.parts")

    def problem() -> str:
        with pytest.raises(UserError) as caught:
            merge(Path("out"), 3000, keep_parts=True)
        assert "{" not in str(caught.value)
        return caught.value.id

    data = bytearray((parts / "train-00001.ids").read_bytes())
    (parts / "train-00001.ids").write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert problem() == "data.bad_digest"
    assert not Path("out/dataset.json").exists()  # what was there is not taken for the new one
    (parts / "train-00001.ids").write_bytes(data)
    os.truncate(parts / "val-00000.lengths", 4)
    assert problem() == "data.bad_digest"
    tokens.run()
    merge(Path("out"), 3000, keep_parts=True)
    said = json.loads((parts / "00001.json").read_text())
    (parts / "00001.json").write_text(json.dumps({**said, "val_share": 0.2}))
    assert problem() == "data.parts_differ"
    (parts / "00001.json").unlink()
    assert problem() == "data.parts_missing"
    with pytest.raises(UserError, match="are missing"):
        merge(Path("nothing"))
