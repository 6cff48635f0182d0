"""Reads nanoGPT's `ckpt.pt` (karpathy/nanoGPT train.py) as plain data, in a process of its own with a memory cap:
python -P -m foretrain.config.nanogpt_checkpoint CKPT [FOLDER]  # one JSON object, the tensors in FOLDER"""

import errno
import gc
import json
import math
import os
import re
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from foretrain.base import files, processes

MAX_PICKLE_BYTES = 16 * 2**20  # GPT-2 XL with its optimizer has 0.4 MB
_CHUNK_BYTES = 1 << 20
MOMENTS = ("exp_avg", "exp_avg_sq")

# Tensors of a block in units of the width C: (out, in), and () for a LayerNorm's vector.
BLOCK = {
    "ln_1": (), "attn.c_attn": (3, 1), "attn.c_proj": (1, 1), "ln_2": (), "mlp.c_fc": (4, 1), "mlp.c_proj": (1, 4),
}  # fmt: skip
_MASK = re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias")  # buffers of older versions, not weights


class Refused(Exception):
    """The file is not what nanoGPT writes; the text says why, as the end of a sentence."""


# -- names and shapes ----------------------------------------------------------------------------------------


def tensors_of(layers: int, C: int, V: int, T: int, bias: bool, *, conv1d: bool = False) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of a GPT-2 in nanoGPT's order, the tied head left out. `conv1d`: matrices are in x out."""
    found: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (V, C), "transformer.wpe.weight": (T, C)}
    for layer in range(layers):
        for name, units in BLOCK.items():
            shape = tuple(unit * C for unit in units) or (C,)
            found[f"transformer.h.{layer}.{name}.weight"] = shape[::-1] if conv1d else shape
            if bias:
                found[f"transformer.h.{layer}.{name}.bias"] = shape[:1]
    found["transformer.ln_f.weight"] = (C,)
    if bias:
        found["transformer.ln_f.bias"] = (C,)
    return found


def shape_of(shapes: dict[str, tuple[int, ...]], *, conv1d: bool = False) -> dict[str, Any]:
    """Return n_layer, n_embd, vocab_size, block_size and bias of a GPT-2 with nanoGPT's names. Raises Refused."""
    shapes = {name: shape for name, shape in shapes.items() if name != "lm_head.weight" and not _MASK.fullmatch(name)}
    for name in ("transformer.wte.weight", "transformer.wpe.weight"):
        if len(shapes.get(name, ())) != 2:
            raise Refused(f"it has no matrix {name}")
    (V, C), (T, width) = shapes["transformer.wte.weight"], shapes["transformer.wpe.weight"]
    layers = sum(re.fullmatch(r"transformer\.h\.\d+\.ln_1\.weight", name) is not None for name in shapes)
    bias = "transformer.ln_f.bias" in shapes
    wanted = tensors_of(layers, C, V, T, bias, conv1d=conv1d)
    if not layers or width != C or min(V, C, T) < 1:
        raise Refused(f"it has {layers} blocks, embeddings of {V} x {C} and positions of {T} x {width}")
    for name in [*wanted, *shapes]:
        if name not in shapes:
            raise Refused(f"it lacks {name[:80]}")
        if name not in wanted:
            raise Refused(f"it has {name[:80]}, which GPT-2 as nanoGPT builds it has not")
        if shapes[name] != wanted[name]:
            raise Refused(f"{name} is {_x(shapes[name])} instead of {_x(wanted[name])}")
    return {"n_layer": layers, "n_embd": C, "vocab_size": V, "block_size": T, "bias": bias}


