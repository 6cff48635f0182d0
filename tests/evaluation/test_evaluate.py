"""`foretrain eval`: bits per byte against transformers and by hand, and where results are kept and shown."""

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import foretrain as library
from foretrain.app.compare import compared
from foretrain.app.evaluation import token_bytes
from foretrain.base.errors import UserError
from foretrain.cli.commands import eval as eval_command
from foretrain.comparison.compare import compare
from foretrain.data.tokenizer import ByteTokenizer, JsonTokenizer, TiktokenTokenizer
from foretrain.evaluation import windows
from foretrain.evaluation.windows import OwnModel
from foretrain.model.language_model import make_model
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import Evaluation, Scores, TextScore
from foretrain.training import checkpoint
from tests.kit.command import foretrain, refused
from tests.kit.evaluation import TEXT, bpe, characters, trained, write_tokenized
from tests.kit.prepare import GPT2_PATTERN, bpe_text, ranks_of, texts
from tests.kit.runs import write_measured_run

# -- windows and sums ------------------------------------------------------------------------------------------


@given(st.integers(0, 300), st.integers(1, 40), st.data())
def test_each_token_is_scored_once_with_context_before_it(count: int, context: int, data: Any) -> None:
    stride = data.draw(st.integers(1, context))
    scored = []
    for begin, end, new in windows.windows(count, context, stride):
        assert end - begin <= context
        targets = range(end + 1 - new, end + 1)
        assert begin == 0 or min(targets) - begin > context - stride  # so many tokens stand before it
        scored += targets
    assert scored == list(range(1, count))


class Bigrams:
    """A model whose logits hang on the last token alone, so that windows make no difference."""

    context_tokens, device = 16, torch.device("cpu")

    def __init__(self, size: int) -> None:
        self.vocab_size = size
        self.table = torch.randn(size, size, generator=torch.Generator().manual_seed(1))

    def logits(self, idx: torch.Tensor) -> torch.Tensor:
        return self.table[idx]


@given(st.integers(2, 90), st.integers(1, 16), st.sampled_from([None, 3]))
def test_sums_are_those_of_all_pairs(count: int, stride: int, skip: int | None) -> None:
    model, ids = Bigrams(7), np.random.default_rng(count).integers(0, 7, count)
    sizes = [0, 1, 2, 3, 4, 5, 6]
    found = windows.score(model, ids, sizes, stride=stride, skip=skip)
    nats = -torch.log_softmax(model.table.double(), -1)[ids[:-1], ids[1:]].numpy()
    kept = np.ones(count - 1, dtype=bool) if skip is None else ids[1:] != skip
    assert found.tokens == kept.sum()
    assert found.nats.sum() == pytest.approx(nats[kept].sum(), rel=1e-5)
    assert found.byte_counts.sum() == np.array(sizes)[ids[1:]][kept].sum()


def test_the_standard_error_is_that_of_repeated_draws() -> None:
    """Of many texts of one source: the spread of their bits per byte is what each says of itself."""
    random, found = np.random.default_rng(0), []
    for _ in range(400):
        sizes = random.integers(50, 150, 60)
        nats = sizes * 0.7 + random.normal(0, 8, 60)
        summed = windows.Summed(nats, sizes, 60)
        found.append((summed.bits_per_byte(int(sizes.sum())), summed.standard_error(int(sizes.sum()))))
    values, errors = np.array(found).T
    assert errors.mean() == pytest.approx(values.std(), rel=0.1)
    assert windows.Summed(np.array([3.0]), np.array([5]), 4).standard_error(5) is None


def test_a_card_out_of_memory_takes_half_of_the_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(Bigrams):
        most = 2

        def logits(self, idx: torch.Tensor) -> torch.Tensor:
            if len(idx) > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().logits(idx)

    model, ids = Small(7), np.arange(200) % 7
    expected = windows.score(Bigrams(7), ids, [1] * 7, stride=8)
    found = windows.score(model, ids, [1] * 7, stride=8)
    assert np.array_equal(found.nats, expected.nats)
    model.most = 0
    with pytest.raises(UserError, match="not even one window of 16 tokens"):
        windows.score(model, ids, [1] * 7, stride=8)


# -- bytes of tokens ---------------------------------------------------------------------------------------------


