"""A checkpoint's tensors in the safetensors format (huggingface/safetensors, README: format), written in pieces."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from foretrain.base.errors import UserError
from foretrain.base.files import CHUNK_BYTES
from foretrain.hardware import accelerator
from foretrain.model.parts import header_of, held_rows, is_sharded, reshard, states_of
from foretrain.model.step import TrainState

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
# Bits of the exponent: where all are set, the number is infinite or NaN.
_EXPONENTS = {
    torch.float64: (np.uint64, 0x7FF << 52), torch.float32: (np.uint32, 0xFF << 23),
    torch.float16: (np.uint16, 0x1F << 10), torch.bfloat16: (np.uint16, 0xFF << 7),
}  # fmt: skip

Files = dict[str, dict[str, torch.Tensor]]


def tensors_of(state: TrainState) -> Files:
    named = dict(state.trained.named_parameters())
    states = states_of(state.optimizer).state
    optimizer = {}
    for name, parameter in named.items():
        for key, value in states.get(parameter, {}).items():
            ours = is_sharded(value) or not (is_sharded(parameter) and value.dim())
            assert ours, f"{key} of {name} is made of this rank's rows alone, which fit no other number of ranks"
            optimizer[f"{key}/{name}"] = value.detach()
    rng = {"cpu": torch.get_rng_state(), **accelerator.accelerator_of(state.device).generator()}
    weights = {name: parameter.detach() for name, parameter in named.items()}
    return {"model.safetensors": weights, "optimizer.safetensors": optimizer, "rng.safetensors": rng}


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint. `begins`: of files with parts of tensors, the row at which each begins."""

    files: Files
    scaler: dict[str, float] | None
    begins: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for file in self.files.values() for t in file.values())

    def contents(self, step: int) -> dict[str, Iterator[bytes | memoryview]]:
        """Yield the bytes of each file. They raise UserError 'diverged.weights' at a number that is not finite."""
        return {name: pieces(tensors, step, self.begins.get(name)) for name, tensors in self.files.items()}


def live(state: TrainState) -> Snapshot:
    """Return the state's own tensors: to be written before the next step changes them."""
    scaler = state.scaler.state_dict() if state.scaler.is_enabled() else None
    if state.parallel is None:
        return Snapshot(tensors_of(state), scaler)
    reshard(state.trained)
    files, begins = _own(state)
    return Snapshot(files, scaler, begins)


def file_name(kind: str, rank: int = 0, world: int = 1) -> str:
    return f"{kind}.safetensors" if world == 1 else f"{kind}.rank-{rank}.safetensors"


def _own(state: TrainState) -> tuple[Files, dict[str, dict[str, int]]]:
    """Return what this rank writes, and its first rows. The generators are the first rank's."""
    assert state.parallel is not None
    rank, world = dist.get_rank(), state.parallel.sharing.world
    dealt = state.optimizer is not states_of(state.optimizer)  # each rank has whole states, of its own parameters
    files: Files = {}
    begins: dict[str, dict[str, int]] = {}
    for file, tensors in tensors_of(state).items():
        if (kind := file.removesuffix(".safetensors")) == "rng":
            if rank == 0:
                files[file] = tensors
            continue
        copies = 1 if dealt and kind == "optimizer" else world
        owns = ((name, held_rows(tensor, rank % copies, copies).own()) for name, tensor in tensors.items())
        own = {name: part for name, part in owns if part is not None}
        file = file_name(kind, rank, world)
        files[file] = {name: rows for name, (_, rows) in own.items()}
        if world > 1:
            begins[file] = {name: begin for name, (begin, _) in own.items()}
    return files, begins


def staged(state: TrainState) -> Snapshot:
    """Copy into host memory, tensor by tensor, with no temporaries on a device."""
    own = live(state)
    files = {
        file: {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        for file, tensors in own.files.items()
    }
    return replace(own, files=files)


def pieces(
    tensors: dict[str, torch.Tensor], step: int, begins: dict[str, int] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file, widest numbers first; `begins` as in Snapshot. Raises UserError 'diverged.weights'."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    if begins is not None:
        header["__metadata__"] = header_of(begins, {name: tensor.dim() for name, tensor in tensors.items()})
    place = 0
    for name in order:
        tensor = tensors[name]
        end = place + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in order:
        flat = tensors[name].reshape(-1)
        count = CHUNK_BYTES // flat.element_size()
        for start in range(0, flat.numel(), count):
            part = flat[start : start + count].cpu()
            numbers = part.view(torch.uint8).numpy()
            if part.dtype in _EXPONENTS and not _finite(numbers, part.dtype):
                raise UserError("diverged.weights", step=step)
            yield numbers.data


def _finite(numbers: np.ndarray, dtype: torch.dtype) -> bool:
    """Use NumPy, as PyTorch would take as many threads for it as the training has."""
    unsigned, exponent = _EXPONENTS[dtype]
    mask = unsigned(exponent)
    return not bool(((numbers.view(unsigned) & mask) == mask).any())
