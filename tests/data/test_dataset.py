"""Datasets, tokenizers and batches: nanoGPT's layout, clear sentences for bad files, order from (seed, step)."""

import hashlib
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretrain.base.errors import ExitCode, UserError
from foretrain.config.resolve import resolve
from foretrain.data import corpus, dataset, tokenizer
from foretrain.data.batches import TokenFile, evaluation_batches, starts
from foretrain.data.builtin import prepare_built_in
from foretrain.data.inspection import unigram_entropy
from foretrain.data.tokenizer import BpeTokenizer, ByteTokenizer, CharTokenizer
from tests.kit.batches import train_batches
from tests.kit.command import foretrain
from tests.kit.tiny import write_dataset

CPU = torch.device("cpu")


def problem(call, *args) -> UserError:
    with pytest.raises(UserError) as caught:
        call(*args)
    assert caught.value.exit_code in (ExitCode.DATA, ExitCode.ENVIRONMENT)
    assert "{" not in str(caught.value)
    return caught.value


# -- files -------------------------------------------------------------------------------------------------


def test_nanogpts_layout_without_any_index() -> None:
    path = write_dataset(Path("data/toy"))
    info = dataset.read_info(path)
    assert (info.train_tokens, info.val_tokens, info.dtype, info.vocab_size) == (2000, 500, "uint16", None)
    assert dataset.find("toy") == Path("data/toy")
    assert dataset.find("data/toy") == Path("data/toy")
    assert dataset.find("other") is None


def test_meta_pickle_of_a_character_dataset() -> None:
    path = write_dataset(Path("data/chars"), vocab=3)
    meta = {"vocab_size": 3, "itos": {0: "a", 1: "b", 2: "\n"}, "stoi": {"a": 0, "b": 1, "\n": 2}}
    (path / "meta.pkl").write_bytes(pickle.dumps(meta))
    assert dataset.read_info(path).vocab_size == 3
    words = tokenizer.load(path, None)
    assert isinstance(words, CharTokenizer)
    assert words.decode(words.encode(b"ab\nba")) == "ab\nba"
    assert problem(words.encode, b"abc").id == "data.unknown_characters"


class Payload:
    def __init__(self, call, *args) -> None:
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


PAYLOADS = [
    pickle.dumps({"vocab_size": Payload(os.system, "touch canary")}),
    pickle.dumps(Payload(eval, "open('canary', 'w')")),
    pickle.dumps(Payload(exec, "open('canary', 'w')")),
    pickle.dumps({"vocab_size": 3, "x": Payload(os.mkdir, "canary")}),
    pickle.dumps({"vocab_size": 3, "x": Payload(getattr, "text", "upper")}),
    b"cos\nsystem\n(S'touch canary'\ntR.",
    b"cbuiltins\neval\n(S\"open('canary','w')\"\ntR.",
    b"c__builtin__\neval\n(S'1'\ntR.",
    b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0ctouch canary\x85R.",
    b"(S'touch canary'\nios\nsystem\n.",
    pickle.dumps({"vocab_size": 3.5}),
    pickle.dumps({"vocab": 3}),
    pickle.dumps([1, 2]),
    pickle.dumps({"vocab_size": "3"}),
    b"",
    b"\x80",
    b"not a pickle",
    b"\x80\x05" + b"(" * 100_000,
    b"Pabc\n.",
    b"\x80\x02\x82\x01.",
]


@pytest.mark.fault("a hostile meta.pkl", row="B.6", sees="exit code 7", safe="everything: nothing of it is run")
@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_hostile_meta_pickles_run_nothing(payload: bytes) -> None:
    path = write_dataset(Path("data/bad"))
    (path / "meta.pkl").write_bytes(payload)
    assert problem(dataset.read_info, path).id == "data.bad_meta"
    assert not Path("canary").exists()


@given(st.binary(max_size=200))
def test_any_bytes_are_no_traceback(data: bytes) -> None:
    Path("meta.pkl").write_bytes(data)
    try:
        dataset.read_meta_pickle(Path("meta.pkl"))
    except UserError as error:
        assert error.id == "data.bad_meta"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"dtype": "float64"}', "\x00", '"x"'])