def sentencepiece() -> JsonTokenizer:
    """A vocabulary as SentencePiece's models have it: spaces with a sign of their own, and single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    fast = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=pieces, show_progress=False, limit_alphabet=40)
    fast.train_from_iterator(texts(30), trainer)
    document = json.loads(fast.to_str())
    document["added_tokens"] = [t for t in document["added_tokens"] if t["content"] in ("<unk>", "</s>")]
    return JsonTokenizer(json.dumps(document), "</s>")


def tiktoken_like() -> TiktokenTokenizer:
    import tiktoken

    ranks = ranks_of(bpe_text())
    own = tiktoken.Encoding("own", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 599})
    return TiktokenTokenizer("own", own)


@pytest.mark.parametrize("make", [ByteTokenizer, bpe, characters, sentencepiece, tiktoken_like])
def test_bytes_of_tokens_add_up_to_those_of_the_text(make: Any) -> None:
    words = make()
    sizes = token_bytes(words)
    assert len(sizes) == words.vocab_size
    for text in (TEXT, TEXT[:40], "import os\n"):
        assert sum(sizes[id] for id in words.encode(text.encode())) == len(text.encode())
    if words.name != "char":
        assert sizes[words.separator] == 0


# -- a run --------------------------------------------------------------------------------------------------------


def model_of(run: Path) -> Any:
    record = RunDirectory(run).read_record()
    model = make_model(record.config)
    path, _ = checkpoint.newest_valid(run / "checkpoints")
    assert path
    checkpoint.load_model(path, model)
    return model.eval()


def nats_with_all_the_context(logits_of: Any, ids: list[int], context: int, stride: int) -> float:
    """One token at a time, by hand: the windows of the documentation, without ours."""
    total, done, begin = 0.0, 0, 0
    while done < len(ids) - 1:
        end = min(begin + context, len(ids) - 1)
        logits = logits_of(torch.tensor([ids[begin:end]]))[0]
        for target in range(done + 1, end + 1):
            total -= float(F.log_softmax(logits[target - 1 - begin].double(), -1)[ids[target]])
        done, begin = end, begin + stride
    return total


@pytest.fixture
def text_file() -> Path:
    Path("t.txt").write_text(TEXT, "utf-8")
    return Path("t.txt")


def test_bits_per_byte_of_a_text_against_transformers(text_file: Path) -> None:
    """The same weights in transformers' GPT-2: its loss of each window, by the recipe of its documentation, whose
    windows predict one token fewer than they are long; then of windows as long as the context, by its logits."""
    transformers = pytest.importorskip("transformers")
    run = trained()
    folder = library.export(run, "hf").path
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.bos_token_id, *tokenizer(TEXT)["input_ids"]]
    size, context, stride = len(TEXT.encode()), 32, 16

    nats, done = 0.0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        labels = torch.tensor([ids[begin:end]])
        labels[:, : max(0, done - begin)] = -100
        with torch.no_grad():
            loss = theirs(torch.tensor([ids[begin:end]]), labels=labels).loss
        nats += float(loss) * int((labels[:, 1:] != -100).sum())
        done = end
        if end == len(ids):
            break
    own = OwnModel(model_of(run), 600)
    shorter = windows.score(own, np.array(ids), token_bytes(bpe()), stride=stride, context=context - 1)
    assert shorter.nats.sum() == pytest.approx(nats, rel=1e-6)

    found = library.evaluate(run, text=text_file, device="cpu").texts[0]
    with torch.no_grad():
        whole = nats_with_all_the_context(lambda idx: theirs(idx).logits, ids, context, stride)
    assert found.bits_per_byte == pytest.approx(whole / math.log(2) / size, rel=1e-6)
    assert found.loss == pytest.approx(whole / (len(ids) - 1), rel=1e-6)
    assert (found.tokens, found.size_bytes, found.whole) == (len(ids) - 1, size, True)
    assert (found.context_tokens, found.stride_tokens) == (context, stride)

    of_folder = library.evaluate(folder, text=text_file, device="cpu")
    assert of_folder.texts[0].bits_per_byte == pytest.approx(found.bits_per_byte, rel=1e-6)
    assert (of_folder.checkpoint, of_folder.kept_in) == (None, None)


@pytest.mark.parametrize("recipe", ["modern", "llama", "nanochat"])
def test_every_family_is_scored(text_file: Path, recipe: str) -> None:
    run = trained(recipe)
    found = library.evaluate(run, text=text_file, stride=32, device="cpu").texts[0]
    model, ids = model_of(run), [bpe().separator, *bpe().encode(TEXT.encode())]
    with torch.no_grad():
        expected = nats_with_all_the_context(lambda idx: model.lm_head(model.hidden(idx)), ids, 32, 32)
    assert found.loss * found.tokens == pytest.approx(expected, rel=1e-5)


def test_default_text_is_validation_data_without_separators() -> None:
    run = trained()
    found = library.evaluate(run, device="cpu").texts[0]
    ids = np.fromfile("data/toy/val.bin", dtype=np.uint16).astype(int).tolist()
    model, ends = model_of(run), bpe().separator
    nats = 0.0
    with torch.no_grad():
        for begin, end, new in windows.windows(len(ids), 32, 16):
            logits = F.log_softmax(model.lm_head(model.hidden(torch.tensor([ids[begin:end]])))[0].double(), -1)
            nats -= sum(
                float(logits[target - 1 - begin, ids[target]])
                for target in range(end + 1 - new, end + 1)
                if ids[target] != ends
            )
    tokens = [id for id in ids[1:] if id != ends]
    size = len(bpe().decode(tokens).encode("utf-8", "surrogateescape").replace("\ufffd".encode(), b"?"))
    assert found.tokens == len(tokens)
    assert found.size_bytes == pytest.approx(size, abs=3)  # a letter that is cut at the end of the split
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / found.size_bytes, rel=1e-6)
    assert (found.text, found.whole) == ("toy/val", True)
    part = library.evaluate(run, tokens=50, device="cpu").texts[0]
    assert (part.whole, part.tokens <= 50) == (False, True)


def test_the_export_of_a_run_on_bytes_scores_as_the_run(text_file: Path) -> None:
    """Its tokenizer.json names no token that ends a text; the model's config.json does."""
    pytest.importorskip("transformers")
    run = trained(words=ByteTokenizer())
    folder = library.export(run, "hf").path
    own, of_folder = (library.evaluate(each, text=text_file, device="cpu").texts[0] for each in (run, folder))
    assert of_folder.bits_per_byte == pytest.approx(own.bits_per_byte, rel=1e-6)
    assert of_folder.tokens == own.tokens == len(TEXT.encode())
    assert len(library.evaluate(run, text=[text_file, text_file], device="cpu").texts) == 1
    for name, text, said in (("config.json", "{}", "eos_token"), ("tokenizer.json", "{", "can be read")):
        (Path(folder) / name).write_text(text)
        with refused(code=7, match=rf"export-hf/tokenizer\.json: .*{said}"):
            library.evaluate(folder, text=text_file, device="cpu")


