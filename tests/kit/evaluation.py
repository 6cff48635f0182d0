"""Small runs over a dataset whose tokenizer is known, and tasks of lm-eval's that need no network."""

import json
import pickle
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from foretrain.config.options import RunConfig
from foretrain.config.resolve import from_values
from foretrain.data.tokenizer import BpeTokenizer, CharTokenizer, Tokenizer
from tests.kit.prepare import bpe_text, stdlib_texts
from tests.kit.tiny import TINY
from tests.kit.training import train

# With letters of two and more bytes, so that tokens end inside of them.
TEXT = "Grüße aus Köln 🙂. " + "".join(stdlib_texts(20))[:1500] + "\n日本語 naïve\n"


@cache
def bpe() -> BpeTokenizer:
    return BpeTokenizer(bpe_text())


def characters() -> CharTokenizer:
    return CharTokenizer(dict(enumerate(sorted(set(TEXT)))))


def write_tokenized(folder: Path, words: Tokenizer, documents: tuple[str, ...] = (TEXT,) * 4) -> Path:
    """A dataset in nanoGPT's layout with its tokenizer: documents with what separates them, where anything does."""
    folder.mkdir(parents=True)
    ends = [] if isinstance(words, CharTokenizer) else [words.separator]
    ids = [id for document in documents for id in [*words.encode(document.encode()), *ends]]
    for split, part in (("train", ids), ("val", ids[: len(ids) // 2])):
        np.array(part, dtype=np.uint16).tofile(folder / f"{split}.bin")
    meta: dict[str, Any] = {"dtype": "uint16", "vocab_size": words.vocab_size}
    if isinstance(words, CharTokenizer):
        itos = {id: character for character, id in words.ids.items()}
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": words.vocab_size, "itos": itos}))
        return folder
    (folder / "meta.json").write_text(json.dumps({**meta, "tokenizer": words.name}))
    words.save(folder)
    return folder


def config_of(recipe: str = "nanogpt", **changes: Any) -> RunConfig:
    """Of a run that learns in a second, and knows more than chance."""
    values = {key: value for key, value in TINY.items() if key not in ("learning_rate", "min_lr")}
    return from_values(
        {**values, "recipe": recipe, "vocab_size": bpe().vocab_size, "block_size": 32, "n_embd": 32, **changes}
    ).config


_TRAINED: dict[tuple[str, str], tempfile.TemporaryDirectory[str]] = {}  # each kind is trained once in a process


def trained(recipe: str = "nanogpt", words: Tokenizer | None = None) -> Path:
    """The run, in the folder `out` of the working directory, and its data."""
    words = words or bpe()
    if (recipe, words.name) not in _TRAINED:
        write_tokenized(Path("data/toy"), words)
        train(config_of(recipe, out_dir="out", vocab_size=words.vocab_size))
        kept = _TRAINED[recipe, words.name] = tempfile.TemporaryDirectory(prefix="foretrain-test-")
        for name in ("out", "data"):
            shutil.copytree(name, Path(kept.name) / name)
    else:
        shutil.copytree(_TRAINED[recipe, words.name].name, ".", dirs_exist_ok=True)
    return Path("out")


QUESTIONS = [
    {"question": "The import statement", "choices": [" of a module", " of a fish", " of 12"], "answer": 0},
    {"question": "class Error", "choices": ["(Exception):", " swims", " x"], "answer": 0},
    {"question": "return", "choices": [" None", " banana banana banana", "self."], "answer": 2},
    {"question": "def __init__(self", "choices": ["):", "}}}"], "answer": 0},
    {"question": "", "choices": ["import os", "zzzz"], "answer": 0},
]  # fmt: skip


def write_tasks(folder: Path) -> Path:
    """Three tasks over a file: choices, the likelihood of whole texts, and written answers."""
    folder.mkdir()
    data = folder / "questions.json"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    head = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data.absolute()}\ntest_split: test\nnum_fewshot: 0\nmetadata:\n  version: 1.0\n"
    (folder / "choices.yaml").write_text(
        f'task: own_choices\n{head}output_type: multiple_choice\ndoc_to_text: "{{{{question}}}}"\n'
        'doc_to_target: answer\ndoc_to_choice: "{{choices}}"\n'
        "metric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    (folder / "rolling.yaml").write_text(
        f'task: own_rolling\n{head}output_type: loglikelihood_rolling\ndoc_to_text: ""\n'
        'doc_to_target: "{{question}} {{choices[0]}} and then something longer than the context of a tiny model, to be cut"\n'
        "metric_list:\n  - metric: word_perplexity\n  - metric: byte_perplexity\n  - metric: bits_per_byte\n"
    )
    (folder / "written.yaml").write_text(
        f'task: own_written\n{head}output_type: generate_until\ndoc_to_text: "def f(): {{{{question}}}}"\n'
        'doc_to_target: "{{choices[0]}}"\ngeneration_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 8\n'
        "metric_list:\n  - metric: exact_match\n    aggregation: mean\n    higher_is_better: true\n"
    )
    return folder
