"""What is fuzzed: each reader of foreign files with files that it reads well, to be changed.

A target is fed bytes, which it puts where its reader looks. It returns, or raises what says that the file was refused in
a sentence; everything else is a fault. Where a reader works in a process of its own with a cap on memory (a ckpt.pt, a
snapshot), what runs in that process is called here, as starting one takes longer than a hundred trials.
"""

import contextlib
import io
import json
import pickle
import struct
import unicodedata
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from foretrain.analysis import snapshot_file
from foretrain.base import oom_message, quantities
from foretrain.base.errors import UserError
from foretrain.config import nanogpt_checkpoint, weights_file
from foretrain.config.nanogpt_checkpoint import Refused
from foretrain.data.dataset import read_info
from foretrain.data.tokenizer import JsonTokenizer
from foretrain.runs.training_log import read_log
from tests.faults import grammar, inputs
from tests.kit import finetune_files
from tests.kit.command import REPO
from tests.kit.data import documents, write_shards
from tests.kit.runs import write_measured_run
from tests.kit.snapshots import recorded

CASES = REPO / "examples" / "real-cases"
CARD = "--gpu=RTX 4070"
MOST_BYTES = 1 << 20  # of a changed file; larger ones are the subject of payloads.py


class Fault(Exception):
    """What must not be; the text says what."""


class Target(NamedTuple):
    """A reader, the files that it is begun with, and the name of the place where it reads."""

    seeds: Callable[[], list[bytes]]
    read: Callable[[bytes], str]


SHELL = """A=2
NPROC_PER_NODE=$A swift sft --model Qwen/Qwen3-0.6B --tuner_type lora --lora_rank $((4 * $A)) \\
  --max_length=1024 --packing true --gradient_checkpointing_kwargs '{"use_reentrant": false}'
"""


def _sentence(error: BaseException) -> None:
    """An error is told in a text without control characters. Raises Fault."""
    text = str(error)
    bad = next((c for c in text if unicodedata.category(c) == "Cc" and c not in "\n\t"), None)
    if not text.strip() or bad is not None:
        raise Fault(f"{type(error).__name__} says {text[:200]!r}")


def by_command(*words: str, name: str, beside: tuple[str, str] | None = None) -> Callable[[bytes], str]:
    """The command line on a file of this name: one of its exit codes, no traceback, no control characters, JSON. Returns
    'accepted' or 'refused'. `beside`: the name and text of another file that it reads."""

    def read(data: bytes) -> str:
        if beside is not None:
            Path(beside[0]).write_text(beside[1], "utf-8")
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        case = inputs.Case("fuzzed", words, {}, ())
        fate, why = inputs.judged(case, *inputs.run(words))
        if fate not in inputs.FATES:
            raise Fault(f"{fate}: {why}")
        return fate

    return read


def by_function(read: Callable[[Path], object], *, name: str) -> Callable[[bytes], str]:
    """A function on a file of this name, which may raise UserError or Refused with a sentence; 'accepted' or 'refused'."""

    def work(data: bytes) -> str:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        try:
            read(path)
        except (UserError, Refused) as error:
            _sentence(error)
            return "refused"
        return "accepted"

    return work


# -- files that are read well ------------------------------------------------------------------------------------------


def _of(*paths: Path) -> Callable[[], list[bytes]]:
    return lambda: [path.read_bytes() for path in paths]


def _texts(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() for text in texts]


QUICK = ("nanogpt.py", "a.py", "b2.py", "d.py", "gpt2-30m.toml", "gpt2-40m.toml", "shakespeare-char.toml", "baby.toml")
SHORT = b"""\
preset = "baby"
dtype = "bfloat16"

[batch]
batch_size = 4
gradient_accumulation_steps = 10

[optimizer]
learning_rate = 1e-3
"""


def _configs(suffix: str) -> Callable[[], list[bytes]]:
    """Those of grammar.py whose plan takes less than half a second."""
    found = [text.encode() for name, text in grammar.seeds().items() if name in QUICK and name.endswith(suffix)]
    return lambda: [*found, SHORT] if suffix == ".toml" else found