def _x(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a number"


# -- the pickle ----------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A storage's number format: its name in safetensors, and bytes a number."""

    name: str
    item_bytes: int


KINDS = {
    "FloatStorage": Kind("F32", 4), "HalfStorage": Kind("F16", 2), "BFloat16Storage": Kind("BF16", 2),
    "DoubleStorage": Kind("F64", 8), "LongStorage": Kind("I64", 8), "IntStorage": Kind("I32", 4),
    "BoolStorage": Kind("BOOL", 1),
}  # fmt: skip
_FLOATS = {"F32": "<f", "F64": "<d", "F16": "<e"}


class Storage(NamedTuple):
    kind: Kind
    key: str
    numel: int


class Tensor(NamedTuple):
    storage: Storage
    offset: int
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.storage.kind.item_bytes


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
    """Stand for torch._utils._rebuild_tensor_v2."""
    numbers = [offset, *shape, *stride]
    if not isinstance(storage, Storage) or any(type(n) is not int or n < 0 for n in numbers) or len(shape) > 4:
        raise Refused("a tensor in it is described in an unknown way")
    expected = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and step != expected:
            raise Refused("a tensor in it is a view that is not contiguous")
        expected *= length
    if offset + math.prod(shape) > storage.numel:
        raise Refused("a tensor in it reaches beyond its storage")
    return Tensor(storage, offset, tuple(shape))


def _storage(pid: Any) -> Storage:
    if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], Kind)):
        raise Refused("a tensor in it has no storage")
    _, kind, key, _, count = pid
    if not (isinstance(key, str) and re.fullmatch(r"\d{1,9}", key)) or type(count) is not int or count < 0:
        raise Refused("a storage in it is described in an unknown way")
    return Storage(kind, key, count)


_NAMES = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    **{("torch", name): kind for name, kind in KINDS.items()},
}


# -- the file ------------------------------------------------------------------------------------------------


