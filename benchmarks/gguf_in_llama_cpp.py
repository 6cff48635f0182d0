"""Exported GGUF files in llama.cpp itself: its logits and tokens against those of the model that was exported.

    pip install 'foretrain[train,data,export]' llama-cpp-python      (the last one compiles llama.cpp)
    python benchmarks/gguf_in_llama_cpp.py      (about three minutes)

Short runs on the Python standard library's source, one of each architecture. Every type of file is loaded, and three
contexts of held-out text go through both programs, the KV cache of llama.cpp in fp32. GPT-2 is compared with its tanh
formula of GELU, too, which is the one that llama.cpp has. Tokenizers are compared on source text and on text that is
made to be hard to cut. `llama_model_quantize`, which the command llama-quantize calls, makes a Q4_K_M file.
"""

import contextlib
import importlib
import json
import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import arguments, report
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn

import foretrain
from foretrain.data.batches import TokenFile
from foretrain.data.hf_tokenizer import keys_of
from foretrain.data.tokenizer import CharTokenizer, JsonTokenizer, tokenizer_of
from foretrain.model.language_model import make_model
from foretrain.runs.folder import RunDirectory
from foretrain.training import checkpoint
from foretrain.training.exports.forms import GGUF_TYPES

# Not in the development set: it compiles for minutes, and may be missing.
llama_cpp: Any = importlib.import_module("llama_cpp")
gguf: Any = importlib.import_module("gguf")

CONTEXT = 128
SMALL: dict[str, Any] = {
    "n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": CONTEXT, "batch_size": 8, "gradient_accumulation_steps": 1,
    "max_iters": 60, "lr_decay_iters": 60, "warmup_iters": 10, "eval_interval": 60, "eval_iters": 4, "learning_rate": 2e-3,
    "min_lr": 2e-4, "dataset": "python-stdlib", "device": "cpu", "compile": False, "dtype": "float32",
}  # fmt: skip
BPE = {"tokenizer": "bpe", "vocab_size": 1024}
LLAMA = {"recipe": "llama", "n_kv_head": 2, "mlp_width": 512}
RUNS: dict[str, dict[str, Any]] = {
    "GPT-2, bytes": {"bias": True, "tokenizer": "byte", "vocab_size": 256},
    "GPT-2 without biases, BPE": {"bias": False, **BPE},
    "Llama, BPE": {**LLAMA, "head_dim": 96, "rope_theta": 500_000.0, **BPE},
    "Qwen3, tied, BPE": {**LLAMA, "qk_norm": True, "tied_embeddings": True, **BPE},
}
HARD = [
    "", " ", "\n", "a", " a", "don't DON'T we'll", "1 12 123 1234 12345678", "x  =\t1\n\n\n    y", "naïve – 日本語 🙂🙂",
    "tail   ", "  \n  \n", "a\r\nb", "__init__(self, *args)", "ÀÉ ñandú Ω≈ç√", "\u00a0nbsp\u3000wide", "e\u0301", "мир №5",
]  # fmt: skip
_END = r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+" + _END


