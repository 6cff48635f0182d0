"""`foretrain prepare`: shards against the plain way of making them, whatever the source, order and number of workers."""

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.base.errors import ExitCode, UserError
from foretrain.cli import app
from foretrain.cli.commands import prepare as cli
from foretrain.data import tokenizer as tokenizers
from foretrain.data.dataset import read_info
from foretrain.data.inspection import verify
from foretrain.data.prepare import encode as ranges
from foretrain.data.prepare import engine, formats, writer
from foretrain.data.prepare.encode import KEEP_TRAIN, KEEP_VAL, encode_batch, encoder_of, pieces
from foretrain.data.prepare.engine import SeenHashes
from foretrain.data.prepare.estimate import peak_bytes
from foretrain.data.prepare.formats import documents
from foretrain.data.prepare.opened import Format, OpenFile, Place
from foretrain.data.prepare.pool import Batch
from foretrain.data.prepare.reader import Job, Position
from foretrain.data.prepare.sources import expand
from foretrain.data.prepare.writer import SplitState, publish
from foretrain.data.shards import Shard, dtype_for, histogram_bin, read_index, shard_name
from foretrain.data.tokenizer import BpeTokenizer, ByteTokenizer, JsonTokenizer, TiktokenTokenizer, digest_of
from tests.kit import prepare as kit
from tests.kit.command import foretrain

ROWS = kit.texts(300)


