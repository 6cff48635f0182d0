"""GGUF files: every tensor read back by gguf's own reader, logits by transformers' reader of them, tokenizers, refusals."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretrain.app.export import export
from foretrain.base.errors import ExitCode, UserError
from foretrain.data import hf_tokenizer
from foretrain.data.tokenizer import BpeTokenizer, ByteTokenizer, CharTokenizer, JsonTokenizer
from foretrain.model.language_model import make_model
from foretrain.runs.folder import RunDirectory
from foretrain.training import checkpoint
from foretrain.training.exports import gguf_file, source
from tests.kit.command import foretrain
from tests.kit.tiny import tiny, write_dataset
from tests.kit.training import train

gguf = pytest.importorskip("gguf")

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"bias": True},
    "gpt2-bare": {"bias": False},
    "llama": {"recipe": "llama", "n_head": 4, "n_kv_head": 2, "head_dim": 12, "rope_theta": 5000.0, "norm_eps": 1e-5},
    "qwen3": {
        "recipe": "llama",
        "n_head": 4,
        "n_kv_head": 1,
        "head_dim": 128,
        "qk_norm": True,
        "tied_embeddings": True,
    },
}
BLOCKS = {
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTSIDE = {
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def name_in_gguf(name: str) -> str:
    """llama.cpp's name of one of our parameters (src/llama-arch.cpp), written out here by hand."""
    module, _, end = name.rpartition(".")
    for blocks in ("transformer.h.", "model.layers."):
        if module.startswith(blocks):
            number, _, part = module.removeprefix(blocks).partition(".")
            return f"blk.{number}.{BLOCKS[part]}.{end}"
    return f"{OUTSIDE[module]}.{end}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    with contextlib.chdir(folder):
        write_dataset(Path("data/toy"), vocab=90)
        Path("data/toy/meta.json").write_text(json.dumps({"dtype": "uint16", "tokenizer": "byte", "vocab_size": 90}))
        for name, changes in CONFIGS.items():
            train(tiny(vocab_size=260, max_iters=2, eval_interval=2, out_dir=name, **changes))
    return folder


@pytest.fixture
def here(runs: Path) -> Iterator[None]:
    with contextlib.chdir(runs):
        yield