def test_characters_have_no_token_before_the_first(text_file: Path) -> None:
    run = trained(words=characters())
    found = library.evaluate(run, text=text_file, device="cpu").texts[0]
    assert (found.tokens, found.size_bytes) == (len(TEXT) - 1, len(TEXT[1:].encode()))


# -- kept and shown -----------------------------------------------------------------------------------------------


def test_results_are_kept_beside_the_run_and_shown(text_file: Path) -> None:
    run = trained()
    Path("other.txt").write_text(TEXT[:300])
    first = library.evaluate(run, text=text_file, device="cpu")
    again = library.evaluate(run, text=[text_file, "other.txt"], device="cpu")
    assert first.kept_in == again.kept_in
    (kept,) = RunDirectory(run).scores()
    assert [score.text for score in kept.texts] == ["t.txt", "other.txt"]
    assert Scores.from_json(json.dumps(kept.to_json(schema="foretrain.scores/1"))) == kept
    assert Evaluation.from_json(json.dumps(first.to_json(schema="foretrain.model/1#eval"))) == first
    assert f"{first.texts[0].bits_per_byte:.4f}" in str(first)
    best = library.evaluate(run, text=text_file, best=True, device="cpu")
    step = checkpoint.read_progress(Path(run) / "checkpoints" / kept.checkpoint).best_step
    assert best.step == step

    shown = foretrain("explain", "out").stdout
    assert "t.txt" in shown
    assert f"{first.texts[0].bits_per_byte:.4f}" in shown
    assert "bits/byte" in foretrain("runs").stdout
    assert json.loads(foretrain("explain", "out", "--json").stdout)["scores"]


