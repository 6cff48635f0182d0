"""Files that others hand over, made to do harm: each with the command that would read it.

A pickle that runs a program, a size that is not there, a bomb that unpacks without end, a name that leads out of its
folder. `lay` makes the file in the current folder; the words are those of the command line.
"""

import gzip
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.faults.hostile import CANARY
from tests.kit import bad_files

GPU = "--gpu=4070"
NESTED = "[" * 200_000 + "]" * 200_000
Bytes = bytes | Callable[[], bytes]  # large ones are made when they are laid


def _lists() -> bytes:
    """Just within 32 MiB; each three bytes are an object of 64."""
    return b"[" + b"[]," * 10_900_000 + b"[]]"


def _made(data: Bytes) -> bytes:
    return data() if callable(data) else data


class Payload(NamedTuple):
    """`kind`: what reads it; `refused`: it must end in a sentence instead of an answer."""

    kind: str
    name: str
    words: tuple[str, ...]
    lay: Callable[[], object]
    refused: bool = True


class Runs:
    """What a pickle of this object does when it is loaded."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {CANARY}",)


EVIL = pickle.dumps(Runs())
# Other ways to the same end: an old opcode, an instance, a state, an extension, a persistent id, two streams in one.
PICKLES: dict[str, Bytes] = {
    "reduce": EVIL, "global": f"cos\nsystem\n(S'touch {CANARY}'\ntR.".encode(), "instance": f"(S'touch {CANARY}'\nios\nsystem\n.".encode(),
    "object": f"(cos\nsystem\nS'touch {CANARY}'\no.".encode(), "builtins": f"cbuiltins\nexec\n(S'open(\"{CANARY}\",\"w\")'\ntR.".encode(),
    "getattr": f"cbuiltins\ngetattr\n(cos\nsystem\nS'__call__'\ntR(S'touch {CANARY}'\ntR.".encode(), "within a table": pickle.dumps({"vocab_size": 65, "itos": Runs()}),
    "persistent id": b"Pos.system\n.", "extension": b"\x80\x02\x82\x01.", "newobj": b"\x80\x02cos\nsystem\n)\x81.", "build": f"}}(S'a'\ncos\nsystem\nu0(S'touch {CANARY}'\ntR.".encode(),
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0c" + f"touch {CANARY}".encode() + b"\x85R.", "runpy": b"crunpy\n_run_code\n(S'1'\n}tR.",
    "torch": b"ctorch.serialization\nload\n(S'evil.pt'\ntR.", "memo bomb": b"\x80\x02}r\xff\xff\xff\x7f.", "lists": lambda: b"]" * (4 * 2**20 - 1) + b".", "tuples": lambda: b"(" * (2 * 2**20 - 1) + b"t" * (2 * 2**20 - 1) + b".",
    "billion laughs": b"\x80\x02" + b"]q\x00" + b"".join(b"](" + b"h%c" % i * 10 + b"eq%c" % (i + 1) for i in range(60)) + b".", "long": b"\x80\x02\x8b\xff\xff\xff\x7f" + b"1" * 100,
    "text": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fx.", "nothing": b"", "deep": lambda: b"(" * 900_000 + b".", "bytearray": b"\x80\x05\x96\xff\xff\xff\xff\x0f\x00\x00\x00.",
}  # fmt: skip


def _zip(names: dict[str, bytes], way: int = zipfile.ZIP_STORED) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", way) as file:
        for name, data in names.items():
            file.writestr(name, data)
    return sink.getvalue()


def _ckpt(data: bytes) -> bytes:
    return _zip({"archive/data.pkl": data, "archive/version": b"3\n", "archive/byteorder": b"little"})


def _write(name: str, data: Bytes) -> Callable[[], object]:
    def lay() -> None:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(_made(data))

    return lay


def _checkpoints() -> Iterator[Payload]:
    words = ("plan", "gpt2-124m", GPU, "--init_from=./x.pt")
    for name, data in PICKLES.items():
        yield Payload("ckpt.pt", name, words, _write("x.pt", lambda data=data: _ckpt(_made(data))))

    def bomb() -> bytes:
        return _zip({"archive/data.pkl": bytes(2**28), "archive/version": b"3\n"}, zipfile.ZIP_DEFLATED)

    for name, data in {
        "bare pickle": EVIL, "zip bomb": bomb, "two pickles": _zip({"a/data.pkl": EVIL, "b/data.pkl": EVIL}), "zip slip": _zip({f"../{CANARY}": b"x", "../../data.pkl": EVIL}),
        "script": _zip({"archive/data.pkl": pickle.dumps({}), "archive/code/x.py": b"open('canary','w')", "archive/constants.pkl": EVIL}), "tar": b"\0" * 257 + b"ustar" + bytes(4000),
        "end of a zip": b"PK\5\6" + b"\xff" * 18, "many entries": lambda: _zip({f"a/{i}": b"" for i in range(60_000)}),
    }.items():  # fmt: skip
        yield Payload("ckpt.pt", name, words, _write("x.pt", data))


def _header(text: bytes, length: int | None = None, rest: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + rest


def _safetensors() -> Iterator[Payload]:
    def entry(shape: list[Any], offsets: list[Any], dtype: str = "F32") -> bytes:
        return json.dumps(
            {"transformer.wte.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}
        ).encode()

    for name, data in {
        "header of 2^63": _header(b"{}", 2**63), "header of 500 MB": _header(b"{}", 500 * 2**20), "deep header": _header(NESTED.encode()), "huge shape": _header(entry([10**30, 10**30], [0, 8])),
        "negative shape": _header(entry([-1, 4], [0, 16]), rest=bytes(16)), "offsets beyond": _header(entry([2, 2], [0, 2**62])), "overlap": _header(entry([2, 2], [16, 0]), rest=bytes(16)), "pickle": EVIL,
        "number of digits": _header(b'{"a": {"shape": [' + b"9" * 100_000 + b']}}'), "list": _header(b"[1, 2]"), "many": lambda: _header(b'{"a":{"shape":[]},' * 200_000), "NaN": _header(entry([float("nan")], [0, 4])),
        "empty": b"", "lists": lambda: _header(b'{"a":[' + b"[]," * 5_000_000 + b"[]]}"),
    }.items():  # fmt: skip
        yield Payload(
            "safetensors",
            name,
            ("plan", "gpt2-124m", GPU, "--init_from=./x.safetensors"),
            _write("x.safetensors", data),
        )
    good = _header(entry([2, 2], [0, 16]), rest=bytes(16))
    for name, files in {
        "index that leads out": {"model.safetensors.index.json": json.dumps({"weight_map": {"a": "../../secret.txt", "b": "/etc/passwd"}}).encode()},
        "config of a deep kind": {"model.safetensors": good, "config.json": NESTED.encode()}, "heads beyond": {"model.safetensors": good, "config.json": b'{"n_head": 1e400, "n_embd": NaN}'},
        "index of lists": {"model.safetensors.index.json": lambda: b'{"weight_map": [' + b"[]," * 5_000_000 + b"[]]}"}, "pytorch_model.bin": {"pytorch_model.bin": EVIL},
    }.items():  # fmt: skip
        yield Payload(
            "model folder",
            name,
            ("plan", "gpt2-124m", GPU, "--init_from=./m"),
            lambda files=files: [_write(f"m/{n}", d)() for n, d in files.items()],
        )


def _tokens(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        np.zeros(5000, np.uint16).tofile(f"{folder}/{split}.bin")


def _datasets() -> Iterator[Payload]:
    words = ("train", "baby", "--dataset=d", "--device=cpu", "--vocab_size=256")

    def beside(name: str, data: Bytes) -> Callable[[], object]:
        def lay() -> None:
            _tokens("d")
            Path(f"d/{name}").write_bytes(_made(data))

        return lay

    for name, data in PICKLES.items():
        yield Payload("meta.pkl", name, words, beside("meta.pkl", data))
    texts = {
        "deep": NESTED.encode(), "lists": _lists, "100 MB": lambda: b" " * (100 * 2**20), "huge number": b'{"vocab_size": 1' + b"0" * 4000 + b"}", "digits": b'{"vocab_size": ' + b"9" * 100_000 + b"}",
        "path": b'{"vocab_size": 10, "dtype": "../../x"}', "NaN": b'{"vocab_size": NaN}', "surrogate": b'{"tokenizer": "\\ud800", "vocab_size": 5}', "utf-16": '{"vocab_size": 9}'.encode("utf-16"),
    }  # fmt: skip
    for name, data in texts.items():
        yield Payload("meta.json", name, words, beside("meta.json", data), refused=name != "surrogate")
        yield Payload("dataset.json", name, words, _write("d/dataset.json", data))
    for name, data in {
        "names that lead out": b'[weights]\n"../../../etc" = 1\n"/etc" = 1\n', "itself": b'[weights]\n"mix.toml" = 1\n', "dots": b"weights." + b"a." * 30_000 + b"a = 1", "deep": b"[weights]\na = " + NESTED.encode(),
        "infinity": b"[weights]\nd = inf\n", "parts": b"[weights]\n" + b"".join(b"d%d = 1\n" % i for i in range(60_000)), "dots by line": b"[weights]\n" + b"".join(b"a" + b".a" * 90 + b"%d = 1\n" % i for i in range(3000)),
    }.items():  # fmt: skip
        yield Payload("mix.toml", name, ("data", "info", "mix.toml"), _write("mix.toml", data))
    for name, data in {
        "npy of objects": b"\x93NUMPY\1\0v\0" + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n" + EVIL, "npy of code": b"\x93NUMPY\1\0v\0" + f"__import__('os').system('touch {CANARY}')".encode().ljust(117) + b"\n",
        "npy of a huge shape": b"\x93NUMPY\1\0v\0" + b"{'descr': '<u2', 'fortran_order': False, 'shape': (9999999999999999,), }".ljust(117) + b"\n", "npy of a huge header": b"\x93NUMPY\2\0\xff\xff\xff\x7f" + b"{" * 100,
    }.items():  # fmt: skip
        yield Payload(
            "npy shard",
            name,
            ("data", "info", "d"),
            lambda data=data: [_write(f"d/{s}_000000.npy", data)() for s in ("train", "val")],
        )
    for name, head in {
        "of a huge count": struct.pack("<3i", 20240520, 1, 2**31 - 1),
        "of a negative count": struct.pack("<3i", 20240520, 1, -5),
        "of no version": struct.pack("<3i", 20240520, 99, 5),
    }.items():
        data = head + bytes(1012) + bytes(100)
        yield Payload(
            "llm.c shard",
            name,
            ("data", "info", "d"),
            lambda data=data: [_write(f"d/{s}_000000.bin", data)() for s in ("train", "val")],
        )
    yield Payload(
        "endless shard",
        "sparse",
        ("data", "info", "d", "--json"),
        lambda: [_tokens("d"), os.truncate("d/train.bin", 2**43)],
        refused=False,
    )
    yield Payload("odd shard", "odd", words, lambda: [_tokens("d"), os.truncate("d/train.bin", 4999)])


def _sources() -> Iterator[Payload]:
    for name, data in (("bomb.parquet", bad_files.bomb), ("page.parquet", bad_files.huge_page), ("pickled.parquet", b"PAR1" + EVIL + struct.pack("<I", len(EVIL)) + b"PAR1"), ("deep.jsonl", b'{"text": ' + NESTED.encode() + b"}\n"),
                       ("bomb.txt.gz", lambda: gzip.compress(bytes(2**28), 9)), ("bomb.jsonl.gz", lambda: gzip.compress(b" " * 2**28, 9)), ("pickle.jsonl", EVIL), ("lists.jsonl", lambda: b'{"text": "a", "x": [' + b"[]," * 4_000_000 + b"[]]}\n"), ("zip.txt", _zip({"../x": b"a"}))):  # fmt: skip
        yield Payload(
            "prepare",
            name,
            ("prepare", name, "--out", "o", "--tokenizer=byte", "--workers=1"),
            _write(name, data),
            refused=name != "lists.jsonl",
        )
    for name, text in {
        "deep": NESTED.encode(), "regex": b'{"version":"1.0","added_tokens":[],"pre_tokenizer":{"type":"Split","pattern":{"Regex":"(a+)+$"},"behavior":"Isolated","invert":false},"model":{"type":"BPE","vocab":{},"merges":[]}}',
        "huge id": b'{"version":"1.0","model":{"type":"WordLevel","vocab":{"</s>":4294967295},"unk_token":"</s>"}}', "lists": _lists, "beyond 32 MiB": lambda: b" " * (33 * 2**20), "pickle": EVIL,
    }.items():  # fmt: skip
        yield Payload(
            "tokenizer.json",
            name,
            ("prepare", "a.txt", "--out", "o", "--tokenizer=./t/tokenizer.json", "--workers=1"),
            lambda text=text: [_write("a.txt", b"aaaa " * 200)(), _write("t/tokenizer.json", text)()],
            refused=name != "huge id",
        )


def _records() -> Iterator[Payload]:
    """Runs, logs, exports, plans, snapshots and caches of somebody else."""
    for name, data in PICKLES.items():
        yield Payload("snapshot", name, ("explain", "x.pickle"), _write("x.pickle", data))

    def wide() -> bytes:
        return b"[{" + b",".join(b'"k%d":1' % i for i in range(1900)) + b"}" + b",{}" * 3_000_000 + b"]"

    for name, data in {
        "wide.json": wide, "deep.json": NESTED.encode(), "lists.json": _lists, "huge.json": b'[{"step": 1e999, "loss": 9' + b"9" * 4000 + b"}]", "formula.csv": b'step,loss\n=cmd|"/C calc"!A0,1\n', "columns.csv": lambda: b"a," * 3_000_000 + b"\n",
        "rows.csv": lambda: b"step\n" + b"1\n" * 30_000_000, "quote.csv": lambda: b'step,loss\n"' + b"a" * (20 * 2**20), "nul.csv": b"step,loss\n\0,1\n", "escape.csv": b"step,lo\x1b[2Jss\n1,2\n2,3\n", "records.jsonl": lambda: b'{"step":1,"loss":2}\n' * 1_500_000, "pickle.csv": EVIL,
    }.items():  # fmt: skip
        yield Payload(
            "export",
            name,
            ("compare", name, name, GPU),
            _write(name, data),
            refused=name not in ("escape.csv", "formula.csv", "huge.json"),
        )
    line = b"iter 10: loss 2.0000, time 100.00ms, mfu 1.00%\n"
    for name, data in {
        "one line": lambda: b"step 1/" + b"9" * (20 * 2**20), "spaces": lambda: b"step" + b" " * (8 * 2**20) + b"1", "escapes": lambda: b"\x1b[" * 4_000_000, "numbers": lambda: b"iter 1: loss " + b"1,1" * 2_000_000, "steps": lambda: line * 300_000, "pickle": EVIL,
        "control": line.replace(b"loss", b"\x1b]0;x\x07loss") * 20, "huge numbers": b"iter 999999999999: loss 1e999, time 1e300ms\n" * 50,
    }.items():  # fmt: skip
        yield Payload(
            "log",
            name,
            ("explain", "x.log"),
            _write("x.log", data),
            refused=name not in ("steps", "control", "huge numbers"),
        )
    for name, data in {
        "deep": NESTED.encode(),
        "lists": lambda: b'{"schema":"foretrain.plan/1","x":[' + b"[]," * 10_000_000 + b"[]]}",
        "pickle": EVIL,
        "NaN": b'{"schema": "foretrain.plan/1", "name": NaN}',
        "digits": b'{"schema": ' + b"9" * 100_000 + b"}",
    }.items():
        yield Payload("plan.json", name, ("compare", "plan.json", "plan.json"), _write("plan.json", data))
        for verb in ("report", "explain", "compare"):
            yield Payload(f"run.json by {verb}", name, (verb, "r"), _write("r/run.json", data))
    yield Payload("run.json", "pipe", ("report", "r"), lambda: [Path("r").mkdir(), os.mkfifo("r/run.json")])
    yield Payload(
        "run.json", "endless", ("report", "r"), lambda: [_write("r/run.json", b"{")(), os.truncate("r/run.json", 2**40)]
    )
    yield Payload(
        "run.json of a watched command", "lists", ("report", "r"),
        _write("r/run.json", lambda: b'{"source": "watched", "cards": ' + _lists() + b"}"),
    )  # fmt: skip
    for name, data in {"bomb": lambda: gzip.compress(bytes(2**28), 9), "deep": NESTED.encode(), "pickle": EVIL}.items():
        yield Payload("caches", name, ("plan", "baby", "--gpu=cpu"), lambda data=data: _poison(data), refused=False)


def _poison(data: Bytes) -> None:
    """Under every name that the cache of this folder's plan is looked for, as `plan` tells them when it asks."""
    from foretrain.hardware import calibration
    from foretrain.hardware.cpu import cpu_device

    for path in (calibration.path_of(cpu_device().name, ""), calibration.tuned_path(cpu_device().name, "")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_made(data))


