"""Tensors in safetensors files: every rank writes its rows, whose place the header tells, into a file of its own.
PyTorch's HuggingFaceStorageReader reads them; its writer has no checksums, copies a file and pickles plans."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from foretrain.config.weights_file import OFFSETS, SHARDING, begins_in


def header_of(begins: dict[str, int], dims: dict[str, int]) -> dict[str, str]:
    offsets = {name: {OFFSETS: [begin, *[0] * (dims[name] - 1)][: dims[name]]} for name, begin in begins.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", SHARDING: json.dumps(offsets, separators=(",", ":"))}


class Split:
    """A tensor in files, by its rows: `shape` is that of the whole, `[a:b]` reads these rows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._parts: list[tuple[int, Any, tuple[int, ...]]] = []  # first row, file, shape

    def add(self, begin: int, file: Any) -> None:
        self._parts.append((begin, file, tuple(file.get_slice(self.name).get_shape())))
        self._parts.sort(key=lambda part: part[0])

    def check(self) -> "Split":
        """Return itself. Raises ValueError where rows are missing or there twice."""
        expected = 0
        for begin, _, shape in self._parts:
            if begin != expected:
                what = "missing" if begin > expected else "there twice"
                raise ValueError(f"rows of {self.name} are {what} at row {min(begin, expected)}")
            expected += shape[0] if shape else 1
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        begin, _, shape = self._parts[-1]
        return (begin + shape[0], *shape[1:]) if shape else ()

    @property
    def dtype(self) -> torch.dtype:
        return self[0:0].dtype

    def whole(self) -> Tensor:
        parts = [file.get_tensor(self.name) for _, file, _ in self._parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __getitem__(self, rows: slice) -> Tensor:
        found = []
        for begin, file, shape in self._parts:
            first, end = max(rows.start - begin, 0), min(rows.stop - begin, shape[0])
            if first < end:
                found.append(file.get_slice(self.name)[first:end])
        if not found:
            _, file, _ = self._parts[0]
            return file.get_slice(self.name)[0:0]
        return found[0] if len(found) == 1 else torch.cat(found)


@contextlib.contextmanager
def opened(files: Iterable[str | Path]) -> Iterator[dict[str, Split]]:
    """Open the tensors of these files by name. Raises SafetensorError, and ValueError where one is not whole."""
    with contextlib.ExitStack() as stack:
        found: dict[str, Split] = {}
        for path in files:
            file: Any = stack.enter_context(safe_open(path, "pt"))
            try:
                begins = begins_in(file.metadata())
            except (TypeError, KeyError, AttributeError, RecursionError) as error:
                raise ValueError(f"its header cannot be read ({type(error).__name__})") from None
            for name in file.keys():  # noqa: SIM118
                found.setdefault(name, Split(name)).add(begins.get(name, 0), file)
        yield {name: split.check() for name, split in found.items()}


class Rows(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, rows: slice, /) -> Tensor: ...


@dataclass(frozen=True)
class HeldRows:
    local: Tensor
    begin: int
    copy: int
    copies: int

    def own(self) -> tuple[int, Tensor] | None:
        """Return (first row, rows) that this rank writes; None where others write all. A scalar is one row."""
        count = self.local.shape[0] if self.local.dim() else 1
        first, end = (count * each // self.copies for each in (self.copy, self.copy + 1))
        if first == end:
            return None
        return self.begin + first, self.local[first:end] if self.local.dim() else self.local

    def fill(self, source: Rows) -> None:
        with torch.no_grad():
            self.local.copy_(source[self.begin : self.begin + self.local.shape[0]])


def is_sharded(tensor: Tensor) -> bool:
    """Return whether it is a DTensor. An attribute tells, as importing its module takes long."""
    return hasattr(tensor, "device_mesh")


def held_rows(tensor: Tensor, rank: int = 0, world: int = 1) -> HeldRows:
    """Return this rank's rows of a sharded tensor, or the whole, which is then the same on all `world` ranks."""
    if not is_sharded(tensor):
        return HeldRows(tensor.detach(), 0, rank, world)
    sharded: Any = tensor
    index, parts, copy, copies = 0, 1, 0, 1
    for dim, placement in enumerate(sharded.placements):
        size, at = sharded.device_mesh.size(dim), sharded.device_mesh.get_local_rank(dim)
        if placement.is_replicate():
            copy, copies = copy * size + at, copies * size
        else:
            assert placement.is_shard(0), f"{placement}: only rows are cut"
            assert parts == 1, "rows are cut once"
            index, parts = at, size
    local, rows = sharded.detach().to_local(), tensor.shape[0]
    length = -(-rows // parts)
    begin, end = (min(rows, length * each) for each in (index, index + 1))
    assert local.shape[0] == end - begin, f"{local.shape[0]} rows of {rows}, cut into {parts}, are at {index}"
    return HeldRows(local, begin, copy, copies)


def sharded_like(parameter: Tensor, source: Rows, dtype: torch.dtype) -> Tensor:
    made = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    held_rows(made).fill(source)
    return made


def reshard(model: nn.Module) -> None:
    """Free what FSDP holds gathered, as after an evaluation: a parameter then is what the optimizer knows."""
    for module in model.modules():
        give_back = getattr(module, "reshard", None)
        if give_back is not None:
            give_back()


def states_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that has this rank's states: ZeRO-1 wraps one for its own share."""
    return getattr(optimizer, "optim", optimizer)
