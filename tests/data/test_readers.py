"""Token files of every layout, read alike; what is wrong with one is a sentence; a flipped bit is found before use."""

import hashlib
import json
import os
import pickle
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.base.errors import ExitCode, UserError
from foretrain.data.batches import TokenFile
from foretrain.data.dataset import check_usable, find, read_info
from foretrain.data.inspection import document_at, documents_of, separators, summarize, verify
from foretrain.data.locate import locate, make_mix, read_mix
from foretrain.data.token_layout import read_layout
from foretrain.data.token_reader import TokenReader, readers
from tests.kit.command import refused
from tests.kit.data import documents, ids_of, llmc_bytes, shards, write_llmc, write_npy, write_shards
from tests.kit.tiny import write_dataset


def problem(call, *args, **options) -> UserError:
    with refused(code=ExitCode.DATA) as caught:
        call(*args, **options)
    text = str(caught.value)
    assert "{" not in text
    assert "\n" not in text
    return caught.value


def everything(folder: Path, split: str) -> np.ndarray:
    if (folder / "dataset.json").is_file():
        return ids_of(folder, split)
    paths = sorted(p for p in folder.iterdir() if split in p.name and p.suffix in (".npy", ".bin"))
    if paths[0].suffix == ".npy":
        return np.concatenate([np.load(p) for p in paths])
    if len(paths) == 1 and paths[0].name == f"{split}.bin":
        return np.fromfile(paths[0], np.uint16)
    magic = struct.unpack("<i", paths[0].read_bytes()[:4])[0]
    return np.concatenate([np.fromfile(p, "<u2" if magic == 20240520 else "<u4", offset=1024) for p in paths])


def llama(folder: Path) -> Path:
    return write_llmc(folder, magic=20240801, version=7)