def test_bad_index(text: str) -> None:
    path = write_dataset(Path("data/bad"))
    (path / "meta.json").write_text(text)
    assert problem(dataset.read_info, path).id == "data.bad_meta"


@pytest.mark.fault(
    "missing, empty or odd data files", row="B.4",
    sees="exit code 7 with file and size",
    safe="everything: nothing has begun",
)  # fmt: skip
def test_missing_empty_and_odd_files() -> None:
    path = write_dataset(Path("data/bad"))
    (path / "val.bin").write_bytes(b"\x01\x02\x03")
    assert problem(dataset.read_info, path).id == "data.odd_size"
    (path / "val.bin").write_bytes(b"")
    assert problem(dataset.read_info, path).id == "data.empty"
    (path / "val.bin").unlink()
    assert problem(dataset.read_info, path).id == "data.missing_file"


@pytest.mark.fault(
    "less data than block_size", row="B.4", sees="exit code 7 with both numbers", safe="everything: nothing has begun"
)
@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_shorter_than_the_context(tokens: int) -> None:
    path = write_dataset(Path("data/short"), tokens=400)
    np.zeros(tokens, np.uint16).tofile(path / "train.bin")
    error = problem(dataset.check_usable, dataset.read_info(path), 96, 16, 16)
    assert error.id == "data.too_short"
    assert f"{tokens} tokens" in str(error)
    assert "16" in str(error)
    np.zeros(17, np.uint16).tofile(path / "train.bin")
    dataset.check_usable(dataset.read_info(path), 96, 16, 16)


def test_validation_split_shorter_than_its_context() -> None:
    path = write_dataset(Path("data/short"), tokens=400)
    np.zeros(10, np.uint16).tofile(path / "val.bin")
    error = problem(dataset.check_usable, dataset.read_info(path), 96, 16, 16)
    assert error.values["split"] == "val"
    dataset.check_usable(dataset.read_info(path), 96, 16, 8)


def test_token_ids_beyond_the_vocabulary() -> None:
    path = write_dataset(Path("data/toy"))
    ids = np.zeros(500, np.uint16)
    ids[400] = 96
    ids.tofile(path / "train.bin")
    error = problem(TokenFile, dataset.read_info(path), "train", 96)
    assert error.id == "data.id_beyond_vocab"
    assert "96" in str(error)
    assert TokenFile(dataset.read_info(path), "train", 97)


@pytest.mark.fault(
    "a token id beyond the vocabulary", row="B.2",
    sees="exit code 7 with file and place",
    safe="everything before that step",
)  # fmt: skip
def test_ids_are_checked_in_every_batch_too() -> None:
    """Where the file is too large to scan, or changes after it was."""
    path = write_dataset(Path("data/toy"))
    info = dataset.read_info(path)
    file = TokenFile(info, "train", 96)
    np.full(2000, 65535, np.uint16).tofile(path / "train.bin")
    error = problem(file.batch, np.array([0]), 4, CPU)
    assert error.id == "data.id_beyond_vocab"


def test_a_file_that_shrinks_is_a_sentence_not_a_crash() -> None:
    """nanoGPT's memmap dies of SIGBUS here."""
    path = write_dataset(Path("data/toy"))
    file = TokenFile(dataset.read_info(path), "train", 96)
    os.truncate(path / "train.bin", 100)
    assert problem(file.rows, np.array([60]), 10).id == "data.shrunk"


# -- batches -----------------------------------------------------------------------------------------------


def test_batches_are_a_function_of_seed_and_step() -> None:
    file = TokenFile(dataset.read_info(write_dataset(Path("data/toy"))), "train", 96)

    def rows(seed: int, step: int, batch: int, accumulation: int) -> torch.Tensor:
        micro = train_batches(file, seed, step, batch_size=batch, accumulation=accumulation, block=8, device=CPU)
        return torch.cat([idx for idx, _ in micro])

    assert torch.equal(rows(1, 5, 4, 2), rows(1, 5, 4, 2))
    assert torch.equal(rows(1, 5, 4, 2), rows(1, 5, 8, 1))  # micro-batch and accumulation only cut
    assert torch.equal(rows(1, 5, 1, 8), rows(1, 5, 2, 4))
    assert not torch.equal(rows(1, 5, 4, 2), rows(1, 6, 4, 2))
    assert not torch.equal(rows(1, 5, 4, 2), rows(2, 5, 4, 2))