def score(text: str, bits: float, error: float | None, **changes: Any) -> TextScore:
    values: dict[str, Any] = {
        "text": text, "sha256": text * 4, "size_bytes": 100, "tokens": 50, "loss": 1.0, "bits_per_byte": bits,
        "standard_error": error, "windows": 5, "context_tokens": 16, "stride_tokens": 8, "whole": True, "device": "cpu",
        "dtype": "float32", "at": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    return TextScore(**{**values, **changes})


def keep(run: Path, *found: TextScore, step: int = 60, weights: str = "0") -> None:
    RunDirectory(run).keep_scores(
        Scores(checkpoint=f"step-{step:010d}", step=step, weights_sha256=weights, texts=found)
    )


def test_scores_of_other_weights_and_spoilt_files_are_replaced() -> None:
    run = write_measured_run(Path("one"))
    keep(run, score("a", 1.0, 0.1))
    keep(run, score("b", 2.0, 0.1), weights="1")
    assert [s.text for s in RunDirectory(run).scores()[0].texts] == ["b"]
    (run / "scores" / "step-0000000070.json").write_text('{"step": 7')
    assert len(RunDirectory(run).scores()) == 1


def test_runs_are_compared_by_what_they_share() -> None:
    one, two = (write_measured_run(Path(name), seed=seed) for seed, name in enumerate(("one", "two"), 1))
    assert compare(compared(["one", "two"]).subjects).scores == ()
    keep(one, score("a", 1.0, 0.01), score("b", 2.0, 0.2), score("only", 1.0, 0.1))
    keep(one, score("a", 0.5, 0.01), step=50)  # an older checkpoint
    keep(two, score("a", 1.1, 0.01, context_tokens=32), score("b", 2.1, 0.2), score("c", 3.0, None))
    found = compared(["one", "two"]).comparison.scores
    assert [(s.name, s.values, s.best, s.outcome) for s in found] == [
        ("a", (1.0, 1.1), "one", "difference"), ("b", (2.0, 2.1), None, "within_noise"),
    ]  # fmt: skip
    shown = foretrain("compare", "one", "two").stdout
    assert "1.0000 ± 0.0100" in shown
    assert "within noise" in shown
    keep(one, score("a", 1.0, 0.01, whole=False, tokens=20), step=70)
    assert len(compared(["one", "two"]).comparison.scores) == 2  # a part is compared with the same part only


# -- the command --------------------------------------------------------------------------------------------------


def test_the_command_answers_on_one_screen_and_in_json(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained()
    monkeypatch.setenv("COLUMNS", "80")
    lines = foretrain("eval", "out", "--text", "t.txt", "--device=cpu").stdout.splitlines()
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("out, step 12  cpu, float32; kept in out/scores/step-0000000012.json")
    found = json.loads(foretrain("eval", "out", "--text", "t.txt", "--device=cpu", "--json").stdout)
    assert found["schema"] == "foretrain.model/1#eval"
    assert found["texts"][0]["size_bytes"] == len(TEXT.encode())
    assert foretrain("eval", "out", "--text", "t.txt", "--device=cpu", "--quiet").stderr == ""
    newest = sorted(Path("out/checkpoints").iterdir())[-1]
    assert foretrain("eval", str(newest), "--text", "t.txt", "--device=cpu").returncode == 0


def test_progress_is_shown_where_somebody_watches(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained()
    screen = io.StringIO()
    monkeypatch.setattr(eval_command, "ERR", Console(file=screen, force_terminal=True, width=100))
    monkeypatch.setattr(windows, "LOGITS_BYTES", 0)  # one window a batch
    assert foretrain("eval", "out", "--text", "t.txt", "--device=cpu").returncode == 0
    assert "Loading out" in screen.getvalue()
    assert re.search(r"\r\x1b\[2Kt\.txt: \d+ of [\d,]+ tokens", screen.getvalue())
    assert screen.getvalue().endswith("\r\x1b[2K")


def test_what_was_found_before_ctrl_c_is_kept(text_file: Path) -> None:
    run = trained()
    Path("second.txt").write_text(TEXT)

    def stop(id: str, values: dict[str, Any]) -> None:
        if values.get("name") == "second.txt":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        library.evaluate(run, text=["t.txt", "second.txt"], device="cpu", listen=stop)
    assert [score.text for score in RunDirectory(run).scores()[0].texts] == ["t.txt"]


def test_a_folder_that_takes_no_results_is_told(text_file: Path) -> None:
    run = trained()
    (run / "scores").write_text("in the way")
    result = foretrain("eval", "out", "--text", "t.txt", "--device=cpu", code=0)
    assert "could not be kept" in result.stderr
    assert "not kept" in result.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["no-run"], 7, "no-run"),
        (["out", "--text", "missing.txt"], 7, "cannot be read"),
        (["out", "--text", "empty.txt"], 7, "is empty"),
        (["out", "--text", "bytes.bin"], 7, "byte 2 is 0xff"),
        (["out", "--text", "t.txt", "--stride", "33"], 2, "longer than the model's context of 32 tokens"),
        (["out", "--text", "t.txt", "--device", "gpu"], 2, "device"),
        (["hf", "--best"], 2, "leave out --best"),
        (["hf"], 2, "no validation data"),
        (["out", "--tasks", "lambada_openai"], 4, "foretrain[eval]"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], code: int, said: str, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained()
    Path("empty.txt").touch()
    Path("bytes.bin").write_bytes(b"ab\xff")
    Path("hf").mkdir()
    Path("hf/config.json").write_text("{}")
    if "--tasks" in words:
        monkeypatch.setattr("foretrain.evaluation.harness.PACKAGE", "no_such_package")
    foretrain("eval", *words, code=code, says=said)


def test_a_hugging_face_folder_that_cannot_be_loaded_is_told(text_file: Path) -> None:
    pytest.importorskip("transformers")
    write_tokenized(Path("set"), bpe())
    Path("hf").mkdir()
    Path("hf/config.json").write_text('{"model_type": "gpt2"}')
    assert "no tokenizer.json" in foretrain("eval", "hf", "--text", "t.txt").stderr
    bpe().save(Path("hf"))
    foretrain("eval", "hf", "--text", "t.txt", "--device=cpu", code=7, says="transformers could not load this model")