def logits_of(model: Any, idx: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return model.lm_head(model.hidden(idx)).numpy()


def theirs(path: Path) -> Any:
    return llama_cpp.Llama(
        str(path), n_ctx=CONTEXT, n_batch=CONTEXT, logits_all=True, verbose=False, n_threads=1, n_threads_batch=1,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
    )  # fmt: skip


def run_through(model: Any, rows: torch.Tensor) -> np.ndarray:
    found = []
    for row in rows.tolist():
        model.reset()
        model.eval(row)
        found.append(np.array(model.scores[: len(row)]))
    return np.stack(found)


def compared(found: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    return {
        "largest_difference": float(np.abs(found - expected).max()),
        "mean_difference": float(np.abs(found - expected).mean()),
        "same_best_token": float((found.argmax(-1) == expected.argmax(-1)).mean()),
    }


def texts() -> list[str]:
    source = Path(os.__file__).read_text("utf-8") + Path(json.__file__).read_text("utf-8")
    return [*HARD, *(source[at : at + 500] for at in range(0, 40_000, 500))]


def other_tokens(model: Any, words: Any, wanted: list[str]) -> list[str]:
    """Return the texts that llama.cpp tokenizes otherwise."""
    return [t for t in wanted if model.tokenize(t.encode(), add_bos=True) != list(words.encode(t.encode()))]


def of_run(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    out = name.replace(" ", "-").replace(",", "")
    foretrain.train("baby", **{**SMALL, **changes, "out_dir": out})
    record = RunDirectory(Path(out)).read_record()
    config, path = record.config, checkpoint.newest_valid(Path(out) / "checkpoints")[0]
    assert path is not None
    ours = make_model(config).eval()
    checkpoint.load_model(path, ours)
    tokens = TokenFile(record.dataset, "val", config.vocab_size)
    rows = torch.from_numpy(tokens.rows(np.array([0, 5_000, 10_000]), CONTEXT).astype(np.int64))
    expected = logits_of(ours, rows)
    words = tokenizer_of(record.dataset)
    made: dict[str, Any] = {"parameters": record.n_params, "logits_std": float(expected.std()), "types": {}}
    for kind in GGUF_TYPES:
        exported = foretrain.export(out, "gguf", f"{out}-gguf", gguf_type=kind, force=True)
        model = theirs(Path(exported.path) / f"model-{kind}.gguf")
        made["types"][kind] = compared(run_through(model, rows), expected)
        if kind == "f32":
            if config.recipe == "nanogpt":
                tanh = make_model(config).eval()
                checkpoint.load_model(path, tanh)
                for module in tanh.modules():
                    if isinstance(module, nn.GELU):
                        module.approximate = "tanh"
                made["f32_with_tanh_gelu"] = compared(run_through(model, rows), logits_of(tanh, rows))
            made["texts"] = len(texts())
            made["texts_with_other_tokens"] = other_tokens(model, words, texts())
            made["greedy_tokens_the_same"] = greedy(model, ours, rows[0, :32].tolist())
    made["types"]["Q4_K_M, of f16"] = compared(run_through(theirs(quantized(Path(f"{out}-gguf"))), rows), expected)
    return made


def greedy(model: Any, ours: Any, begin: list[int]) -> bool:
    """Return whether 64 tokens, each the most probable one, are the same; llama.cpp with its KV cache, ours without
    one.
    """
    left, right = list(begin), list(begin)
    model.reset()
    model.eval(left)
    for _ in range(64):
        left.append(int(model.scores[model.n_tokens - 1].argmax()))
        right.append(int(logits_of(ours, torch.tensor([right]))[0, -1].argmax()))
        model.eval(left[-1:])
    return left == right


def quantized(folder: Path) -> Path:
    """Return the file that `llama-quantize model-f16.gguf model-Q4_K_M.gguf Q4_K_M` makes."""
    wanted = llama_cpp.llama_model_quantize_default_params()
    wanted.ftype, wanted.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, 1
    made = folder / "model-Q4_K_M.gguf"
    with silenced():
        failed = llama_cpp.llama_model_quantize(str(folder / "model-f16.gguf").encode(), str(made).encode(), wanted)
    assert not failed
    return made


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    with llama_cpp._utils.suppress_stdout_stderr(disable=False):
        yield


def rule(cuts: list[Any], own: bool, whole_words: bool) -> Tokenizer:
    """Train a BPE on the standard library's source with another pre-tokenizer pattern."""
    made = Tokenizer(models.BPE(ignore_merges=whole_words))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own)
    made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, level])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator([Path(os.__file__).read_text("utf-8")], trainer)
    return made


def pieces() -> JsonTokenizer:
    """Train a BPE with byte fallback in which every way to make a token is a merge, as Llama 2's."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<unk>", "</s>", *single], show_progress=False, max_token_length=16
    )
    made.train_from_iterator(Path(os.__file__).read_text("utf-8").replace("\n", " \n ").split("\n"), trainer)
    document = json.loads(made.to_str())
    document["added_tokens"] = [each for each in document["added_tokens"] if each["content"] in ("<unk>", "</s>")]
    vocabulary = document["model"]["vocab"]
    inside = vocabulary.keys() - {"<unk>", "</s>", *single}
    document["model"]["merges"] = [
        [token[:at], token[at:]]
        for token in sorted(inside, key=vocabulary.get)
        for at in range(1, len(token))
        if inside.issuperset((token[:at], token[at:]))
    ]
    return JsonTokenizer(json.dumps(document))


def rules() -> dict[str, list[str]]:
    """Return {llama.cpp's name of a rule or of a kind of vocabulary: texts that it tokenizes otherwise}."""

    def split(pattern: str) -> Any:
        return pre_tokenizers.Split(Regex(pattern), "isolated")

    made = [
        rule([split(LLAMA3)], own=False, whole_words=True),
        rule([split(LLAMA3)], own=False, whole_words=False),
        rule([split(LLAMA3.replace("{1,3}", ""))], own=False, whole_words=False),
        rule([pre_tokenizers.Digits(individual_digits=True)], own=True, whole_words=False),
        rule([], own=True, whole_words=False),
    ]
    characters = CharTokenizer(dict(enumerate(sorted({*map(chr, range(32, 127)), "\n", "\t", "\r"}))))
    found = {}
    for words in [*(JsonTokenizer(each.to_str()) for each in made), pieces(), characters]:
        ends = None if words is characters else words.separator
        keys = keys_of(words, words.vocab_size, ends)
        assert keys is not None
        writer = gguf.GGUFWriter("vocabulary.gguf", "llama")
        adders = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        for key, value in keys.items():
            adders[type(value)](key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        model = llama_cpp.Llama("vocabulary.gguf", vocab_only=True, verbose=False)
        name = str(keys.get("tokenizer.ggml.pre", keys["tokenizer.ggml.model"]))
        found[name] = other_tokens(model, words, [t for t in texts() if words is not characters or t.isascii()])
    return found


def main() -> None:
    wanted = arguments("gguf_in_llama_cpp", __doc__ or "")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        found = {name: of_run(name, changes) for name, changes in RUNS.items()}
        other = rules()
    packages = {package: version(package) for package in ("llama_cpp_python", "gguf", "tokenizers")}
    report(wanted.out, {"packages": packages, "runs": found, "rules_with_other_tokens": other})


if __name__ == "__main__":
    main()
