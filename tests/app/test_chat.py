"""`foretrain sample` and `foretrain chat`: text as it is made, a conversation, and what a model needs before it loads."""

import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foretrain as library
from foretrain.app import opened as opening
from foretrain.app.opened import Fitted, TextStream
from foretrain.app.sample import opened
from foretrain.base.errors import ExitCode, UserError
from foretrain.cli.commands import sample as chat
from foretrain.config.shape import facts_of_run
from foretrain.data.tokenizer import BpeTokenizer, ByteTokenizer, CharTokenizer
from foretrain.model.language_model import make_model
from foretrain.model.sampling import Sampling
from foretrain.predict.memory import MARGIN_BYTES
from tests.kit.command import foretrain, refused
from tests.kit.tiny import tiny

TRAIN = (
    "train", "baby", "--device=cpu", "--n_layer=1", "--n_head=1", "--n_embd=16", "--block_size=32", "--batch_size=2",
    "--max_iters=4", "--lr_decay_iters=4", "--warmup_iters=1", "--eval_interval=2", "--eval_iters=1", "--out_dir=run",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on bytes whose model has learned next to nothing."""
    folder = tmp_path_factory.mktemp("chat")
    here = Path.cwd()
    os.chdir(folder)
    try:
        assert foretrain(*TRAIN).returncode == 0
    finally:
        os.chdir(here)
    return folder / "run"


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


# -- text of tokens ----------------------------------------------------------------------------------------------


BPE = None


def bpe() -> BpeTokenizer:
    global BPE
    if BPE is None:
        pytest.importorskip("tokenizers")
        BPE = BpeTokenizer.train(["añ 日本 🙂 def é the".encode()] * 20, 290)
    return BPE


def assert_streamed(tokenizer: Any, ids: list[int]) -> None:
    stream = TextStream(tokenizer)
    pieces = [stream.put(id) for id in ids]
    assert "".join(pieces) + stream.end() == tokenizer.decode(ids)
    assert not any(piece.endswith("\ufffd") for piece in pieces)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=40))
def test_streamed_bytes_are_their_text(ids: list[int]) -> None:
    assert_streamed(ByteTokenizer(), ids)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_streamed_tokens_are_their_text(data: st.DataObject) -> None:
    words = bpe()
    assert_streamed(words, data.draw(st.lists(st.integers(0, words.vocab_size - 1), max_size=30)))


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=("Cs",)), max_size=30))
def test_a_character_appears_when_it_is_whole(text: str) -> None:
    data = text.encode()
    stream, shown = TextStream(ByteTokenizer()), ""
    for i, byte in enumerate(data):
        shown += stream.put(byte)
        assert shown == data[: i + 1].decode("utf-8", "ignore")
    assert stream.end() == ""


def test_characters_are_their_text() -> None:
    assert_streamed(CharTokenizer(dict(enumerate("añ🙂\n"))), [0, 1, 2, 3, 9, 0])


# -- sample ------------------------------------------------------------------------------------------------------


def test_sample_prints_what_it_writes(run: Path) -> None:
    words = ("sample", str(run), "--tokens", "60", "--prompt", "def ", "--top-p", "0.9")
    text, found = foretrain(*words), json.loads(foretrain(*words, "--json").stdout)
    made = library.sample(run, "def ", 60, top_p=0.9).text
    assert found["text"] == made
    assert text.stdout.startswith("def ")
    assert len(text.stdout) == len("def " + made + "\n")
    assert "needs" in text.stderr
    assert "KV cache for 32 tokens" in text.stderr
    assert foretrain(*words, "--quiet").stderr == ""
    assert library.sample(run, "def ", 60, top_p=1e-9).text == library.sample(run, "def ", 60, temperature=0).text
    assert made != library.sample(run, "def ", 60, top_p=0.9, seed=2).text
    assert foretrain("sample", str(run), "--top-p", "1.5").returncode == ExitCode.USAGE
    assert foretrain("sample", str(run), "--interactive", "--json").returncode == ExitCode.USAGE


# -- chat --------------------------------------------------------------------------------------------------------


def test_a_conversation_through_a_pipe(run: Path, typed: Any) -> None:
    typed("def f\n/temperature 0\n/tokens 5\n/nonsense\n/top_p 2\n//x\n/reset\nagain")
    found = foretrain("chat", str(run), "--tokens", "8", code=0)
    assert [line for line in found.stderr.splitlines() if "chat" in line] == []
    for said in (
        "continues text",
        "temperature = 0",
        "tokens = 5",
        "/nonsense",
        "/top_p 2: expected 0 to 1",
        "forgotten",
    ):
        assert said in found.stderr
    assert found.stdout.count("\n") >= 3
    typed("def f\n")
    assert foretrain("sample", str(run), "--interactive", "--tokens", "8", "--quiet").stderr == ""


def test_the_conversation_stays_in_the_context(run: Path, typed: Any) -> None:
    """Lines and replies follow one another, and what is dropped is said."""
    typed("ab\n/reset\nab\n")
    twice = foretrain("chat", str(run), "--tokens", "6", "--temperature", "0", "--quiet").stdout
    assert twice[: len(twice) // 2] == twice[len(twice) // 2 :]
    writer = opened(run).load(1)
    writer.read("a" * 20)
    assert (len(writer._writer), writer.dropped) == (20, 0)
    list(writer.write(Sampling(0, 0), 4))
    writer.read("b" * 30)
    assert writer.dropped == 54 - 24
    typed("a" * 30 + "\n" + "b" * 30 + "\n")
    assert "oldest" in foretrain("chat", str(run), "--tokens", "4").stderr


class Scripted:
    def __init__(self, pieces: list[str]) -> None:
        self.pieces, self.texts, self.dropped = pieces, list[str](), 0

    def read(self, text: str) -> None:
        if "é" in text:
            raise UserError("data.unknown_characters", characters=["é"])
        self.texts.append(text)

    def forget(self) -> None:
        self.texts = []

    def write(self, sampling: Sampling, count: int, *, until_end: bool = False) -> Iterator[str]:
        for number, piece in enumerate(self.pieces):
            if piece == "^C":
                os.kill(os.getpid(), signal.SIGINT)
                continue
            yield f"{piece}{number}"


def test_ctrl_c_stops_a_reply_and_no_more(typed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    typed("one\ntwo\né\n/quit\nnever\n")
    writer: Any = Scripted(["a", "^C", "b", "c"])
    chat.talk(writer, Sampling(), 10)
    out, err = capsys.readouterr()
    assert out == "a0b2\na0b2\n"
    assert writer.texts == ["one\n", "\ntwo\n"]
    assert "é" in err


def test_sigterm_ends_it(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    typed("one\ntwo\n")
    monkeypatch.setattr(signal, "SIGINT", signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        chat.talk(Scripted(["a", "^C", "b", "c"]), Sampling(), 10)  # type: ignore[arg-type]


def test_at_a_terminal_it_prompts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter(["one", KeyboardInterrupt(), EOFError()])

    def ask(prompt: str) -> str:
        found = next(answers)
        if isinstance(found, BaseException):
            raise found
        return found

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", ask)
    chat.talk(Scripted(["a"]), Sampling(), 10)  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    assert out == "a0\n\n"
    assert "Ctrl-D" in err


# -- what it needs -----------------------------------------------------------------------------------------------


def test_what_does_not_fit_gives_way_with_a_sentence(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = facts_of_run(tiny(block_size=8192, n_embd=64, n_layer=4))
    whole = Fitted(model, None, half=True)
    made = make_model(tiny(block_size=8192, n_embd=64, n_layer=4))
    assert whole.memory.bytes_of("weights") == sum(p.nbytes for p in made.parameters())
    assert (whole.dtype, whole.context, whole.notes) == ("f32", 8192, ())
    needed = whole.memory.needed_high_bytes + MARGIN_BYTES
    assert Fitted(model, needed, half=True).notes == ()
    half = Fitted(model, needed - 1, half=True)
    assert (half.dtype, half.context, [note.id for note in half.notes]) == ("bf16", 8192, ["sample_half"])
    assert half.memory.bytes_of("kv_cache") * 2 == whole.memory.bytes_of("kv_cache")
    shorter = Fitted(model, needed - 1, half=False)
    assert (shorter.dtype, shorter.context, [note.id for note in shorter.notes]) == ("f32", 4096, ["sample_context"])
    with refused(code=ExitCode.OUT_OF_MEMORY):
        Fitted(model, MARGIN_BYTES, half=True)
    monkeypatch.setattr(opening, "room_bytes", lambda device: MARGIN_BYTES)
    ended = foretrain("sample", str(run))
    assert (ended.returncode, ended.stdout) == (ExitCode.OUT_OF_MEMORY, "")
    assert len(ended.stderr.strip().splitlines()) == 1


def test_a_shorter_context_and_half_precision_still_write(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = opened(run)
    room = found.fitted.memory.needed_high_bytes + MARGIN_BYTES - 1
    monkeypatch.setattr(opening, "room_bytes", lambda device: room)
    shorter = opened(run)
    assert (shorter.fitted.context, shorter.fitted.dtype) == (16, "f32")
    writer = shorter.load(1)
    writer.read("abc")
    assert len("".join(writer.write(Sampling(0, 0), 40))) > 0
    shorter.fitted.dtype = "bf16"
    assert len(list(shorter.load(1).write(Sampling(0, 0), 20))) > 0


def test_the_exported_model_writes_the_same(run: Path, tmp_path: Path) -> None:
    """transformers' generate, with its own cache, from the folder that `foretrain export` writes."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    folder = library.export(run, "hf", tmp_path / "hf").path
    other = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt, count = "def f", 20
    ids = torch.tensor([list(prompt.encode())])
    made = other.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    expected = bytes(made[0, len(prompt) :].tolist()).decode("utf-8", "replace")
    assert library.sample(run, prompt, count, temperature=0).text == expected