def _trainers() -> list[bytes]:
    texts = (finetune_files.AXOLOTL, finetune_files.LLAMA_FACTORY)
    small = "HuggingFaceTB/SmolLM2-135M"
    return [text.replace("NousResearch/Llama-3.2-1B", small).replace("Qwen/Qwen3-4B", small).encode() for text in texts]


def _logs() -> list[bytes]:
    kept = [(CASES / "b1.log").read_bytes()[:6000], (REPO / "examples/logs/c-out-of-memory.log").read_bytes()[-6000:]]
    lines = [
        "iter 10: loss 2.5013, time 431.20ms, mfu 12.30%", "step 250: train loss 1.9, val loss 2.0",
        "{'loss': 2.2344, 'grad_norm': 17.139, 'learning_rate': 0.0, 'num_tokens': 51486.0, 'epoch': 0.06}",
        " 12%|█▎        | 2/16 [01:23<08:10, 35.06s/it]",
        "step    1/18865 | loss 10.9 (+nanz)| norm 15.3 (+nanz)| lr 8.57e-07 | 3056 ms | 42% bf16 MFU | 171535 tok/s",
        "[titan] 2026-01-01 00:00:00,000 - root - INFO - step: 10  loss:  7.9  memory: 40GiB(50%)  tps: 5,000  mfu: 40.1%",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 11.99 GiB of "
        "which 0 bytes is free. Of the allocated memory 10.5 GiB is allocated by PyTorch, and 1.2 GiB is reserved",
    ]  # fmt: skip
    return [*kept, *(f"{line}\n".encode() * 12 for line in lines), "\n".join(lines).encode()]


def _run_json(name: str) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        if not Path("seed-run").exists():
            write_measured_run(Path("seed-run"), steps=12)
        return [(Path("seed-run") / name).read_bytes()]

    return seeds


def _beside_run(name: str) -> Callable[[bytes], str]:
    """`explain` on a run's folder in which this file is changed."""
    reader = by_command("explain", "r", "--json", name=f"r/{name}")

    def read(data: bytes) -> str:
        for other in ("run.json", "metrics.jsonl"):
            if other != name:
                Path("r").mkdir(exist_ok=True)
                Path("r", other).write_bytes(_run_json(other)()[0])
        return reader(data)

    return read


MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}, "attention_bias": False, "head_dim": 64,
}  # fmt: skip
ARGUMENTS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 2e-4, "num_train_epochs": 3,
    "bf16": True, "gradient_checkpointing": True, "optim": "adamw_8bit", "max_length": 1024, "output_dir": "out",
    "model_name_or_path": "smollm2-135m", "use_peft": True, "lora_r": 16, "packing": True, "logging_steps": 10,
}  # fmt: skip
UNSLOTH = """\
from unsloth import FastLanguageModel
from trl import SFTTrainer, SFTConfig
model, tokenizer = FastLanguageModel.from_pretrained(model_name="HuggingFaceTB/SmolLM2-135M", max_seq_length=2048,
    load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, target_modules=["q_proj", "v_proj"], lora_alpha=16,
    use_gradient_checkpointing="unsloth")
trainer = SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=60))
"""
STATE = {
    "global_step": 40, "max_steps": 40, "log_history": [
        {"epoch": 0.1 * n, "step": n * 2, "loss": 2.5 - n / 20, "grad_norm": 1.2, "learning_rate": 1e-4} for n in range(1, 20)
    ],
}  # fmt: skip
TABLE = "step,loss,val_loss,_timestamp,lr\n" + "".join(f"{n},{3 - n / 50},,{1.7e9 + n},0.001\n" for n in range(40))
OTHER = "step,loss\n" + "".join(f"{n},{2.9 - n / 45}\n" for n in range(40))  # what a table is compared with
CARDS = """\
["My Card"]
aliases = ["Mine"]
architecture = "Ada"
compute_capability = "8.9"
sm_count = 46
boost_clock_ghz = 2.475
memory_gib = 12
bandwidth_gb_per_s = 504
bf16_dense_tflops = 58.3
fp16_dense_tflops = 58.3
fp32_tflops = 29.1
board_power_w = 200
"""