class Checkpoint:
    def __init__(self, path: str) -> None:
        if not zipfile.is_zipfile(path):
            raise Refused("it is no zip, as torch.save writes since 1.6; load and save it again with a newer torch")
        self.size_bytes = os.path.getsize(path)  # noqa: PTH202
        self.zip = zipfile.ZipFile(path)
        pickles = [name for name in self.zip.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise Refused("it has no data.pkl: it was not written by torch.save")
        self.prefix = pickles[0].removesuffix("data.pkl")
        order = self._member("byteorder", 16) if f"{self.prefix}byteorder" in self.zip.namelist() else b"little"
        if order != b"little":
            raise Refused("it was written on a big-endian machine")
        held = self._unpickled()
        self.model, self.n_head, dropped = self._model(held)
        self.optimizer = held.get("optimizer")
        self.iter_num = _whole(held.get("iter_num"), "iter_num")
        self.best_val_loss = self._number(held.get("best_val_loss"))
        self.masks = dropped

    def _unpickled(self) -> dict[Any, Any]:
        try:
            held = files.load_pickle(self._member("data.pkl", MAX_PICKLE_BYTES), _NAMES, _storage)
        except files.ForbiddenName as error:
            raise Refused(f"it asks for {error}, which is neither a tensor nor a number, text or table") from None
        except (Refused, MemoryError):
            raise
        except Exception as error:  # a hostile stream can raise nearly anything
            raise Refused(f"its data.pkl cannot be read ({type(error).__name__})") from None
        for key in ("model", "model_args", "iter_num"):
            if not isinstance(held, dict) or key not in held:
                raise Refused(f"it has no {key}: it is not a checkpoint of nanoGPT's train.py")
        return held

    def _model(self, held: dict[Any, Any]) -> tuple[dict[str, Tensor], int, int]:
        """Return (weights by name, n_head, attention masks left out); check names, shapes and model_args."""
        named, args = held["model"], held["model_args"]
        if not isinstance(named, dict) or not isinstance(args, dict):
            raise Refused("its model and model_args are not tables")
        if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in named.items()):
            raise Refused("its model holds something that is not a tensor")
        found = {name.removeprefix("_orig_mod."): tensor for name, tensor in named.items()}  # torch.compile's prefix
        self.shape = shape_of({name: tensor.shape for name, tensor in found.items()})
        n_head = _whole(args.get("n_head"), "model_args n_head")
        if n_head < 1 or self.shape["n_embd"] % n_head:
            raise Refused(f"{n_head} heads do not divide its width of {self.shape['n_embd']}")
        for key, value in self.shape.items():
            if key in args and args[key] != value:
                shown = args[key] if isinstance(args[key], int) else f"a {type(args[key]).__name__}"
                raise Refused(f"its model_args say {key} = {shown}, its tensors {value}")
        head = found.pop("lm_head.weight", None)
        embedding = found["transformer.wte.weight"]
        if head is not None and head != embedding and not self._same(head, embedding):
            raise Refused("its lm_head is another matrix than its embedding; here, as in nanoGPT, they are one")
        masks = [name for name in found if _MASK.fullmatch(name)]
        weights = {name: tensor for name, tensor in found.items() if name not in masks}
        if wrong := [name for name, tensor in weights.items() if tensor.storage.kind.name not in (*_FLOATS, "BF16")]:
            raise Refused(f"{wrong[0]} does not hold fractions")
        return weights, n_head, len(masks)

    def moments(self) -> dict[str, tuple[float, Tensor, Tensor]]:
        """Return {name: (step, exp_avg, exp_avg_sq)} by the optimizer's two groups; empty before the first step."""
        try:
            states, groups = self.optimizer["state"], self.optimizer["param_groups"]  # type: ignore[index]
            listed = [list(group["params"]) for group in groups]
        except (TypeError, KeyError, AttributeError):
            raise Refused("it has no optimizer state") from None
        matrices = [name for name in self._ordered() if len(self.model[name].shape) >= 2]
        vectors = [name for name in self._ordered() if len(self.model[name].shape) < 2]
        numbers = list(range(len(matrices) + len(vectors)))
        if listed != [numbers[: len(matrices)], numbers[len(matrices) :]] or not isinstance(states, dict):
            raise Refused("its optimizer has other groups than nanoGPT's two (matrices and embeddings; the others)")
        found = {}
        for number, name in enumerate([*matrices, *vectors] if states else []):
            state = states.get(number)
            if not isinstance(state, dict) or set(state) != {"step", *MOMENTS}:
                raise Refused(f"its optimizer has no plain AdamW state for {name}")
            first, second = (state[key] for key in MOMENTS)
            for moment in (first, second):
                if not isinstance(moment, Tensor) or moment.shape != self.model[name].shape:
                    raise Refused(f"a moment of {name} is of another shape")
            step = self._number(state["step"])
            if step is None or not 0 <= step < 2**24:
                raise Refused(f"the step count of {name} is no whole number")
            found[name] = (step, first, second)
        return found

    def _ordered(self) -> list[str]:
        s = self.shape
        return list(tensors_of(s["n_layer"], s["n_embd"], s["vocab_size"], s["block_size"], s["bias"]))

    # -- bytes of members --

    def _info(self, member: str) -> zipfile.ZipInfo:
        try:
            info = self.zip.getinfo(self.prefix + member)
        except KeyError:
            raise Refused(f"it has no {member}: it is cut short or damaged") from None
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > self.size_bytes:
            raise Refused("it is compressed, which torch.save never does")
        return info

    def _member(self, name: str, limit: int) -> bytes:
        info = self._info(name)
        if info.file_size > limit:
            raise Refused(f"its {name} has {info.file_size:,} bytes, more than any nanoGPT needs")
        return self.zip.read(info)

    def chunks(self, tensor: Tensor) -> Iterator[bytes]:
        info = self._info(f"data/{tensor.storage.key}")
        item = tensor.storage.kind.item_bytes
        if info.file_size != tensor.storage.numel * item:
            raise Refused(f"its data/{tensor.storage.key} has {info.file_size:,} bytes: it is cut short or damaged")
        with self.zip.open(info) as file:
            _skip(file, tensor.offset * item)
            left = tensor.size_bytes
            while left:
                piece = file.read(min(left, _CHUNK_BYTES))
                if not piece:
                    raise Refused("it is cut short")
                left -= len(piece)
                yield piece

    def _same(self, a: Tensor, b: Tensor) -> bool:
        same_form = a.shape == b.shape and a.storage.kind == b.storage.kind
        return same_form and all(x == y for x, y in zip(self.chunks(a), self.chunks(b), strict=True))

    def _number(self, value: Any) -> float | None:
        if isinstance(value, Tensor) and math.prod(value.shape) == 1 and value.storage.kind.name in _FLOATS:
            value = struct.unpack(_FLOATS[value.storage.kind.name], b"".join(self.chunks(value)))[0]
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
            return None
        return float(value)