def weights_of(run: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found, _ = checkpoint.newest_valid(Path(run) / "checkpoints")
    assert found
    return load_file(found / "model.safetensors")


def tensors_in(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def as_ours(run: str, name: str, data: np.ndarray) -> np.ndarray:
    """Rows of a Llama's queries and keys from neighbours, as llama.cpp turns them, back to halves."""
    if run != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return data
    width, made = 12, np.empty_like(data)
    for head in range(len(data) // width):
        for i in range(width // 2):
            made[head * width + i] = data[head * width + 2 * i]
            made[head * width + width // 2 + i] = data[head * width + 2 * i + 1]
    return made


def rounded(tensor: torch.Tensor, gguf_type: str) -> np.ndarray:
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[gguf_type]
    return tensor.to(dtype).float().numpy()


@pytest.mark.parametrize("run", CONFIGS)
def test_every_tensor_comes_back(run: str, here: None, tmp_path: Path) -> None:
    ours = weights_of(run)
    for kind in ("f32", "f16", "bf16"):
        made = export(run, "gguf", tmp_path / kind, gguf_type=kind)  # type: ignore[arg-type]
        assert made.files == (f"model-{kind}.gguf",)
        found = tensors_in(tmp_path / kind / f"model-{kind}.gguf")
        for name, tensor in ours.items():
            held = found.pop(name_in_gguf(name))
            plain = tensor.dim() == 1 or name == "transformer.wpe.weight"
            assert held.tensor_type.name == ("F32" if plain else kind.upper()), name
            data = gguf.dequantize(held.data, held.tensor_type)
            expected = tensor.numpy() if plain else rounded(tensor, kind)
            assert np.array_equal(as_ours(run, name, data), expected), name
        # What is left are the biases that a GPT-2 without them needs there.
        assert all(name.endswith(".bias") and not held.data.any() for name, held in found.items())
        assert bool(found) == (run == "gpt2-bare") == ("zero_biases" in made.notes)


def test_q8_0_is_within_half_a_step_and_narrow_rows_are_f16(here: None, tmp_path: Path) -> None:
    assert "gguf_f16_rows" not in export("gpt2", "gguf", tmp_path / "a", gguf_type="q8_0").notes
    found = tensors_in(tmp_path / "a/model-q8_0.gguf")
    for name, tensor in weights_of("gpt2").items():
        held = found[name_in_gguf(name)]
        if held.tensor_type.name == "Q8_0":
            blocks = tensor.numpy().reshape(-1, 32)
            data = gguf.dequantize(held.data, held.tensor_type).reshape(-1, 32)
            step = np.abs(blocks).max(1, keepdims=True) / 127
            assert (np.abs(data - blocks) <= step * (0.5 + 127 / 2048)).all(), name  # the step is rounded to f16
    assert found["token_embd.weight"].tensor_type.name == "Q8_0"
    made = export("llama", "gguf", tmp_path / "b", gguf_type="q8_0")  # attention's output is 48 wide
    kinds = {name: held.tensor_type.name for name, held in tensors_in(tmp_path / "b/model-q8_0.gguf").items()}
    assert (kinds["blk.0.attn_output.weight"], kinds["blk.0.attn_q.weight"]) == ("F16", "Q8_0")
    assert made.notes == ("gguf_f16_rows",)
    assert made.quantize == ""


def test_sizes_are_those_that_llama_cpp_asks_for(here: None, tmp_path: Path) -> None:
    def said(run: str) -> dict[str, Any]:
        export(run, "gguf", tmp_path / run)
        return {
            key: field.contents() for key, field in gguf.GGUFReader(tmp_path / run / "model-f16.gguf").fields.items()
        }

    found = said("gpt2")
    assert (found["general.architecture"], found["general.file_type"]) == ("gpt2", int(gguf.LlamaFileType.MOSTLY_F16))
    sizes = {key: found[f"gpt2.{key}"] for key in ("block_count", "context_length", "embedding_length",
             "feed_forward_length", "attention.head_count")}  # fmt: skip
    assert list(sizes.values()) == [2, 16, 32, 128, 2]
    assert found["gpt2.attention.layer_norm_epsilon"] == np.float32(1e-5)
    found = said("llama")
    sizes = {key: found[f"llama.{key}"] for key in ("attention.head_count", "attention.head_count_kv",
             "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base", "vocab_size")}  # fmt: skip
    assert list(sizes.values()) == [4, 2, 12, 12, 12, 5000.0, 260]
    assert found["llama.attention.layer_norm_rms_epsilon"] == np.float32(1e-5)
    found = said("qwen3")
    assert found["general.architecture"] == "qwen3"
    assert found["qwen3.attention.head_count_kv"] == 1
    assert "output.weight" not in tensors_in(tmp_path / "qwen3/model-f16.gguf")  # tied: llama.cpp takes the embedding


@pytest.mark.parametrize("run", CONFIGS)
def test_transformers_reads_the_same_model(run: str, here: None, tmp_path: Path) -> None:
    """Its reader turns queries and keys back, and has llama.cpp's tanh formula of GELU for GPT-2.

    It leaves out GPT-2's context and Qwen3's width of a head, which must be the usual ones or be said.
    """
    transformers = pytest.importorskip("transformers")
    export(run, "gguf", tmp_path, gguf_type="f32")
    said = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="model-f32.gguf")
    said.n_positions = 16
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model-f32.gguf", config=said).eval()
    config = RunDirectory(Path(run)).read_record().config
    ours = make_model(config).eval()
    checkpoint.load_model(checkpoint.newest_valid(Path(run) / "checkpoints")[0], ours)  # type: ignore[arg-type]
    idx = torch.arange(48).view(3, 16) * 5 % 256
    with torch.no_grad():
        expected, found = ours.lm_head(ours.hidden(idx)), model(idx).logits
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < (1e-3 if run.startswith("gpt2") else 1e-5)
    assert expected.std() > 0.01


# -- tokenizers ----------------------------------------------------------------------------------------------


def keys(tokenizer: Any, rows: int, separator: int | None = 0) -> dict[str, Any]:
    found = hf_tokenizer.keys_of(tokenizer, rows, separator)
    return {key.removeprefix("tokenizer.ggml."): value for key, value in found.items()}


def test_bytes_are_tokens_and_their_separator_is_no_text() -> None:
    found = keys(ByteTokenizer(), 258)
    assert (found["model"], found["pre"], len(found["tokens"])) == ("gpt2", "gpt-2", 258)
    assert found["tokens"][ord("A")] == "A"
    assert found["tokens"][ord(" ")] == "Ġ"
    assert (found["tokens"][0], found["token_type"][0]) == ("<|endoftext|>", 3)
    assert (found["tokens"][257], found["token_type"][257]) == ("[PAD257]", 5)
    assert (found["bos_token_id"], found["eos_token_id"], found["add_bos_token"]) == (0, 0, False)
    assert len(found["merges"]) == 1


def test_a_trained_bpe_keeps_its_merges() -> None:
    pytest.importorskip("tokenizers")
    bpe = BpeTokenizer.train([Path(__file__).read_bytes()], 400)
    found, own = keys(bpe, bpe.vocab_size, bpe.separator), json.loads(bpe.text)["model"]
    assert [pair.split(" ") for pair in found["merges"]] == own["merges"]
    assert {token: id for id, token in enumerate(found["tokens"])} == own["vocab"]
    assert found["pre"] == "gpt-2"
    assert found["token_type"][bpe.separator] == 3


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def with_rule(*cuts: dict[str, Any], own: bool, **model: Any) -> JsonTokenizer:
    made = json.loads(BpeTokenizer.train([b"some text, some more text 123"], 300).text)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": own}
    made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*cuts, level]} if cuts else level
    made["model"] |= model
    return JsonTokenizer(json.dumps(made))


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def test_rules_that_cut_words_are_named_as_llama_cpp_names_them() -> None:
    pytest.importorskip("tokenizers")
    digits = {"type": "Digits", "individual_digits": True}

    def rule(*cuts: dict[str, Any], own: bool = False, **model: Any) -> str | None:
        tokenizer = with_rule(*cuts, own=own, **model)
        found = hf_tokenizer.keys_of(tokenizer, tokenizer.vocab_size, tokenizer.separator)
        return found and found["tokenizer.ggml.pre"]

    assert rule(split(LLAMA3), ignore_merges=True) == "llama-bpe"
    assert rule(split(LLAMA3)) == "dbrx"
    assert rule(split(QWEN2)) == "qwen2"
    assert rule(digits, own=True) == "smollm"
    assert rule(own=True) == "gpt-2"
    assert rule() is None  # one word: no name for that
    assert rule(split(r"\w+")) is None
    assert rule(split(QWEN2), split(QWEN2)) is None
    assert rule(split(QWEN2), own=True) is None


def sentence_pieces(complete: bool) -> JsonTokenizer:
    """Bytes to fall back on, and merges: all ways to make a token, as SentencePiece's vocabularies have them, or not."""
    pieces = ["▁", "a", "b", "ab", "▁a", "▁ab"]
    vocabulary = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    vocabulary |= {piece: 258 + i for i, piece in enumerate(pieces)}
    merges = [["a", "b"], ["▁", "a"], ["▁a", "b"], ["▁", "ab"]]
    added = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": True} for t, i in (("<unk>", 0), ("</s>", 1))]  # fmt: skip
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    return JsonTokenizer(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None, "post_processor": None,
        "decoder": None, "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": vocabulary, "merges": merges if complete else merges[:3]},
    }))  # fmt: skip