def test_targets_are_the_next_tokens() -> None:
    file = TokenFile(dataset.read_info(write_dataset(Path("data/toy"))), "val", 96)
    (idx, targets), *_ = evaluation_batches(file, 3, "val", rows=8, batch_size=4, block=8, device=CPU)
    assert idx.shape == targets.shape == (4, 8)
    assert idx.dtype == targets.dtype == torch.int64
    assert torch.equal(idx[:, 1:], targets[:, :-1])


@given(st.integers(0, 2**63 - 1), st.integers(0, 3), st.integers(0, 10**9), st.integers(1, 40), st.integers(1, 10**12))
def test_starts_are_in_range(seed: int, stream: int, step: int, rows: int, positions: int) -> None:
    found = starts(seed, stream, step, rows, positions)
    assert found.shape == (rows,)
    assert found.min() >= 0
    assert found.max() < positions


def test_starts_are_pinned() -> None:
    """The draw must not change with numpy or with us: a resumed run would see other data."""
    assert starts(1337, 0, 0, 4, 1_000_000).tolist() == starts(1337, 0, 0, 6, 1_000_000).tolist()[:4]
    assert starts(1337, 0, 7, 3, 10**6).tolist() == [741721, 343090, 163548]


def test_starts_are_uniform() -> None:
    """Chi-squared over 50 cells of 100,000 draws: 99.99% of uniform draws are below 96."""
    counts = np.bincount(starts(7, 0, 3, 100_000, 50), minlength=50)
    assert ((counts - 2000) ** 2 / 2000).sum() < 96
    by_step = np.array([starts(7, 0, step, 1, 50)[0] for step in range(20_000)])
    counts = np.bincount(by_step, minlength=50)
    assert ((counts - 400) ** 2 / 400).sum() < 96


# -- tokenizers and the built-in corpus --------------------------------------------------------------------


def made(name: str) -> tokenizer.Tokenizer:
    documents = [b"def f(x):\n    return x + 1\n" * 20, "naïve café ☕\n".encode() * 5]
    make, _ = tokenizer.TOKENIZERS[name]
    return make(lambda: documents, 300)


# Not from files of others.
MADE_HERE = [name for name in tokenizer.TOKENIZERS if name not in ("gpt2", "tokenizer.json")]


@pytest.mark.parametrize("name", MADE_HERE)
@given(text=st.text(max_size=60))
def test_every_tokenizer_reads_back_what_it_wrote(name: str, text: str) -> None:
    words = _cache.setdefault(name, made(name))
    assert words.decode(words.encode(text.encode())) == text


_cache: dict[str, tokenizer.Tokenizer] = {}


@pytest.mark.parametrize("name", MADE_HERE)
def test_every_tokenizer_loads_from_a_dataset(name: str) -> None:
    words = made(name)
    Path("d").mkdir()
    words.save(Path("d"))
    again = tokenizer.load(Path("d"), name)
    assert (again.name, again.vocab_size, again.separator) == (words.name, words.vocab_size, words.separator)
    assert list(again.encode(b"x = 1")) == list(words.encode(b"x = 1"))


def test_bpe_learns_to_its_size_and_is_deterministic() -> None:
    documents = [b"the cat sat on the mat " * 50]
    first, second = (BpeTokenizer.train(documents, 265) for _ in range(2))
    assert first.vocab_size == 265
    assert first.encode(b"the cat sat") == second.encode(b"the cat sat")
    assert len(first.encode(b"the cat sat")) < len("the cat sat")
    assert problem(BpeTokenizer.train, documents, 100).id == "data.bpe_vocab"


def test_gpt2_without_its_vocabulary_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    def refuse(name: str) -> None:
        raise OSError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", refuse)
    error = problem(tokenizer.Gpt2Tokenizer)
    assert error.id == "environment.no_vocabulary"
    assert "TIKTOKEN_CACHE_DIR" in str(error)


