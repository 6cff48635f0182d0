"""`foretrain data …` as a user types it: JSON, exit codes, hostile text; and what `plan` says of the data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from foretrain.base.errors import UserError
from foretrain.cli import app
from foretrain.data.batches import starts
from foretrain.data.dataset import read_info
from foretrain.data.locate import locate
from tests.kit.data import documents, shards, write_llmc, write_npy, write_shards


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, (words, result.output, result.exception)
    return result.output


def fails(*words: str) -> UserError:
    result = CliRunner().invoke(app, list(words))
    assert isinstance(result.exception, UserError), (words, result.output, result.exception)
    assert "{" not in str(result.exception)
    return result.exception


def as_json(*words: str) -> dict[str, Any]:
    return json.loads(run(*words, "--json").splitlines()[-1])


def test_info_of_an_index() -> None:
    shards(Path("data/x"), 60)
    found = as_json("data", "info", "x")
    assert found["schema"] == "foretrain.data/1#info"
    train = found["splits"]["train"]
    want = documents(60)
    assert (train["documents"], train["tokens"]) == (60, sum(map(len, want)))
    assert train["source_bytes"] == train["tokens"] - 60
    lengths = np.array([len(d) for d in want])
    assert train["length_histogram"][5] == int(((lengths >= 16) & (lengths < 32)).sum())
    text = run("data", "info", "x")
    for word in (f"{train['tokens']:,}", "tok/byte", "byte", "16 – 31", "made by a test"):
        assert word in text


def test_info_of_what_has_no_index() -> None:
    write_npy(Path("npy"))
    write_llmc(Path("llmc"))
    assert "--count" in run("data", "info", "npy")
    assert as_json("data", "info", "npy", "--count")["splits"]["train"]["max_id"] == 95
    assert as_json("data", "info", "llmc", "--count")["splits"]["train"]["documents"] is not None
    assert fails("data", "info", "nothing").id == "data.no_dataset"


def test_verify_says_and_exits() -> None:
    shards(Path("data/x"), 60)
    assert as_json("data", "verify", "x")["ok"] is True
    assert "every checksum matches" in run("data", "verify", "x")
    path = Path("data/x/train-00000.bin")
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)
    result = CliRunner().invoke(app, ["data", "verify", "x", "--json"])
    assert result.exit_code == 7
    found = json.loads(result.output)
    assert found["ok"] is False
    assert [p["values"]["block"] for p in found["problems"]] == [1]
    write_npy(Path("npy"))
    assert "there are no checksums" in run("data", "verify", "npy")


def test_head_never_commands_a_terminal() -> None:
    text = b"\x1b]0;owned\x07 \x1b[31mred\r\x9b hello \xc3\xa9"
    ids = np.append(np.frombuffer(text, np.uint8).astype(np.int64), 0)
    write_shards(Path("x"), {"train": [ids] * 20, "val": [ids] * 5})
    shown = run("data", "head", "x", "--tokens", "40")
    assert "hello é" in shown
    assert not [c for c in shown if ord(c) < 32 and c not in "\n\t"]
    assert "\x9b" not in shown
    assert "␛]0;owned␇" in shown
    found = as_json("data", "head", "x", "--document", "3", "--tokens", "10")
    assert found["position"] == 3 * len(ids)
    assert found["ids"] == ids[:10].tolist()
    found = as_json("data", "head", "x", "--at", "9", "--split", "val", "--tokens", "5")
    assert found["ids"] == ids[9:14].tolist()


def test_head_refuses_places_that_are_none() -> None:
    shards(Path("x"), 20)
    assert fails("data", "head", "x", "--document", "20").id == "data.no_document"
    assert fails("data", "head", "x", "--at", "100000").id == "data.no_position"
    assert fails("data", "head", "x", "--at", "1", "--document", "1").id == "usage.two_places"


def test_mix_writes_what_train_reads() -> None:
    shards(Path("data/a"), 100)
    shards(Path("data/b"), 50, 3)
    Path("mixes").mkdir()
    found = as_json("data", "mix", "a=3", "b=1", "--out", "mixes/m.toml", "--tokens", "10k")
    assert [p["weight"] for p in found["parts"]] == [0.75, 0.25]
    assert found["parts"][0]["epochs"] == pytest.approx(7500 / found["parts"][0]["tokens"])
    info = locate("mixes/m.toml")  # from another folder than the mixture's
    assert [part.weight for part in info.parts] == [0.75, 0.25]
    assert "75.0%" in run("data", "info", "mixes/m.toml")
    assert "b val" in run("data", "head", "mixes/m.toml", "--split", "val")
    assert as_json("data", "verify", "mixes/m.toml")["ok"]


@pytest.mark.parametrize(
    ("words", "id"),
    [
        (["a"], "usage.mix_part"), (["a=x"], "usage.mix_part"), (["a=0"], "usage.mix_part"), (["=1"], "usage.mix_part"),
        (["a=1", "a=2"], "usage.mix_twice"), (["a=1", "none=1"], "data.no_dataset"),
        (["a=1", "--out", "m.json"], "usage.mix_suffix"), (["a=1", "--tokens", "x"], "usage.bad_count"),
        (["a=1", "--out", "none/m.toml"], "usage.cannot_write_file"), (["a=nan"], "usage.mix_part"),
    ],
)  # fmt: skip
def test_mixtures_that_cannot_be(words: list[str], id: str) -> None:
    shards(Path("data/a"), 20)
    assert fails("data", "mix", *words).id == id


# -- the plan ----------------------------------------------------------------------------------------------

SMALL = ["--gpu", "4070", "--block_size=16", "--batch_size=4", "--gradient_accumulation_steps=1", "--max_iters=100",
         "--lr_decay_iters=100", "--warmup_iters=1"]  # fmt: skip


@pytest.mark.parametrize("make", [shards, write_npy, write_llmc])
def test_plan_counts_epochs_of_every_layout(make: Any) -> None:
    make(Path("data/x"))
    tokens = read_info(Path("data/x")).train_tokens
    work = as_json("plan", "--dataset=x", *SMALL)["work"]
    assert work["dataset_tokens"] == tokens
    assert work["epochs"] == pytest.approx(6400 / tokens)


def test_plan_says_epochs_of_each_part_and_what_random_leaves() -> None:
    shards(Path("data/a"), 100)
    shards(Path("data/b"), 50, 3)
    run("data", "mix", "a=3", "b=1", "--out", "m.toml")
    notes = as_json("plan", "--dataset=m.toml", *SMALL)["notes"]
    parts = [note["values"] for note in notes if note["id"] == "mix_part"]
    assert [p["epochs"] for p in parts] == [pytest.approx(6400 * p["share"] / p["tokens"]) for p in parts]
    assert [p["share"] for p in parts] == [0.75, 0.25]
    notes = {n["id"]: n["values"] for n in as_json("plan", "--dataset=a", *SMALL)["notes"]}
    assert notes["data_random"]["seen"] == pytest.approx(1 - np.exp(-notes["data_random"]["epochs"]))
    notes = {n["id"] for n in as_json("plan", "--dataset=a", "--data_order=epochs", *SMALL)["notes"]}
    assert "data_epochs" in notes


def test_the_share_of_tokens_seen_is_what_random_rows_see() -> None:
    """The note's closed form against the draw itself."""
    tokens, block, epochs = 20_000, 16, 1.5
    seen = np.zeros(tokens, dtype=bool)
    for start in starts(1, 0, 0, int(epochs * tokens / block), tokens - block):
        seen[start + 1 : start + block + 1] = True
    assert seen.mean() == pytest.approx(1 - np.exp(-epochs), abs=0.01)