def test_sentence_pieces_become_scores_where_all_ways_are_merges() -> None:
    pytest.importorskip("tokenizers")
    found = keys(sentence_pieces(True), 264, 1)
    scores = dict(zip(found["tokens"], found["scores"], strict=True))
    assert found["model"] == "llama"
    assert found["add_space_prefix"] is True
    assert scores["ab"] > scores["▁a"] > scores["▁ab"]
    assert [found["token_type"][id] for id in (0, 1, 2, 257, 258)] == [2, 3, 6, 6, 1]
    assert found["unknown_token_id"] == 0
    assert hf_tokenizer.keys_of(sentence_pieces(False), 264, 1) is None


def test_characters_are_held_where_no_text_could_hang_llama_cpp() -> None:
    table = ["\n", " ", "\\", "a", "x"]
    found = keys(CharTokenizer(dict(enumerate(table))), 5, None)
    assert (found["model"], found["tokens"]) == ("rwkv", ["\\x0a", " ", "\\\\", "a", "x"])
    assert "eos_token_id" not in found  # a table of characters has no token that ends a text
    for odd, rows in ((["a", "é"], 2), (["a", "b"], 3), (["a", "bc"], 2)):
        assert hf_tokenizer.keys_of(CharTokenizer(dict(enumerate(odd))), rows, None) is None


def test_no_text_is_two_tokens() -> None:
    """llama.cpp ends the process where it is."""
    pytest.importorskip("tokenizers")
    made = with_rule(own=True)
    document = json.loads(made.text)
    document["model"]["vocab"]["[PAD301]"] = 300
    tokenizer = JsonTokenizer(json.dumps(document))
    assert tokenizer.vocab_size == 301
    assert hf_tokenizer.keys_of(tokenizer, 301, tokenizer.separator) is not None
    assert hf_tokenizer.keys_of(tokenizer, 302, tokenizer.separator) is None