def _header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """The JSON of a safetensors file with float32 tensors."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        size = 4
        for length in shape:
            size *= length
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return json.dumps(entries).encode()


def _weights() -> list[bytes]:
    named = nanogpt_checkpoint.tensors_of(1, 8, 16, 4, False)
    text = _header(named)
    return [text, struct.pack("<Q", len(text)) + text]


def _read_weights(path: Path) -> object:
    """Bytes that begin with { are a header alone, which gets its length and the data that it speaks of."""
    data = path.read_bytes()
    if data.startswith(b"{"):
        path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(4096))
    return weights_file.inspect_weights(str(path))


def _pickles() -> list[bytes]:
    plain = {"vocab_size": 65, "itos": dict(enumerate("abcdef")), "stoi": {c: n for n, c in enumerate("abcdef")}}
    return [pickle.dumps(plain, protocol) for protocol in range(6)]


def _as_checkpoint(path: Path) -> object:
    """The bytes as the data.pkl of a ckpt.pt, as torch.save lays it out; bytes of a zip are the file itself."""
    data = path.read_bytes()
    if not data.startswith(b"PK"):
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("archive/data.pkl", data)
            file.writestr("archive/version", b"3\n")
            file.writestr("archive/data/0", bytes(64))
    try:
        return nanogpt_checkpoint.Checkpoint(str(path))
    except (
        zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, RecursionError, OSError, MemoryError,
    ) as error:  # fmt: skip
        return error  # what its main() makes a sentence of; memory has a cap there, which payloads.py tries


def _checkpoints() -> list[bytes]:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", pickle.dumps({"model": {}, "model_args": {"n_head": 1}, "iter_num": 1}, 2))
        file.writestr("archive/byteorder", b"little")
    text = b"\x80\x02}q\x00(X\x05\x00\x00\x00modelq\x01ccollections\nOrderedDict\nq\x02)Rq\x03X\x01\x00\x00\x00wq\x04"
    text += b"ctorch._utils\n_rebuild_tensor_v2\nq\x05((X\x07\x00\x00\x00storageq\x06ctorch\nFloatStorage\nq\x07X\x01\x00\x00\x000q"
    text += b"\x08X\x03\x00\x00\x00cpuq\tK\x10tq\nQK\x00K\x04K\x04\x86q\x0bK\x04K\x01\x86q\x0c\x89h\x02)Rq\rtq\x0eRq\x0fsX\n\x00\x00\x00"
    text += b"model_argsq\x10}q\x11X\x08\x00\x00\x00iter_numq\x12K\x05u."
    return [sink.getvalue(), text, *_pickles()]


def _snapshots() -> list[bytes]:
    return [pickle.dumps(recorded(), 4), (REPO / "examples/snapshots/fragmented.pickle").read_bytes()[:200_000]]


def _read_snapshot(path: Path) -> object:
    with contextlib.suppress(MemoryError):  # of the cap that its process has
        return json.dumps(snapshot_file.answer_of(str(path), path.name, -1))
    return None


def _datasets() -> list[bytes]:
    folder = write_shards(Path("seed-shards"), {"train": documents(20), "val": documents(9)})
    return [(folder / "dataset.json").read_bytes()]


def _mixtures() -> list[bytes]:
    _datasets()  # what it mixes
    return [b"[weights]\nseed-shards = 2\n"]


def _read_dataset(path: Path) -> object:
    for shard in Path("seed-shards").glob("*.bin"):
        (path.parent / shard.name).write_bytes(shard.read_bytes())
    return read_info(path.parent)


def _read_meta(path: Path) -> object:
    for split in ("train", "val"):
        (path.parent / f"{split}.bin").write_bytes(bytes(4096))
    return read_info(path.parent)


@cache
def _vocabulary() -> str:
    from foretrain.data.tokenizer import BpeTokenizer

    return BpeTokenizer.train([b"the river of the tower " * 9, b"a lemon and a stone " * 9], 280).text


def _read_tokenizer(path: Path) -> object:
    found = JsonTokenizer.load(path.parent)
    ids = found.encode("the river, ä 🙂\n".encode())
    return found.decode([*ids, found.separator]), found.encode_many(["a", ""])


def _read_log(path: Path) -> object:
    return read_log(path)


def _read_quantities(path: Path) -> object:
    """Each line by each parser of what is typed; a ValueError is what `read` makes a sentence of."""
    parsers = (
        quantities.parse_bytes, quantities.parse_rate, quantities.parse_seconds, quantities.parse_clock_ghz,
        quantities.parse_duration, quantities.parse_energy, quantities.parse_count, quantities.parse_money,
        quantities.parse_limit, quantities.parse_price, quantities.currency_code,
    )  # fmt: skip
    for line in path.read_bytes().decode("utf-8", "replace").splitlines()[:20]:
        for parse in parsers:
            with contextlib.suppress(ValueError):
                parse(line)
        oom_message.parse(line)
    return None


TARGETS: dict[str, Target] = {
    "config-toml": Target(_configs(".toml"), by_command("plan", "x.toml", CARD, "--json", name="x.toml")),
    "config-nanogpt": Target(_configs(".py"), by_command("plan", "x.py", CARD, "--json", name="x.py")),
    "axolotl": Target(_trainers, by_command("plan", "x.yaml", CARD, "--show-config", "--json", name="x.yaml")),
    "training-arguments": Target(
        _texts(json.dumps(ARGUMENTS)), by_command("plan", "x.json", CARD, "--json", name="x.json")
    ),
    "script": Target(_texts(UNSLOTH), by_command("plan", "s.py", CARD, "--json", name="s.py")),
    "shell": Target(_texts(SHELL), by_command("plan", "s.sh", CARD, "--json", name="s.sh")),
    "model-config": Target(
        _texts(json.dumps(MODEL)), by_command("plan", "m", "--method=lora", CARD, "--json", name="m/config.json")
    ),
    "cards": Target(
        _texts(CARDS), by_command("plan", "baby", "--gpu-file=cards.toml", "--gpu=My Card", "--json", name="cards.toml")
    ),
    "log": Target(_logs, by_function(_read_log, name="x.log")),
    "log-explained": Target(_logs, by_command("explain", "x.log", CARD, "--json", name="x.log")),
    "table": Target(_texts(TABLE), by_command("compare", "x.csv", "b.csv", "--json", name="x.csv", beside=("b.csv", OTHER))),
    "trainer-state": Target(
        _texts(json.dumps(STATE)), by_command("compare", "t.json", "b.csv", "--json", name="t.json", beside=("b.csv", OTHER))
    ),
    "run": Target(_run_json("run.json"), _beside_run("run.json")),
    "metrics": Target(_run_json("metrics.jsonl"), _beside_run("metrics.jsonl")),
    "weights": Target(_weights, by_function(_read_weights, name="w/model.safetensors")),
    "checkpoint": Target(_checkpoints, by_function(_as_checkpoint, name="c.pt")),
    "meta-pickle": Target(_pickles, by_function(_read_meta, name="p/meta.pkl")),
    "meta-json": Target(
        _texts('{"vocab_size": 65, "dtype": "uint16", "tokenizer": "byte"}'), by_function(_read_meta, name="j/meta.json")
    ),
    "dataset": Target(_datasets, by_function(_read_dataset, name="d/dataset.json")),
    "mixture": Target(
        _mixtures, by_command("data", "info", "mix.toml", "--json", name="mix.toml")
    ),
    "snapshot": Target(_snapshots, by_function(_read_snapshot, name="x.pickle")),
    "tokenizer": Target(lambda: [_vocabulary().encode()], by_function(_read_tokenizer, name="t/tokenizer.json")),
    "quantities": Target(
        _texts("8GB", "10GiB", "12h", "1d12h", "3kWh", "5EUR", "3.68B", "0.35/h", "$0.35/h", "90m", "1.2 TB", "6582MiB"),
        by_function(_read_quantities, name="q.txt"),
    ),
}  # fmt: skip


def feed(name: str, data: bytes) -> None:
    TARGETS[name].read(data[:MOST_BYTES])


def feeds() -> Iterator[str]:
    return iter(TARGETS)
