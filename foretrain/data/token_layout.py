"""Where the tokens of a dataset are on disk: one list of segments for each split, whatever wrote the files. No numpy.

The files of a folder tell four layouts apart:

    foretrain   dataset.json and train-00000.bin …, as data/shards.py says
    nanogpt     train.bin and val.bin: raw ids (karpathy/nanoGPT data/*/prepare.py)
    npy         shards saved by numpy, with train or val in their names: edufineweb_train_000001.npy
                (karpathy/build-nanogpt fineweb.py); format 1.0 to 3.0 of numpy.lib.format
    llmc        ids behind 256 int32: magic, version, number of tokens (karpathy/llm.c dev/data/data_common.py, which
                modded-nanogpt uses too): fineweb_train_000001.bin, tiny_shakespeare_val.bin
"""

import ast
import struct
from dataclasses import dataclass
from pathlib import Path

from foretrain.base.errors import UserError
from foretrain.data.shards import INDEX, ITEM_BYTES, SPLITS, DatasetIndex, block_count, read_index

LLMC_HEADER_BYTES = 1024
LLMC_KINDS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # magic -> version, dtype
LLMC_OTHERS = {20240522: "an evaluation set", 20240326: "a model", 20240327: "activations for tests"}
_NPY_MAGIC = b"\x93NUMPY"
_NPY_DTYPES = {"<u2": "uint16", "<u4": "uint32"}
_MAX_NPY_HEADER = 10_000


@dataclass(frozen=True)
class Segment:
    """`tokens` ids of one file, from byte `offset` on. `blocks`: digests, as in shards.Shard; empty where unknown."""

    path: Path
    tokens: int
    dtype: str
    offset: int = 0
    blocks: bytes = b""
    block_bytes: int = 0
    sha256: str = ""
    max_id: int | None = None

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def end(self) -> int:
        return self.offset + self.tokens * self.item_bytes


@dataclass(frozen=True)
class Layout:
    """The segments of both splits; their tokens follow one another. `index` is foretrain's own."""

    format: str
    dtype: str
    splits: dict[str, tuple[Segment, ...]]
    index: DatasetIndex | None = None

    def tokens(self, split: str) -> int:
        return sum(segment.tokens for segment in self.splits[split])


def is_dataset(folder: Path) -> bool:
    try:
        return any((folder / name).is_file() for name in (INDEX, "train.bin")) or bool(_named(folder, "train"))
    except OSError:
        return False


def read_layout(folder: Path, dtype: str = "uint16", *, present: bool = True) -> Layout:
    """Read a folder's layout. `dtype`: of files without a header; `present`: shards must be here. Raises UserError."""
    if (folder / INDEX).is_file():
        return _foretrain(folder, check=present)
    if (folder / "train.bin").is_file() and not _has_llmc_magic(folder / "train.bin"):
        splits = {split: (_raw(folder / f"{split}.bin", dtype),) for split in SPLITS}
        return Layout("nanogpt", dtype, splits)
    found = {split: _named(folder, split) for split in SPLITS}
    suffixes = {path.suffix for paths in found.values() for path in paths}
    if len(suffixes) > 1:
        raise UserError("data.two_layouts", path=str(folder), kinds=sorted(suffixes))
    if not found["train"]:
        raise UserError("data.missing_file", path=str(folder / "train.bin"))
    if not found["val"]:
        raise UserError("data.no_val_shards", path=str(folder), first=found["train"][0].name)
    read = _npy if suffixes == {".npy"} else _llmc
    segments = {split: tuple(read(path) for path in paths) for split, paths in found.items()}
    dtypes = {segment.dtype for part in segments.values() for segment in part}
    if len(dtypes) > 1:
        raise UserError("data.two_layouts", path=str(folder), kinds=sorted(dtypes))
    return Layout("npy" if read is _npy else "llmc", dtypes.pop(), segments)


def _named(folder: Path, split: str) -> list[Path]:
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        words = path.stem.replace("-", "_").split("_")
        if path.suffix in (".npy", ".bin") and split in words and path.is_file():
            found.append(path)
    return found


def _size(path: Path) -> int:
    try:
        size = path.stat().st_size
    except OSError:
        raise UserError("data.missing_file", path=str(path)) from None
    if not path.is_file():
        raise UserError("data.missing_file", path=str(path))
    if size == 0:
        raise UserError("data.empty", path=str(path))
    return size