def test_without_a_tokenizer_llama_cpp_takes_ids(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notes = {"gpt2": ("gguf_no_tokenizer", "gguf_gelu", "zero_biases"), "llama": ("gguf_no_tokenizer",)}
    for run, recipe in (("gpt2", "nanogpt"), ("llama", "llama")):
        train(tiny(max_iters=1, recipe=recipe, out_dir=run))
        record = RunDirectory(Path(run)).read_record().model_copy(update={"name": "a\x1b[31m\nb" * 50})
        with monkeypatch.context() as patch:
            patch.setattr(RunDirectory, "read_record", lambda self, record=record: record)
            made = export(run, "gguf")
        fields = gguf.GGUFReader(f"{run}/export-gguf/model-f16.gguf").fields
        assert fields["tokenizer.ggml.model"].contents() == "none"
        assert fields[f"{run}.vocab_size"].contents() == 96
        assert fields["general.name"].contents() == ("a[31mb" * 50)[:100]
        assert made.notes == notes[run]
    assert [each for each in caplog.records if each.levelname == "WARNING"] == []


# -- the command, and what goes wrong ------------------------------------------------------------------------


def test_the_command_says_how_to_make_smaller_types(here: None, tmp_path: Path) -> None:
    out = tmp_path / "my model"
    done = foretrain("export", "llama", "--to", "gguf", "--gguf-type", "bf16", "--out", str(out), code=0)
    *_, last = done.stdout.strip().splitlines()
    assert last == f"Smaller types: llama-quantize '{out}/model-bf16.gguf' '{out}/model-Q4_K_M.gguf' Q4_K_M"
    made = json.loads(foretrain("export", "llama", "--to", "gguf", "--out", str(out), "--force", "--json").stdout)
    assert made["quantize"].startswith("llama-quantize ")
    assert (made["files"], len(list(out.iterdir()))) == (["model-f16.gguf"], 2)


def id_of(*words: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        export(*words, **options)
    assert str(caught.value)
    return caught.value.id


def test_a_family_that_llama_cpp_lacks_is_refused() -> None:
    for recipe in ("modern", "nanochat"):
        train(tiny(recipe=recipe, max_iters=1, optimizer="adamw", out_dir=recipe))
        assert id_of(recipe, "gguf") == "usage.export_gguf_recipe"
        assert not (Path(recipe) / "export-gguf").exists()


def test_what_goes_wrong_is_one_sentence_and_leaves_nothing(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert id_of("gpt2", "hf", gguf_type="f16") == "usage.gguf_type_alone"
    bad = foretrain("export", "gpt2", "--to", "gguf", "--gguf-type", "q4_k_m")
    assert (bad.returncode, bad.stderr.count("\n")) == (ExitCode.USAGE, 1)
    assert "f32" in bad.stderr

    def full(*_: Any, **__: Any) -> None:
        raise OSError("768 requested and 0 written")  # as numpy words a full disk

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
        assert id_of("gpt2", "gguf", tmp_path / "x") == "environment.cannot_write"
        patch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0})())
        assert id_of("gpt2", "gguf", tmp_path / "x") == "disk.full_export"
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "gguf", None)
        assert id_of("gpt2", "gguf", tmp_path / "x") == "environment.missing_extra"
    assert not list(tmp_path.iterdir())


def test_a_weight_beyond_f16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    train(tiny(max_iters=1))
    made = source.Source.__init__

    def large(self: Any, *words: Any) -> None:
        made(self, *words)
        self.weights["transformer.wte.weight"][3, 4] = -70_000.0

    monkeypatch.setattr(source.Source, "__init__", large)
    assert id_of("out", "gguf") == "usage.export_f16_range"
    assert not Path("out/export-gguf").exists()
    export("out", "gguf", gguf_type="bf16")
    assert gguf_file.refusal(tiny()) is None


@pytest.mark.parametrize("kept", [None, 3000, 5])
def test_a_gguf_file_is_no_start_of_a_run(kept: int | None, here: None, tmp_path: Path) -> None:
    """Whole or damaged: nothing in it is read."""
    path = Path(export("gpt2", "gguf", tmp_path).path) / "model-f16.gguf"
    path.write_bytes(path.read_bytes()[:kept])
    done = foretrain("plan", "baby", "--gpu", "4070", f"--init_from={path}")
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert "it is a GGUF file" in done.stderr