LAYOUTS = {"foretrain": shards, "nanogpt": write_dataset, "npy": write_npy, "llmc": write_llmc, "llama": llama}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_as_one_row_of_ids(layout: str) -> None:
    folder = LAYOUTS[layout](Path("data/x"))
    info = read_info(folder)
    assert find("x") == folder
    assert info.format == ("llmc" if layout == "llama" else layout)
    for split in ("train", "val"):
        want = everything(folder, split)
        assert info.tokens(split) == len(want)
        file = TokenFile(info, split, 256)
        assert np.array_equal(file.rows(np.array([0]), len(want))[0], want)
        starts = np.array([0, 1, len(want) - 40, len(want) // 2, 299 % (len(want) - 40)])
        assert np.array_equal(file.rows(starts, 40), np.stack([want[s : s + 40] for s in starts]))
        assert file.rows(starts, 40).dtype == (np.uint32 if layout == "llama" else np.uint16)
        (reader,) = readers(info, split)
        assert reader.ids(len(want) - 3, 10) == want[-3:].tolist()
    check_usable(info, 256, 16, 16)


@settings(max_examples=30)
@given(st.integers(1, 400), st.integers(1, 300), st.integers(0, 2**32))
def test_shards_of_any_size_are_one_row(shard_tokens: int, length: int, seed: int) -> None:
    folder = Path(f"s{shard_tokens}-{seed % 7}")
    if not folder.exists():
        write_shards(folder, {"train": documents(20, seed % 7), "val": documents(2)}, shard_tokens=shard_tokens)
    want = ids_of(folder, "train")
    file = TokenFile(read_info(folder), "train", 256)
    length = min(length, len(want))
    starts = np.random.default_rng(seed).integers(0, len(want) - length + 1, 5)
    assert np.array_equal(file.rows(starts, length), np.stack([want[s : s + length] for s in starts]))


def test_ids_that_need_four_bytes() -> None:
    folder = write_shards(
        Path("wide"), {"train": [np.array([70_000, 3, 0])] * 30, "val": [np.array([1, 0])] * 30}, dtype="uint32",
        vocab=100_000,
    )  # fmt: skip
    file = TokenFile(read_info(folder), "train", 100_000)
    assert file.rows(np.array([3]), 3).tolist() == [[70_000, 3, 0]]
    assert problem(check_usable, read_info(folder), 50_304, 8, 8).id == "data.vocab_too_small"


# -- bad files ---------------------------------------------------------------------------------------------


class Payload:
    def __reduce__(self):
        return os.system, ("touch canary",)


def npy(descr: object, shape: object, data: bytes = b"", version: int = 1) -> bytes:
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode() + b"\n"
    size = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + size + header + data


BAD_NPY = {
    "objects": npy("|O", (3,), pickle.dumps(Payload())),
    "object in a struct": npy([("a", "|O")], (3,)),
    "floats": npy("<f4", (3,), bytes(12)),
    "signed": npy("<i8", (3,), bytes(24)),
    "big endian": npy(">u2", (3,), bytes(6)),
    "two axes": npy("<u2", (3, 2), bytes(12)),
    "no axis": npy("<u2", (), bytes(2)),
    "negative": npy("<u2", (-3,), bytes(6)),
    "cut short": npy("<u2", (30,), bytes(58)),
    "too long": npy("<u2", (3,), bytes(8)),
    "header is code": b"\x93NUMPY\x01\x00\x40\x00" + b"__import__('os').system('touch canary')".ljust(64),
    "header of nesting": b"\x93NUMPY\x01\x00\x88\x13" + b"(" * 5000,
    "header longer than the file": b"\x93NUMPY\x01\x00\xff\xff" + b"{",
    "format 9": npy("<u2", (3,), bytes(6), version=9),
    "no magic": b"PK\x03\x04" + bytes(200),
    "a few bytes": b"\x93NUM",
    "a table": npy(5, "x"),
}
BAD_LLMC = {
    "other magic": llmc_bytes(np.arange(300) % 96, 20240520)[4:],
    "an evaluation set": struct.pack("<3i", 20240522, 1, 10) + bytes(1012 + 20),
    "a model": struct.pack("<3i", 20240326, 1, 10) + bytes(1012 + 20),
    "other version": struct.pack("<3i", 20240520, 2, 10) + bytes(1012 + 20),
    "cut short": llmc_bytes(np.arange(300) % 96)[:-2],
    "too long": llmc_bytes(np.arange(300) % 96) + b"\0\0",
    "negative": struct.pack("<3i", 20240520, 1, -5) + bytes(1012),
    "none": struct.pack("<3i", 20240520, 1, 0) + bytes(1012),
    "a header cut short": struct.pack("<2i", 20240520, 1),
}


@pytest.mark.parametrize("name", BAD_NPY)
def test_bad_numpy_files(name: str) -> None:
    folder = write_npy(Path("x"))
    (folder / "edufineweb_train_000002.npy").write_bytes(BAD_NPY[name])
    assert problem(read_info, folder).id in ("data.bad_header", "data.wrong_size")
    assert not Path("canary").exists()


@pytest.mark.parametrize("name", BAD_LLMC)
def test_bad_llmc_files(name: str) -> None:
    folder = write_llmc(Path("x"))
    (folder / "fineweb_train_000002.bin").write_bytes(BAD_LLMC[name])
    assert problem(read_info, folder).id in ("data.bad_header", "data.wrong_size")


@given(st.binary(min_size=0, max_size=300))
def test_any_bytes_as_a_shard_are_a_sentence(data: bytes) -> None:
    folder = Path("any")
    if not folder.exists():
        write_npy(folder)
    (folder / "edufineweb_train_000002.npy").write_bytes(b"\x93NUMPY\x01\x00" + data)
    assert problem(read_layout, folder).id in ("data.bad_header", "data.wrong_size")


def test_folders_that_are_no_dataset() -> None:
    folder = write_npy(Path("x"))
    (folder / "other_train_1.bin").write_bytes(llmc_bytes(np.arange(30)))
    assert problem(read_info, folder).id == "data.two_layouts"
    folder = write_npy(Path("y"))
    (folder / "edufineweb_val_000000.npy").unlink()
    assert problem(read_info, folder).id == "data.no_val_shards"
    Path("z").mkdir()
    assert find("z") is None
    assert locate("z") is None


def test_a_header_of_llmc_in_nanogpts_name() -> None:
    """Told by its header, which says how long it is; raw ids that begin so by chance are not taken for one."""
    Path("x").mkdir()
    for split in ("train", "val"):
        (Path("x") / f"{split}.bin").write_bytes(llmc_bytes(np.arange(300) % 96))
    assert read_info(Path("x")).format == "llmc"
    assert read_info(Path("x")).train_tokens == 300
    raw = np.frombuffer(struct.pack("<3i", 20240520, 1, 0) + bytes(500), np.uint16)
    for split in ("train", "val"):
        raw.tofile(Path("x") / f"{split}.bin")
    assert read_info(Path("x")).format == "nanogpt"


def test_shards_of_another_length_than_the_index_says() -> None:
    folder = shards(Path("x"))
    os.truncate(folder / "train-00001.bin", 1398)
    assert problem(read_info, folder).id == "data.wrong_size"
    (folder / "train-00001.bin").unlink()
    assert problem(read_info, folder).id == "data.missing_file"


def test_a_shard_that_shrinks_while_it_is_read() -> None:
    folder = shards(Path("x"))
    file = TokenFile(read_info(folder), "train", 256)
    file.rows(np.array([0]), 10)
    for path in folder.glob("*.bin"):
        os.truncate(path, 300)
    error = problem(file.rows, np.array([600]), 50)
    assert error.id == "data.shrunk"
    assert "train-00000.bin" in str(error)


# -- digests -----------------------------------------------------------------------------------------------


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(data)


def found_by_reader(folder: Path) -> bool:
    """Every token is read in rows, as training does."""
    try:
        info = read_info(folder)
        for split in ("train", "val"):
            file = TokenFile(info, split, 256)
            length = 64
            file.rows(np.append(np.arange(0, file.tokens - length, length), file.tokens - length), length)
    except UserError as error:
        return error.exit_code == ExitCode.DATA
    return False


def found_by_verify(folder: Path) -> bool:
    try:
        return bool(verify(read_info(folder), threads=1).problems)
    except UserError as error:
        return error.exit_code == ExitCode.DATA


def test_500_flipped_bits_are_all_found() -> None:
    """In shards and in the index, by verify and by the reader, each alone."""
    folder = shards(Path("x"), count=15)
    paths = sorted(p for p in folder.iterdir() if p.is_file())
    sizes = [p.stat().st_size for p in paths]
    assert not found_by_reader(folder)
    assert not found_by_verify(folder)
    draw = random.Random(1)
    missed, kinds = [], set()
    for number in range(500):
        path = paths[-1] if number % 5 == 0 else draw.choices(paths, sizes)[0]
        path = folder / "dataset.json" if number % 5 == 1 else path
        bit = draw.randrange(path.stat().st_size * 8)
        flip(path, bit)
        if not (found_by_reader(folder) and found_by_verify(folder)):
            missed.append((path.name, bit))
        flip(path, bit)
        kinds.add(path.suffix)
    assert not missed
    assert kinds == {".bin", ".json"}


def test_the_block_is_named_and_only_looked_at_once() -> None:
    folder = shards(Path("x"))
    reader = TokenReader(read_layout(folder).splits["train"])
    reader.read(0, 10)
    assert reader.verified_bytes == 256
    reader.read(5, 10)
    assert reader.verified_bytes == 256
    flip(folder / "train-00000.bin", 300 * 8)
    error = problem(reader.read, 130, 10)
    assert error.values == {"path": str(folder / "train-00000.bin"), "block": 1, "first": 256, "last": 511}
    assert len(TokenReader(read_layout(folder).splits["train"], verify=False).read(130, 10)) == 20


def test_verify_lists_every_problem() -> None:
    folder = shards(Path("x"))
    info = read_info(folder)
    flip(folder / "train-00000.bin", 7)
    flip(folder / "train-00001.bin", 8 * 1000)
    (folder / "val-00000.bin").unlink()
    os.truncate(folder / "train-00002.bin", 100)
    with (folder / "train-00003.bin").open("ab") as file:
        file.write(b"\0\0")
    found = [(p.id, Path(p.values["path"]).name) for p in verify(info).problems]
    assert ("data.bad_block", "train-00000.bin") in found
    assert ("data.bad_block", "train-00001.bin") in found
    assert ("data.missing_file", "val-00000.bin") in found
    assert ("data.wrong_size", "train-00002.bin") in found
    assert ("data.wrong_size", "train-00003.bin") in found
    assert {name for _, name in found} == {
        "train-00000.bin", "train-00001.bin", "val-00000.bin", "train-00002.bin", "train-00003.bin"
    }  # fmt: skip


def test_the_built_in_corpus_is_verified_by_its_own_digests() -> None:
    folder = write_dataset(Path("x"))
    digests = {s: {"sha256": hashlib.sha256((folder / f"{s}.bin").read_bytes()).hexdigest()} for s in ("train", "val")}
    (folder / "meta.json").write_text(json.dumps({"splits": digests}))
    assert verify(read_info(folder)).problems == ()
    flip(folder / "val.bin", 11)
    assert [p.id for p in verify(read_info(folder)).problems] == ["data.bad_digest"]


# -- documents ---------------------------------------------------------------------------------------------


def test_documents_are_found_by_number() -> None:
    texts = documents(60, 3)
    folder = write_shards(Path("x"), {"train": texts, "val": documents(2)}, shard_tokens=97)
    info = read_info(folder)
    (reader,) = readers(info, "train")
    ends = np.cumsum([len(t) for t in texts])
    assert list(separators(reader, 0)) == (ends - 1).tolist()
    for number, text in enumerate(texts):
        begin = int(ends[number]) - len(text)
        assert document_at(reader, 0, number, documents_of(info, "train")) == begin
        assert document_at(reader, 0, number) == begin
    assert problem(document_at, reader, 0, 60, documents_of(info, "train")).values["count"] == 60
    assert problem(document_at, reader, 0, 10**9).id == "data.no_document"


@pytest.mark.parametrize("before", [True, False])
def test_counted_documents_are_those_of_an_index(before: bool) -> None:
    """llm.c puts its separator before a document, nanoGPT behind it."""
    texts = [t + (t == 0) * 50_256 for t in documents(60, 3)]
    ids = np.concatenate([np.roll(t, 1) if before else t for t in texts]).astype(np.uint16)
    Path("x").mkdir()
    for split in ("train", "val"):
        (Path("x") / f"x_{split}_1.bin").write_bytes(llmc_bytes(ids))
    counted = summarize(read_info(Path("x")), count=True).splits["train"]
    assert counted.documents == 60
    indexed = write_shards(Path("y"), {"train": documents(60, 3), "val": documents(2)})
    assert counted.length_histogram == summarize(read_info(indexed)).splits["train"].length_histogram
    assert (counted.min_id, counted.max_id) == (1, 50_256)
    assert summarize(read_info(Path("x"))).splits["train"].documents is None


# -- mixtures ----------------------------------------------------------------------------------------------


def mix_of(weights: str) -> Path:
    shards(Path("data/a"), 200, 1)
    shards(Path("data/b"), 100, 2)
    Path("mix.toml").write_text(f"[weights]\n{weights}\n")
    return Path("mix.toml")


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_a_mixture_takes_its_shares(order: str) -> None:
    info = read_mix(mix_of('a = 0.7\n"data/b" = 0.3'))
    assert [part.weight for part in info.parts] == [0.7, 0.3]
    file = TokenFile(info, "train", 256)
    first = [file.starts(order, 1, 0, step, 50, 16) for step in range(40)]  # type: ignore[arg-type]
    boundary = info.parts[0].dataset.train_tokens
    inside = np.concatenate(first)
    assert abs((inside < boundary).mean() - 0.7) < 0.001
    assert ((inside < boundary - 16) | (inside >= boundary)).all()  # no row goes from one part into the other
    a, b = everything(Path("data/a"), "train"), everything(Path("data/b"), "train")
    both = np.concatenate([a, b])
    rows = file.rows(first[0], 17)
    assert np.array_equal(rows, np.stack([both[s : s + 17] for s in first[0]]))


def test_parts_of_a_mixture_with_different_widths() -> None:
    shards(Path("a"), 50)
    shards(Path("b"), 50, 1, dtype="uint32")
    infos = {name: (read_info(Path(name)), 1.0) for name in ("a", "b")}
    info = make_mix("m", "m.toml", infos)
    file = TokenFile(info, "train", 256)
    both = np.concatenate([everything(Path("a"), "train"), everything(Path("b"), "train").astype(np.uint32)])
    starts = file.starts("random", 1, 0, 3, 20, 16)
    assert np.array_equal(file.rows(starts, 17), np.stack([both[s : s + 17] for s in starts]))


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("[weights]\nnone = 1", "data.no_part"),
        ("[weights]\na = 0", "data.bad_mix"),
        ("[weights]\na = -1", "data.bad_mix"),
        ("[weights]\na = nan", "data.bad_mix"),
        ("[weights]\na = inf", "data.bad_mix"),
        ("[weights]\na = true", "data.bad_mix"),
        ('[weights]\na = "x"', "data.bad_mix"),
        ("[weights]", "data.bad_mix"),
        ("weights = 3", "data.bad_mix"),
        ("[weights]\na = 1\n[other]\nb = 1", "data.bad_mix"),
        ("", "data.bad_mix"),
        ("a = [", "data.bad_mix"),
        ('[weights]\n"mix.toml" = 1', "data.bad_mix"),
    ],
)
def test_bad_mixtures(text: str, id: str) -> None:
    mix_of("a = 1")
    Path("nested.toml").write_text(text)
    if "mix.toml" in text:
        assert problem(read_mix, Path("nested.toml")).id == id
        return
    Path("mix.toml").write_text(text)
    assert problem(read_mix, Path("mix.toml")).id == id