def _trained() -> Iterator[Payload]:
    """A run's folder that somebody hands over, with a checkpoint that is not what it says."""

    def run(change: Callable[[Path], object]) -> Callable[[], object]:
        def lay() -> None:
            shutil.copytree("../whole-run", "r")
            change(next(iter(sorted(Path("r/checkpoints").glob("step-*")))))

        return lay

    def manifest(at: Path, **changes: Any) -> None:
        held = json.loads((at / "manifest.json").read_text())
        held["files"] |= changes
        (at / "manifest.json").write_text(json.dumps(held, indent=1))

    out = {"size_bytes": 5, "sha256": "0" * 64}
    for name, change in {
        "pickled weights": lambda at: (at / "model.safetensors").write_bytes(EVIL), "header of 2^63": lambda at: (at / "model.safetensors").write_bytes(_header(b"{}", 2**63)), "a name that leads out": lambda at: manifest(at, **{"../../../secret.txt": out}),
        "deep manifest": lambda at: (at / "manifest.json").write_text(NESTED), "deep state": lambda at: (at / "state.json").write_text(NESTED), "lists": lambda at: (at / "manifest.json").write_bytes(_lists()),
        "link": lambda at: [(at / "model.safetensors").unlink(), (at / "model.safetensors").symlink_to("/dev/zero")], "pipe": lambda at: [(at / "manifest.json").unlink(), os.mkfifo(at / "manifest.json")],
    }.items():  # fmt: skip
        for verb in (("sample", "r", "--tokens=1"), ("export", "r", "--to=safetensors", "--out=e")):
            yield Payload(f"checkpoint by {verb[0]}", name, verb, run(change))


def payloads() -> list[Payload]:
    return [*_checkpoints(), *_safetensors(), *_datasets(), *_sources(), *_records(), *_trained()]