def _head(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise UserError("data.unreadable", path=str(path), reason=error.strerror or str(error)) from None


def _foretrain(folder: Path, *, check: bool) -> Layout:
    index = read_index(folder)
    splits: dict[str, tuple[Segment, ...]] = {}
    for name in SPLITS:
        segments = []
        for shard in index.splits[name].shards:
            path, size = folder / shard.file, shard.tokens * index.item_bytes
            if block_count(shard.blocks) != -(-size // shard.block_bytes):
                reason = f"{shard.file} has {block_count(shard.blocks)} block digests for {size} bytes"
                raise UserError("data.bad_meta", path=str(folder / INDEX), reason=reason)
            if check and (have := _size(path)) != size:
                raise UserError("data.wrong_size", path=str(path), have=have, want=size)
            segments.append(
                Segment(
                    path, shard.tokens, index.dtype, blocks=shard.blocks, block_bytes=shard.block_bytes,
                    sha256=shard.sha256, max_id=shard.max_id,
                )
            )  # fmt: skip
        splits[name] = tuple(segments)
    return Layout("foretrain", index.dtype, splits, index)


def _raw(path: Path, dtype: str) -> Segment:
    size, item = _size(path), ITEM_BYTES[dtype]
    if size % item:
        raise UserError("data.odd_size", path=str(path), size=size, item=item)
    return Segment(path, size // item, dtype)


def _has_llmc_magic(path: Path) -> bool:
    """Distinguish raw ids that begin so by chance by the file's size."""
    head = _head(path, 12)
    if len(head) < 12:
        return False
    magic, version, tokens = struct.unpack("<3i", head)
    known = LLMC_KINDS.get(magic)
    return known is not None and version == known[0] and 0 < tokens < path.stat().st_size


def _llmc(path: Path) -> Segment:
    size = _size(path)
    head = _head(path, 12)
    magic, version, tokens = struct.unpack("<3i", head) if len(head) == 12 else (0, 0, 0)
    if magic not in LLMC_KINDS:
        what = LLMC_OTHERS.get(magic, f"its first four bytes are {magic}, none of {sorted(LLMC_KINDS)}")
        raise UserError("data.bad_header", path=str(path), reason=f"it is {what}" if magic in LLMC_OTHERS else what)
    known, dtype = LLMC_KINDS[magic]
    if version != known:
        raise UserError("data.bad_header", path=str(path), reason=f"it is of version {version}, not {known}")
    want = LLMC_HEADER_BYTES + tokens * ITEM_BYTES[dtype]
    if tokens < 1 or size != want:
        raise UserError("data.wrong_size", path=str(path), have=size, want=max(want, 0))
    return Segment(path, tokens, dtype, LLMC_HEADER_BYTES)


def _npy(path: Path) -> Segment:
    """Read numpy's header, a Python literal, as data."""
    size = _size(path)

    def bad(reason: str) -> UserError:
        return UserError("data.bad_header", path=str(path), reason=reason)

    head = _head(path, 12 + _MAX_NPY_HEADER)
    if head[:6] != _NPY_MAGIC or len(head) < 12:
        raise bad("it does not begin as a file of numpy does")
    wide = head[6] >= 2
    if head[6] not in (1, 2, 3):
        raise bad(f"it is of numpy's format {head[6]}, and 1 to 3 are known")
    start = 12 if wide else 10
    length = int.from_bytes(head[8:start], "little")
    if length > _MAX_NPY_HEADER or len(head) < start + length:
        raise bad(f"its header says it is {length:,} bytes long")
    try:
        fields = ast.literal_eval(head[start : start + length].decode("latin-1").strip())
        descr, shape = fields["descr"], fields["shape"]
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        raise bad("its header cannot be read") from None
    if isinstance(descr, str) and "O" in descr:
        raise bad("it holds Python objects, which would have to be run")
    if not isinstance(descr, str) or descr not in _NPY_DTYPES:
        raise bad(f"it holds {str(descr)[:40]}, and token ids are uint16 or uint32 (<u2 or <u4)")
    if not (isinstance(shape, tuple) and len(shape) == 1 and type(shape[0]) is int and shape[0] > 0):
        raise bad(f"its shape is {str(shape)[:40]}, and token ids are one row of at least one")
    segment = Segment(path, shape[0], _NPY_DTYPES[descr], start + length)
    if size != segment.end:
        raise UserError("data.wrong_size", path=str(path), have=size, want=segment.end)
    return segment