def problem(call: Any, *args: Any, **values: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        call(*args, **values)
    assert "{" not in str(caught.value)
    return caught.value


# -- shards ------------------------------------------------------------------------------------------------


def test_shards_hold_what_the_plain_way_makes() -> None:
    """Small shards, so documents go on in the next one; every figure of the index counted again from the files."""
    source = kit.write_jsonl(Path("in/a.jsonl"), ROWS)
    made = kit.run(source, workers=2, shard_tokens=10_000)
    index = made.index
    assert index is not None
    assert read_index(Path("out")) == index
    expected = kit.expected(ROWS, lambda row: row.encode(), 0)
    for split, ids in expected.items():
        assert kit.tokens_of("out", split).tolist() == ids
        about = index.splits[split]
        assert (about.tokens, about.documents) == (len(ids), ids.count(0))
        assert about.source_bytes == len(ids) - ids.count(0)
        assert [shard.tokens for shard in about.shards[:-1]] == [10_000] * (len(about.shards) - 1)
        lengths = np.diff(np.flatnonzero(np.array([0, *ids]) == 0))
        assert about.length_histogram == tuple(np.bincount([histogram_bin(int(n)) for n in lengths], minlength=40))
        for shard in about.shards:
            data = Path("out", shard.file).read_bytes()
            assert shard.sha256 == hashlib.sha256(data).hexdigest()
            cuts = range(0, len(data), shard.block_bytes)
            digests = [hashlib.sha256(data[cut : cut + shard.block_bytes]).digest()[:16] for cut in cuts]
            assert shard.blocks == b"".join(digests)
            own = np.frombuffer(data, "<u2")
            assert (shard.documents, shard.min_id, shard.max_id) == ((own == 0).sum(), own.min(), own.max())
    assert not Path("out/.progress").exists()
    again = kit.run(source, workers=1, shard_tokens=10_000)
    assert again.existed
    assert problem(kit.run, source, workers=1, shard_tokens=20_000).id == "data.other_preparation"


def test_digests_that_cannot_be_are_refused() -> None:
    """Though the digest of the index itself is right: one that is cut short, of blocks that are too long, a list."""
    made = kit.run(kit.write_kind(Path("a.jsonl"), ROWS), shard_tokens=10_000)
    now = json.loads(Path("out/dataset.json").read_text())
    shards = [shard for split in now["splits"].values() for shard in split["shards"]]

    def write() -> None:
        empty = json.dumps({**now, "index_sha256": "0" * 64})
        digest = hashlib.sha256(empty.encode()).hexdigest()
        Path("out/dataset.json").write_text(empty.replace("0" * 64, digest, 1))

    write()
    assert read_index(Path("out")) == made.index
    assert not verify(read_info(Path("out"))).problems
    usual, shards[0]["block_bytes"] = shards[0]["block_bytes"], 10**18  # nobody has that much memory
    write()
    assert problem(read_index, Path("out")).id == "data.bad_meta"
    shards[0]["block_bytes"] = usual
    for wrong in (shards[0]["blocks"][:-2], [shards[0]["blocks"]]):
        shards[0]["blocks"] = wrong
        write()
        assert problem(read_index, Path("out")).id == "data.bad_meta"


def test_the_state_of_a_long_preparation_is_read_again() -> None:
    """Of 1,000 shards, 100 GB of text in bytes. A text that fails in the middle leaves nothing behind."""
    shards = tuple(
        Shard(file=shard_name("train", n), tokens=100_000_000, documents=1, min_id=0, max_id=255, sha256=f"{n:064x}",
              blocks=bytes(16 * 191)) for n in range(1000)
    )  # fmt: skip
    made = kit.run(kit.write_kind(Path("a.jsonl"), ROWS[:9])).index
    identity = writer.Identity(settings=made.settings, tokenizer=made.tokenizer, source="s", stamps="")
    found = writer.Snapshot(identity=identity, splits={"train": SplitState(shards=shards), "val": SplitState()})
    Path("long/.progress").mkdir(parents=True)
    writer.write(Path("long"), found)
    assert Path("long/.progress/state.json").stat().st_size > 2**22
    assert writer.read(Path("long")) == found

    def broken() -> Iterator[str]:
        yield "a"
        raise MemoryError

    with pytest.raises(MemoryError):
        publish(Path("long/.progress/state.json"), broken())
    assert [path.name for path in Path("long/.progress").iterdir()] == ["state.json"]


def test_the_number_of_workers_changes_nothing() -> None:
    """Nor does packing."""
    made = []
    for workers, name in ((1, "a.parquet"), (3, "a.jsonl.zst")):
        kit.run(kit.write_kind(Path(name), ROWS), out=f"out{workers}", workers=workers, shard_tokens=30_000)
        made.append({k: v for k, v in kit.digests(f"out{workers}").items() if k.endswith(".bin")})
    assert made[0] == made[1]
    assert sum(name.startswith("train") for name in made[0]) > 2


def frames_of(source: Path, position: Position | None = None, **changes: Any) -> list[tuple[list[bytes], Position]]:
    job: Job = kit.options(source, **changes).job(expand([str(source)]), position or Position())
    found = []
    for frame in kit.frames_of(job):
        if frame.value["type"] == "batch":
            batch = Batch.of(*frame)
            ends = np.cumsum(batch.lengths).tolist()
            texts = [bytes(batch.text[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
            found.append((texts, batch.position))
    return found


def test_every_format_holds_the_same_documents() -> None:
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        found = [text.decode() for batch, _ in frames_of(kit.write_kind(Path(name), ROWS)) for text in batch]
        assert found == ROWS


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "texts", "lines.txt"])
@pytest.mark.parametrize("buffer", [0, 7])
def test_reading_goes_on_at_every_position(name: str, buffer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From each position that was sent, the reader gives exactly the rest: nothing lost, nothing twice."""
    monkeypatch.setattr("foretrain.data.prepare.reader.BATCH_DOCUMENTS", 5)
    rows = [row.strip() for row in ROWS[:40]]
    rows[3:3] = ["", "  "]  # empty documents stand in between
    path = Path(name)
    changes: dict[str, Any] = {"shuffle_buffer": buffer}
    if name == "texts":
        path.mkdir()
        for i, row in enumerate(rows):
            (path / f"{i:03d}.txt").write_text(row, "utf-8")
    elif name == "lines.txt":
        path.write_text("".join(" ".join(row.split()) + "\n" for row in rows), "utf-8")
        changes["split_documents"] = "lines"
    else:
        kit.write_kind(path, rows)
    whole = frames_of(path, **changes)
    texts = [text for batch, _ in whole for text in batch]
    assert len(texts) == 40
    assert sorted(texts) == sorted(
        " ".join(r.split()).encode() if "lines" in name else r.encode() for r in ROWS[:40] for r in [r.strip()]
    )
    assert (texts == sorted(texts, key=lambda t: int(t.split()[0]))) == (buffer == 0)
    last = whole[-1][1]
    assert (last.empty, last.bad, last.replaced) == (2, 0, 0)
    for number, (_, position) in enumerate(whole):
        rest = frames_of(path, Position.from_json(json.dumps(position.to_json())), **changes)
        assert [t for batch, _ in rest for t in batch] == [t for batch, _ in whole[number + 1 :] for t in batch]
        assert rest[-1][1].empty == 2


def test_workers_read_what_the_reader_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain JSON lines are read by the workers, compressed ones by the reader: the same shards, counts and lines."""
    kit.in_one_process(monkeypatch)
    kit.small_ranges(monkeypatch)
    rows = [*ROWS[:30], "", "wide " * 2000, *ROWS[30:], "  "]  # one line is longer than a range
    lines = [json.dumps({"text": row}).encode() for row in rows]
    lines[9:9] = [b'{"text": "half \\ud800"}', b'{"text": "no \xff UTF-8"}', b"", b'{"text": null}']
    found = {}
    for name, end in (("a", b""), ("b", b"\n")):
        Path(name).mkdir()
        for part, own in (("1", lines[:50]), ("2", lines[50:])):
            text = b"\xef\xbb\xbf" * (part == "2") + b"\n".join(own) + end
            Path(name, f"{part}.jsonl").write_bytes(text)
            Path(f"{name}z").mkdir(exist_ok=True)
            Path(f"{name}z", f"{part}.jsonl.gz").write_bytes(gzip.compress(text))
        for folder in (name, f"{name}z"):
            index = kit.run(folder, out=f"out-{folder}", shard_tokens=20_000).index
            assert (index.counts.empty, index.counts.replaced_utf8) == (4, 2)
            found[folder] = index.splits, index.counts
    assert all(other == found["a"] for other in found.values())
    with Path("a/2.jsonl").open("ab") as file:
        file.write(b"\n{torn\n")
    number = len(lines) - 50 + 1
    with pytest.raises(UserError, match=f"2.jsonl, line {number}:"):
        kit.run("a", out="torn")


def test_ranges_go_on_at_every_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """From each position the ranges that follow are the rest, and their documents are all documents in order."""
    kit.small_ranges(monkeypatch)
    source = kit.write_jsonl(Path("a.jsonl"), ROWS)

    def ranges_of(position: Position) -> list[tuple[Any, Position]]:
        source_ranges = ranges.Ranges(kit.options(source).job(expand([str(source)]), position), 0.1)
        frames = list(iter(lambda: source_ranges.next(0)[0], {"type": "end"}))
        source_ranges.end()
        return [(frame["range"], Position.model_validate(frame["position"])) for frame in frames]

    whole = ranges_of(Position())
    assert len(whole) > 5
    texts = [text for part, _ in whole for text in ranges.read(ranges.Range.model_validate(part)).documents]
    assert [text.decode() for text in texts] == ROWS
    for number, (_, position) in enumerate(whole):
        assert ranges_of(position) == whole[number + 1 :]


FRAGMENTS = [b"\\u00e9", b"\\ud83d\\ude00", b"\\ud800", b"\\udc00x", b"\\n", b"\t", b"\0", b"\x7f", b"\xc3\xa9", b"\xff", b"\\",
             b'"', b"ab", b'", "text": "', b'"}', b'", "n": NaN, "m": "', b'", "n": 01, "m": "', b"\xe2\x80\xa8"]  # fmt: skip


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=6))
def test_lines_are_read_as_json_reads_them(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    """The fast parser against Python's own, on valid UTF-8 and on text with replaced bytes."""
    line = b'{"text": "' + b"".join(parts) + b'"}'
    try:
        wanted: str | None = json.loads(line.decode("utf-8", "replace"))["text"]
        wanted = wanted.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    except ValueError:
        wanted = None
    path = tmp_path_factory.mktemp("line") / "a.jsonl"
    path.write_bytes(line + b"\n")
    opened = OpenFile(expand([str(path)]).files[0])
    found = list(documents(opened, Format("text", "file", 2**20, True), Place()))
    opened.close()
    assert len(found) == 1
    assert found[0].bad == (wanted is None)
    assert found[0].text == (wanted.encode() if wanted and wanted.encode().strip() else None)


def test_a_file_that_is_cut_while_workers_read(monkeypatch: pytest.MonkeyPatch) -> None:
    kit.in_one_process(monkeypatch)
    kit.small_ranges(monkeypatch)
    source = kit.write_jsonl(Path("a.jsonl"), ROWS)
    lines = ranges.Ranges(kit.options(source).job(expand([str(source)]), Position()), 0.1)
    part = ranges.Range.model_validate(lines.next(0)[0]["range"])
    os.truncate(source, source.read_bytes().index(b"\n") + 1)
    assert problem(ranges.read, part).id == "data.source_changed"
    assert problem(lambda: [lines.next(0) for _ in range(1000)]).id == "data.source_changed"


def test_shuffling_depends_on_the_seed_alone() -> None:
    source = kit.write_jsonl(Path("a.jsonl"), ROWS)
    orders = [[t for b, _ in frames_of(source, shuffle_buffer=64, seed=seed) for t in b] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(row.encode() for row in ROWS)


def test_duplicates_are_left_out_once_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    kit.in_one_process(monkeypatch)
    rows = ROWS[:50] + ROWS[10:30] + ROWS[:5] * 2
    made = kit.run(kit.write_jsonl(Path("a.jsonl"), rows), dedup=True, workers=2)
    assert made.index.counts.duplicates == 30
    expected = kit.expected(ROWS[:50], lambda row: row.encode(), 0)
    assert kit.tokens_of("out", "train").tolist() == expected["train"]
    assert kit.tokens_of("out", "val").tolist() == expected["val"]


def test_what_lost_a_shard_is_not_prepared_already(monkeypatch: pytest.MonkeyPatch) -> None:
    kit.in_one_process(monkeypatch)
    source = kit.write_jsonl(Path("a.jsonl"), ROWS[:40])
    kit.run(source)
    assert kit.run(source).existed
    shard = Path("out/train-00000.bin")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    assert problem(kit.run, source).id == "data.prepared_damaged"
    shard.unlink()
    assert problem(kit.run, source).id == "data.prepared_damaged"
    kit.run(source, restart=True)
    assert shard.read_bytes() == whole


def test_duplicates_after_the_last_document_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kit.in_one_process(monkeypatch)
    rows = [ROWS[0], ROWS[0], ROWS[1], *[ROWS[0]] * 40]
    wanted = sum(len(row.encode()) + 1 for row in ROWS[:2])
    made = kit.run(kit.write_jsonl(Path("a.jsonl"), rows), dedup=True, max_tokens=wanted)
    assert (made.tokens, made.index.counts.duplicates) == (wanted, 1)


@given(st.lists(st.lists(st.integers(0, 50), max_size=40), max_size=12))
def test_the_table_of_hashes_is_a_set(batches: list[list[int]]) -> None:
    """Against Python's own set; colliding slots, and the hash that is all zero, among them."""
    seen, reference = SeenHashes(), set()
    for batch in batches:
        hashes = np.array([[(n % 7) << 12, n // 7] for n in batch], dtype=np.uint64).reshape(-1, 2)
        new = seen.add(hashes)
        for n, is_new in zip(batch, new.tolist(), strict=True):
            assert is_new == (n not in reference)
            reference.add(n)
    assert seen.count == len(reference)


def test_the_table_of_hashes_grows() -> None:
    seen = SeenHashes()
    hashes = np.random.default_rng(0).integers(0, 1 << 63, (12, 4096, 2), dtype=np.uint64)
    for batch in hashes:
        assert seen.add(batch).all()
        assert seen._table.nbytes / seen.count < 46
    assert not any(seen.add(batch[::-1]).any() for batch in hashes)


def test_it_stops_at_the_document_that_reaches_the_wanted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    kit.in_one_process(monkeypatch)
    source = kit.write_jsonl(Path("a.jsonl"), ROWS)
    made = kit.run(source, max_tokens=20_000)
    whole = kit.expected(ROWS, lambda row: row.encode(), 0)
    assert made.index is not None
    documents = total = 0
    while total < 20_000:
        total += len(ROWS[documents].encode()) + 1
        documents += 1
    assert made.tokens == total
    for split in ("train", "val"):
        found = kit.tokens_of("out", split).tolist()
        assert found == whole[split][: len(found)]
    assert sum(split.documents for split in made.index.splits.values()) == documents


# -- tokenizers --------------------------------------------------------------------------------------------


def test_tiktokens_encodings_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of ours in tiktoken's registry: prepared, saved beside the shards, read back, no network."""
    import tiktoken.registry

    encoding = kit.toy_encoding()
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "toy", encoding)
    rows = [*ROWS[:80], "a text that spells <|endoftext|> is still one document"]
    made = kit.run(kit.write_jsonl(Path("a.jsonl"), rows), tokenizer="toy")
    expected = kit.expected(rows, encoding.encode_ordinary, encoding.eot_token)
    for split in ("train", "val"):
        assert kit.tokens_of("out", split).tolist() == expected[split]
    monkeypatch.delitem(tiktoken.registry.ENCODINGS, "toy")
    saved = tokenizers.load(Path("out"), made.index.tokenizer.name)
    assert isinstance(saved, TiktokenTokenizer)
    assert (
        digest_of(saved)
        == made.index.tokenizer.sha256
        != digest_of(TiktokenTokenizer("x", kit.toy_encoding(kit.CL100K_PATTERN)))
    )
    assert saved.decode(expected["train"][:30]) == encoding.decode(expected["train"][:30])
    assert made.index.vocab_size == encoding.max_token_value + 1


def test_a_missing_vocabulary_is_one_sentence() -> None:
    source = kit.write_jsonl(Path("a.jsonl"), ROWS[:3])
    error = problem(kit.run, source, tokenizer="gpt2")
    assert error.id == "environment.no_vocabulary"
    assert "TIKTOKEN_CACHE_DIR" in str(error)
    assert problem(kit.run, source, tokenizer="gtp2").id == "usage.tokenizer"
    assert problem(kit.run, source, tokenizer="no/tokenizer.json").id == "data.no_tokenizer_file"
    assert not list(Path("out").glob("*.bin"))


def test_any_tokenizer_json_and_a_trained_bpe() -> None:
    """Truncation and padding in a tokenizer.json lose no token; eos_token beside it ends documents."""
    source = kit.write_jsonl(Path("a.jsonl"), ROWS)
    trained = kit.run(source, train_bpe=400, out="bpe")
    assert trained.index.vocab_size == 400
    text = Path("bpe/tokenizer.json").read_text("utf-8")
    fast = BpeTokenizer(text)
    assert (
        kit.tokens_of("bpe", "train").tolist()
        == kit.expected(ROWS, lambda r: fast.encode(r.encode()), fast.separator)["train"]
    )

    changed = json.loads(text)
    changed["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    changed["added_tokens"][0]["content"] = "<stop>"
    changed["model"]["vocab"]["<stop>"] = changed["model"]["vocab"].pop("<|endoftext|>")
    Path("mine").mkdir()
    Path("mine/tokenizer.json").write_text(json.dumps(changed), "utf-8")
    assert problem(kit.run, source, tokenizer="mine/tokenizer.json").id == "data.no_separator"
    Path("mine/tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}', "utf-8")
    kit.run(source, tokenizer="mine")
    assert (kit.tokens_of("out", "train") == kit.tokens_of("bpe", "train")).all()
    assert isinstance(tokenizers.load(Path("out"), "tokenizer.json"), JsonTokenizer)
    Path("mine/tokenizer.json").write_text("{", "utf-8")
    assert problem(kit.run, source, tokenizer="mine", out="o2").id == "data.bad_tokenizer"


@pytest.mark.parametrize("pattern", [kit.GPT2_PATTERN, kit.CL100K_PATTERN])
def test_a_long_document_in_pieces_has_the_same_tokens(pattern: str) -> None:
    encoding = kit.toy_encoding(pattern)
    text = " ".join([*ROWS, "x" * 500, "12 34", "it's  two", "\n\n \t end"])
    for size in (1, 7, 50, 4000):
        parts = pieces(text, size)
        assert "".join(parts) == text
        assert [id for part in parts for id in encoding.encode_ordinary(part)] == encoding.encode_ordinary(text)
    assert len(pieces(text, 50)) > len(text) / 200


@given(st.text(st.sampled_from("aé 1'\n\tsZ.日"), max_size=60))
def test_cuts_are_safe_in_any_text(text: str) -> None:
    for pattern in (kit.GPT2_PATTERN, kit.CL100K_PATTERN):
        encoding = ENCODINGS[pattern]
        assert [i for part in pieces(text, 1) for i in encoding.encode_ordinary(part)] == encoding.encode_ordinary(text)


ENCODINGS = {pattern: kit.toy_encoding(pattern) for pattern in (kit.GPT2_PATTERN, kit.CL100K_PATTERN)}


@pytest.mark.parametrize(("id", "fits"), [(0, True), (65535, True), (65536, False), (-1, False)])
def test_no_id_wraps_around(id: int, fits: bool) -> None:
    assert dtype_for(65535) == "uint16"
    assert dtype_for(65536) == "uint32"

    def encode(documents: list[bytes]) -> list[np.ndarray]:
        return [np.array([1, id], dtype=np.int64) for _ in documents]

    keep = np.array([KEEP_VAL, 0, KEEP_TRAIN])
    if fits:
        ids, lengths, _ = encode_batch(encode, 5, "<u2", keep, [b"a", b"b", b"c"])
        assert (ids.tolist(), lengths.tolist()) == ([1, id, 5] * 2, [3, 0, 3])
    else:
        assert problem(encode_batch, encode, 5, "<u2", keep, [b"a", b"b", b"c"]).id == "data.id_overflow"


def test_a_separator_inside_a_text_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kit.in_one_process(monkeypatch)
    made = kit.run(kit.write_jsonl(Path("a.jsonl"), ["a\0b", "plain", "more \0"]))
    assert made.index.counts.separator_bytes == 2
    assert sum(split.documents for split in made.index.splits.values()) == 3
    assert len(encoder_of(ByteTokenizer())([b"ab"])[0]) == 2


# -- sources -----------------------------------------------------------------------------------------------


def test_folders_globs_and_files_in_one_order() -> None:
    for name in ("in/b.txt", "in/a.jsonl", "in/sub/c.txt", "in/.hidden.txt", "in/x.csv", "in/y.py"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text('{"text": "hello"}\n', "utf-8")
    found = expand(["in"])
    assert [file.path for file in found.files] == ["in/a.jsonl", "in/b.txt", "in/sub/c.txt"]
    assert found.left_out == {".csv": 1, ".py": 1}
    Path("in/loop").symlink_to(Path("in").absolute())
    assert expand(["in"]).files == found.files
    assert expand(["in"]).left_out == {".csv": 1, ".py": 1, "links to folders": 1}
    Path("in/loop").unlink()
    assert [file.path for file in expand(["in/**/*.txt", "in/b.txt"]).files] == ["in/b.txt", "in/sub/c.txt"]
    assert expand(["in", "in/../in", str(Path("in").absolute()), "in/sub/c.txt"]).files == found.files
    assert expand(["in/*.py"]).files[0].kind == "text"
    before = expand(["in"]).fingerprint
    os.utime("in/b.txt", ns=(1, 1))
    assert (expand(["in"]).fingerprint, expand(["in"]).stamps) != (before, found.stamps)
    assert expand(["in"]).fingerprint == before
    Path("in/b.txt").write_text('{"text": "hellO"}\n', "utf-8")
    assert expand(["in"]).fingerprint != before
    Path("empty").mkdir()
    assert problem(expand, ["empty"]).id == "data.source_nothing"
    assert problem(expand, ["nowhere.txt"]).id == "data.source_missing"
    assert problem(expand, ["-", "in"]).exit_code == ExitCode.USAGE
    for name in (
        "in/out/dataset.json",
        "in/out/train-00000.bin",
        "in/half/.progress/state.json",
        "in/half/val-00000.bin",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}", "utf-8")
    assert [file.path for file in expand(["in/**/*t*"]).files] == ["in/b.txt", "in/sub/c.txt"]  # not what was prepared
    os.mkfifo("pipe.txt")
    assert problem(expand, ["pipe.txt"]).id == "data.unreadable"


def test_a_folder_that_cannot_be_listed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its texts would be missing, and nobody would know. Root may list all, so the system's call fails here."""
    for name in ("in/a.txt", "in/locked/b.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("hello", "utf-8")
    scandir = os.scandir

    def refusing(path: str) -> object:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    error = problem(expand, ["in"])
    assert (error.id, error.values["path"]) == ("data.unreadable", "in/locked")


@pytest.mark.parametrize(
    ("split", "data", "found"),
    [
        ("file", "one\n\ntwo\n", ["one\n\ntwo\n"]),
        ("lines", "one\r\n\ntwo", ["one", "two"]),
        ("blank-lines", "one\nmore\n\n \n\ntwo\n", ["one\nmore\n\n", "two\n"]),
        ("<|endoftext|>", "one<|endoftext|>two\n<|endoftext|><|endoftext|>", ["one", "two\n"]),
    ],
)
def test_documents_of_a_text_file(split: str, data: str, found: list[str]) -> None:
    Path("a.txt").write_bytes(b"\xef\xbb\xbf" + data.encode())
    opened = OpenFile(expand(["a.txt"]).files[0])
    made = [d.text.decode() for d in documents(opened, Format("text", split, 1000, False), Place()) if d.text]
    opened.close()
    assert [text.strip() for text in made] == [text.strip() for text in found]


def test_stdin_and_its_resume() -> None:
    rows = ROWS * 2
    data = "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()
    words = ["prepare", "-", "--tokenizer", "byte", "--out", "o", "--val", "10%", "--workers", "1", "--json"]
    command = [sys.executable, "-m", "foretrain", *words]
    done = subprocess.run(command, input=data, capture_output=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["schema"], answer["status"], answer["resumed"]) == ("foretrain.data/1#prepared", "finished", False)
    assert kit.tokens_of("o", "train").tolist() == kit.expected(rows, lambda row: row.encode(), 0)["train"]


def test_plan_says_what_preparing_then_takes() -> None:
    for number in range(4):
        kit.write_kind(Path(f"a{number}.jsonl{'.gz' if number % 2 else ''}"), kit.texts(400, seed=number))
    plan = engine.plan(kit.options("a*", shard_tokens=100_000))
    made = kit.run("a*", shard_tokens=100_000)
    assert made.index is not None
    assert plan.tokens == pytest.approx(made.tokens, rel=0.02)
    assert plan.documents == pytest.approx(1600, rel=0.02)
    assert plan.output_bytes == pytest.approx(2 * made.tokens, rel=0.02)
    assert plan.read_bytes == sum(Path(f"a{n}.jsonl{'.gz' if n % 2 else ''}").stat().st_size for n in range(4))
    assert plan.fits
    # The tests' own process may have grown large before.
    assert 10 * 2**20 < plan.memory_bytes - peak_bytes(os.getpid()) < 2**30
    half = plan.model_copy(update={"free_bytes": 1})
    assert not half.fits


def test_no_room_is_said_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrain.data.prepare.writer.free_bytes", lambda folder: 5000)
    monkeypatch.setattr("foretrain.data.prepare.estimate.free_bytes", lambda folder: 5000)
    error = problem(kit.run, kit.write_jsonl(Path("a.jsonl"), ROWS))
    assert (error.id, error.exit_code) == ("disk.no_room_prepare", ExitCode.DISK_FULL)
    assert "4.88 KiB" in str(error) or "4.9 KiB" in str(error)
    assert not list(Path("out").glob("*.bin"))


# -- the command line --------------------------------------------------------------------------------------


def test_the_command_line() -> None:
    kit.write_jsonl(Path("a.jsonl"), ROWS)
    words = ("prepare", "a.jsonl", "--tokenizer", "byte", "--out", "o", "--val", "5%")
    plan = foretrain(*words, "--plan", code=0)
    for word in ("tokens", "disk", "memory", "byte: 256 ids, uint16"):
        assert word in plan.stdout
    assert not Path("o").exists()
    done = foretrain(*words, code=0)
    assert "validation tokens of 300 documents" in done.stdout
    index = read_index(Path("o"))
    assert index.settings.val_share == 0.05
    assert foretrain(*words, "--val", "100%").returncode == ExitCode.USAGE


def test_help_is_readable() -> None:
    from click.testing import CliRunner

    shown = CliRunner().invoke(app, ["prepare", "--help"])
    assert shown.exit_code == 0, shown.exception
    assert "hf://datasets/OWNER/NAME" in shown.output


def test_what_people_type() -> None:
    assert [cli._share(text) for text in ("0.5%", "0.005", "0", "10 %")] == [0.005, 0.005, 0, 0.1]
    for call in (lambda: cli._share("100%"), lambda: cli._share("-1"), lambda: cli._count("--tokens", "many"),
                 lambda: cli._size("--max-document", "1GiB")):  # fmt: skip
        with pytest.raises(UserError, match="must be"):
            call()


def test_a_dataset_below_its_source_is_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    kit.in_one_process(monkeypatch)
    kit.write_jsonl(Path("in/a.jsonl"), ROWS[:30])
    kit.run("in", out="in/prepared")
    assert [file.path for file in expand(["in"]).files] == ["in/a.jsonl"]
    assert kit.run("in", out="in/prepared").existed
    assert problem(kit.run, "in", out="in/../in").id == "usage.out_is_source"


def test_options_may_change_after_an_error_at_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    kit.in_one_process(monkeypatch)
    Path("a.jsonl").write_text("no json", "utf-8")
    assert problem(kit.run, "a.jsonl", shard_tokens=10).id == "data.source_line"
    kit.write_jsonl(Path("a.jsonl"), ROWS[:30])
    assert problem(kit.run, "a.jsonl", tokenizer="gpt2").id == "environment.no_vocabulary"
    assert kit.run("a.jsonl").index is not None


@given(st.lists(st.sampled_from(["a", "bb", "|", "|", "\n", "c" * 30, "é"]), max_size=30), st.integers(1, 9))
def test_documents_between_markers(parts: list[str], buffer: int) -> None:
    """Against str.split, in reads of a few bytes; what is too long comes one byte longer than may be, and is told so."""
    text, cap = "".join(parts), 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "BUFFER", buffer)
        found = list(formats.by_marker(io.BytesIO(text.encode()), cap, 0, b"||"))
    wanted = [piece.encode() for piece in text.split("||")]
    if not wanted[-1].strip():
        wanted.pop()
    assert [len(raw) > cap for raw, _ in found] == [len(piece) > cap for piece in wanted]
    assert [raw for raw, _ in found if len(raw) <= cap] == [piece for piece in wanted if len(piece) <= cap]
    for number, (_, offset) in enumerate(found[:-1]):
        assert offset == len(b"||".join(wanted[: number + 1])) + 2


@given(st.lists(st.sampled_from(["a", "bb ", "\n", "\n", " ", "c" * 30, "\r\n"]), max_size=30))
def test_documents_between_blank_lines(parts: list[str]) -> None:
    text = "".join(parts)
    found = [raw for raw, _ in formats.by_lines(io.BytesIO(text.encode()), 1000, 0, blank=True)]
    wanted = [piece for piece in re.split(r"(?m)^[^\S\n]*\n", text) if piece.strip()]
    assert [raw.decode().split() for raw in found] == [piece.split() for piece in wanted]
    lines = [raw for raw, _ in formats.by_lines(io.BytesIO(text.encode()), 10, 0, blank=False)]
    assert [len(raw) > 10 for raw in lines] == [
        len(line.rstrip("\r\n")) > 10 for line in re.findall(r"[^\n]*\n|[^\n]+$", text)
    ]


def test_a_text_that_is_one_document_is_cut_by_tokens() -> None:
    """As nanoGPT cuts a text: the first nine tenths train, the rest validates."""
    text = "".join(kit.texts(40, seed=3))
    Path("a.txt").write_text(text)
    result = foretrain("prepare", "a.txt", "--tokenizer", "byte", "--out", "o", "--workers", "1", code=0)
    assert "validation split is empty" not in result.stderr
    ids = [*text.encode(), 0]
    cut = len(ids) - round(len(ids) / 10)
    assert kit.tokens_of("o", "train").tolist() == ids[:cut]
    assert kit.tokens_of("o", "val").tolist() == ids[cut:]
    assert read_index(Path("o")).settings.val_share == 0.1
    assert foretrain("data", "verify", "o").returncode == 0
    foretrain("prepare", "a.txt", "--tokenizer", "byte", "--out", "o", "--workers", "1", code=0)
    foretrain("prepare", "a.txt", "--tokenizer", "byte", "--out", "p", "--workers", "1", "--val", "20%")
    assert len(kit.tokens_of("p", "val")) == round(len(ids) / 5)


def test_an_empty_validation_split_names_the_option() -> None:
    Path("a.txt").write_text("only one\nlittle text")
    result = foretrain("prepare", "a.txt", "--tokenizer", "byte", "--out", "o", "--workers", "1", "--val", "0%")
    assert "--split-documents lines" in result.stderr
    assert "evaluates on it" not in result.stderr


def test_a_folder_that_must_not_become_a_dataset() -> None:
    Path("a.txt").write_text("some text to prepare " * 50)
    words = ("prepare", "a.txt", "--tokenizer", "byte", "--workers", "1")
    empty = foretrain(*words, "--out", "", code=ExitCode.USAGE)  # as an unset variable leaves it
    assert "--out" in empty.stderr
    Path("run").mkdir()
    Path("run/run.json").write_text("{}")
    for more in ((), ("--restart",)):
        refused = foretrain(*words, "--out", "run", *more, code=ExitCode.USAGE)
        assert "folder of a training run" in refused.stderr
    assert sorted(path.name for path in Path().iterdir()) == ["a.txt", "run"]
    assert [path.name for path in Path("run").iterdir()] == ["run.json"]


def test_shards_have_a_least_size() -> None:
    Path("a.txt").write_text("some text to prepare " * 50)
    result = foretrain(
        "prepare", "a.txt", "--tokenizer", "byte", "--out", "o", "--shard-tokens", "1", code=ExitCode.USAGE
    )
    assert "--shard-tokens" in result.stderr
    assert not Path("o").exists()