def test_the_corpus_is_real_text_split_by_file() -> None:
    files = corpus.files()
    assert [f.relative for f in files] == sorted(f.relative for f in files)
    assert sum(f.size_bytes for f in files) > 3_000_000
    splits = {split: {f.relative for f in files if f.split == split} for split in ("train", "val")}
    assert splits["train"].isdisjoint(splits["val"])
    assert 0.01 < len(splits["val"]) / len(files) < 0.12
    assert not [f for f in files if f.relative.startswith("test/") or "/tests/" in f.relative]


def test_built_in_corpus_as_bytes() -> None:
    config = resolve(["baby"]).config
    info = prepare_built_in(config)
    assert info.tokenizer == "byte"
    assert info.vocab_size == 256
    assert info.train_tokens == corpus.size_bytes("train")
    ids = np.fromfile(Path(info.path) / "train.bin", np.uint16)
    assert bytes(ids.astype(np.uint8)) == b"".join(d + b"\0" for d in corpus.documents("train"))
    meta = json.loads((Path(info.path) / "meta.json").read_text())
    assert meta["splits"]["train"]["sha256"] == hashlib.sha256(ids.tobytes()).hexdigest()
    before = (Path(info.path) / "meta.json").stat().st_mtime_ns
    assert prepare_built_in(config) == info  # made once
    assert (Path(info.path) / "meta.json").stat().st_mtime_ns == before
    assert [p.name for p in Path("data").iterdir()] == [info.name]  # nothing half-made beside it


def test_unigram_entropy_is_the_closed_form() -> None:
    path = Path("data/coin")
    path.mkdir(parents=True)
    np.array([0, 1] * 50_000, np.uint16).tofile(path / "train.bin")
    np.array([0, 0, 1, 1], np.uint16).tofile(path / "val.bin")
    assert unigram_entropy(dataset.read_info(path)) == pytest.approx(np.log(2), rel=1e-4)
    assert ByteTokenizer.separator == 0


def test_bad_datasets_on_the_command_line() -> None:
    """One sentence, the documented exit code, no traceback."""
    write_dataset(Path("data/tiny"), tokens=10)
    write_dataset(Path("data/big"), vocab=200)
    Path("data/none").mkdir()
    (Path("data/none") / "train.bin").write_bytes(b"")
    model = ["--n_layer=1", "--n_head=1", "--n_embd=8", "--block_size=16", "--vocab_size=96", "--device=cpu"]
    for name, words in (("tiny", "too few"), ("big", "token id"), ("none", "empty"), ("absent", "No dataset named")):
        foretrain("train", f"--dataset={name}", "--compile=false", *model, code=7, says=words)


@pytest.mark.parametrize(
    "meta",
    [{"vocab_size": -5}, {"vocab_size": True}, {"vocab_size": 10**40}, {"vocab_size": "abc"}, {"vocab_size": 0},
     {"fingerprint": {}}, {"dtype": ["x"]}, {"tokenizer": 5}, {"max_id": -1}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("form", ["json", "pickle"])
def test_an_index_that_cannot_be_true(meta: dict[str, object], form: str) -> None:
    folder = write_dataset(Path("data/x"))
    if form == "json":
        (folder / "meta.json").write_text(json.dumps(meta))
    else:
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 96, **meta}))
    error = problem(dataset.read_info, folder)
    assert error.id == "data.bad_meta"
    assert "\n" not in str(error)


def test_a_memo_index_cannot_take_gigabytes() -> None:
    folder = write_dataset(Path("data/x"))
    (folder / "meta.pkl").write_bytes(b"\x80\x04Nr\x00\x00\x00\x10.")
    assert problem(dataset.read_info, folder).id == "data.bad_meta"


def test_nanogpts_layout_has_a_fingerprint_of_its_contents() -> None:
    first = dataset.read_info(write_dataset(Path("data/x"))).fingerprint
    assert first == dataset.read_info(Path("data/x")).fingerprint
    assert first != dataset.read_info(write_dataset(Path("data/y"), seed=1)).fingerprint


def test_deep_json_is_a_sentence() -> None:
    folder = write_dataset(Path("data/x"))
    (folder / "meta.json").write_text("[" * 200_000)
    assert problem(dataset.read_info, folder).id == "data.bad_meta"