def test_parts_must_have_one_tokenizer() -> None:
    mix_of("a = 1\nb = 1")
    shards(Path("data/b"), 100, 2, sha256="0" * 64)
    error = problem(read_mix, Path("mix.toml"))
    assert (error.id, error.values["key"]) == ("data.mix_differs", "tokenizer_sha256")


def test_parts_may_know_less_of_one_tokenizer() -> None:
    """Its digest decides: a BPE has another name where it was trained. llm.c's files have neither digest nor size."""
    mix_of("a = 1\nb = 1")
    same = {"tokenizer_sha256": "1" * 64, "vocab_size": 300}
    first = read_info(Path("data/a")).model_copy(update={"tokenizer": "bpe", **same})
    second = first.model_copy(update={"tokenizer": "tokenizer.json", "vocab_size": 300})
    assert make_mix("m", "m.toml", {"a": (first, 1.0), "b": (second, 1.0)}).vocab_size == 300
    known = first.model_copy(update={"tokenizer": "gpt2"})
    plain = known.model_copy(update={"tokenizer_sha256": None, "vocab_size": None})
    for pair in ((plain, known), (known, plain)):
        made = make_mix("m", "m.toml", {"a": (pair[0], 1.0), "b": (pair[1], 1.0)})
        assert (made.tokenizer, made.vocab_size) == ("gpt2", 300)
    for other in ({"tokenizer": "r50k"}, {"tokenizer_sha256": "2" * 64}, {"vocab_size": 299}):
        changed = plain.model_copy(update={"tokenizer_sha256": None, **other}) if "tokenizer" in other else None
        parts = {"a": (known, 1.0), "b": (changed or known.model_copy(update=other), 1.0)}
        assert problem(make_mix, "m", "m.toml", parts).id == "data.mix_differs"