def _whole(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise Refused(f"its {what} is no whole number")
    return value


def _skip(file: IO[bytes], count: int) -> None:
    if count:
        file.seek(count, os.SEEK_CUR)


# -- safetensors ---------------------------------------------------------------------------------------------


def _write(path: str, tensors: dict[str, tuple[str, tuple[int, ...], int, Iterator[bytes]]]) -> None:
    """Write a safetensors file of {name: (dtype, shape, size, bytes)}: header length, header as JSON, bytes."""
    header, end = {}, 0
    for name, (dtype, shape, size, _) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:  # noqa: PTH123
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, _, pieces in tensors.values():
            for piece in pieces:
                file.write(piece)


def convert(held: Checkpoint, folder: str, *, moments: bool) -> None:
    def entry(tensor: Tensor) -> tuple[str, tuple[int, ...], int, Iterator[bytes]]:
        return tensor.storage.kind.name, tensor.shape, tensor.size_bytes, held.chunks(tensor)

    weights = {name: entry(tensor) for name, tensor in held.model.items()}
    optimizer = {}
    for name, (step, first, second) in (held.moments() if moments else {}).items():
        optimizer[f"exp_avg/{name}"], optimizer[f"exp_avg_sq/{name}"] = entry(first), entry(second)
        optimizer[f"step/{name}"] = ("F32", (), 4, iter([struct.pack("<f", step)]))
    if sum(size for part in (weights, optimizer) for _, _, size, _ in part.values()) > held.size_bytes:
        raise Refused("its tensors share their bytes, so that it would grow when written out")
    _write(f"{folder}/model.safetensors", weights)
    if moments:
        _write(f"{folder}/optimizer.safetensors", optimizer)


def limit_memory(file_bytes: int) -> None:
    """Limit address space to Python itself and the objects of a pickle as large as this file's can be."""
    pickle_bytes = min(file_bytes, MAX_PICKLE_BYTES)
    processes.limit(memory_bytes=256 * 2**20 + 32 * pickle_bytes, file_bytes=2 * file_bytes + MAX_PICKLE_BYTES)


def main(path: str, folder: str = "", moments: str = "") -> dict[str, Any]:
    """Return what the module's docstring says; {"problem": …} or {"errno": …} where the file cannot be used."""
    try:
        limit_memory(os.path.getsize(path))  # noqa: PTH202
        held = Checkpoint(path)
        if folder:
            convert(held, folder, moments=bool(moments))
        states = held.optimizer.get("state") if isinstance(held.optimizer, dict) else None
    except Refused as error:
        return {"problem": str(error)}
    except MemoryError:
        return {"problem": "reading it takes more memory than a checkpoint of its size can need"}
    except OSError as error:
        return {"problem": error.strerror or str(error), "full": error.errno in (errno.ENOSPC, errno.EDQUOT)}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, RecursionError) as error:
        return {"problem": f"it is damaged ({type(error).__name__})"}
    return {
        "shape": {**held.shape, "n_head": held.n_head}, "iter_num": held.iter_num, "masks": held.masks,
        "best_val_loss": held.best_val_loss, "moments": bool(states),
    }  # fmt: skip


if __name__ == "__main__":
    gc.disable()  # looking through millions of lists again and again is how a bomb takes minutes
    sys.stdout.write(json.dumps(main(*sys.argv[1:])) + "\n")
