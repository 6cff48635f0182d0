"""AdamW whose two moments are stored in 8 or 4 bits, block by block: 2.03 or 1.06 bytes per parameter instead of 8.

Each block has the scale of its largest element, and a code per element. The arithmetic is fp32: a chunk of codes is
widened, updated, applied, and narrowed.

8 bits, after Dettmers et al. 2021 (arXiv:2110.02861): blocks of 256 and the codes of dynamic tree quantisation, whose
steps shrink with the number. 4 bits, after Li et al. 2023 (arXiv:2309.01507): blocks of 128, the same tree with fewer
bits for the first moment, and sixteenths of the scale for the second one, 1/16 to 1 without zero. Both moments have one
scale per block; the paper's rank-1 scales, of rows and columns, need two passes over a matrix.

One thing differs from both, on purpose: the square root of the second moment is stored. In 8 bits its square would fall
to zero at 1/4000 of a block's largest gradient while the first moment does not, and their quotient would be divided by
eps alone, as happens to embeddings of rare tokens. A root that is not zero never becomes zero. In 4 bits the least
number is 1/16 of the largest gradient instead of 1/4: tiny models that memorise one batch had a loss of 0.64 where
AdamW had 0.52, and 0.72 with the second moment itself; on new rows in each step both were alike.

Why not torchao's optimizers (0.18, same layout): their step is always torch.compile'd (11.7 s for the first on one
core), so it needs a compiler and no eager step can be traced; their tensor subclasses cannot go to safetensors; their
learning rate must be a tensor.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from foretrain.model.low_bits import CHUNK, EIGHT, FOUR, LowBits, is_quantised
from foretrain.model.update import Uncompiled, held_back

EPS = 1e-8  # torch.optim.AdamW's
CODES, SCALES = ("exp_avg", "exp_avg_sq_root"), ("exp_avg_scale", "exp_avg_sq_root_scale")
_SMALLEST = 1e-30  # the scale of a block of zeros; any number does


def dynamic_tree(bits: int, *, signed: bool) -> list[float]:
    """Return the codes' numbers, ascending, in [-1, 1] or [0, 1]: leading zeros are a power of ten, others divide."""
    found = [0.0, 1.0]
    for zeros in range(bits - 1):
        parts = 2 ** (bits - 2 - zeros + (not signed))
        middles = [(0.1 + 0.9 * (i + 0.5) / parts) * 10.0**-zeros for i in range(parts)]
        found += middles
        found += [-x for x in middles] if signed else []
    return sorted(found)


def code_books(form: LowBits) -> tuple[list[float], list[float]]:
    even = [(code + 1) / 2**form.bits for code in range(2**form.bits)]
    return dynamic_tree(form.bits, signed=True), dynamic_tree(8, signed=False) if form.bits == 8 else even


@dataclass(frozen=True)
class Tables:
    """Lookup tables. `numbers`: fp32 of each byte, two as one int64 where it has two codes. `codes`: the nearest code
    of each bfloat16, by its bits. `block`: elements of a scale.
    """

    numbers: Tensor
    codes: Tensor
    block: int

    @classmethod
    def of(cls, book: list[float], block: int, device: torch.device, factor: float = 1.0) -> "Tables":
        numbers = torch.tensor(book, dtype=torch.float64)
        every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
        codes = torch.bucketize(every, (numbers[1:] + numbers[:-1]) / 2)
        if book[0] == 0:
            codes = torch.where(every > 0, codes.clamp(min=1), 0)  # what is not zero stays so
        numbers = (factor * numbers).float()
        if len(book) == 16:  # the first of two codes is in a byte's lower half
            numbers = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), 1).view(torch.int64).view(-1)
        return cls(numbers.to(device), codes.to(torch.uint8).to(device), block)

    @property
    def two_a_byte(self) -> bool:
        return self.numbers.dtype == torch.int64


class Moment(NamedTuple):
    codes: Tensor
    scales: Tensor
    tables: Tables


def widen(moments: Sequence[Moment], numel: int) -> Tensor:
    """Return the fp32 numbers, one row per moment; a row may be an element longer."""
    codes, _, tables = moments[0]
    x = torch.empty(len(moments), codes.numel() * (1 + tables.two_a_byte), dtype=torch.float32, device=codes.device)
    for row, (codes, scales, tables) in zip(x, moments, strict=True):
        torch.index_select(tables.numbers, 0, codes.int(), out=row.view(tables.numbers.dtype))
        for part, blocks in _parts(numel, tables.block):
            _rows(row[None], part, blocks)[0].mul_(scales[blocks, None])
    return x


def narrow_(x: Tensor, moments: Sequence[Moment], numel: int) -> None:
    parts = [(_rows(x, part, blocks), blocks) for part, blocks in _parts(numel, moments[0].tables.block)]
    found = [torch.linalg.vector_norm(rows, torch.inf, dim=2) for rows, _ in parts]
    scales = (found[0] if len(found) == 1 else torch.cat(found, 1)).clamp_(min=_SMALLEST)
    for rows, blocks in parts:
        rows.div_(scales[:, blocks, None])
    torch._foreach_copy_([each.scales for each in moments], list(scales))  # type: ignore[reportPrivateImportUsage]
    for row, (codes, _, tables) in zip(x, moments, strict=True):
        bits = _bits(row.bfloat16())
        nearest = torch.index_select(tables.codes, 0, bits, out=None if tables.two_a_byte else codes)
        del bits
        if not tables.two_a_byte:
            continue
        nearest = nearest[:numel]
        if numel % 2:
            nearest = torch.nn.functional.pad(nearest, (0, 1))
        torch.add(nearest[0::2], nearest[1::2], alpha=16, out=codes)


def _bits(x: Tensor) -> Tensor:
    """Return the bits of bfloat16 numbers, int32. Apple GPUs may not know uint16, which saves a kernel elsewhere."""
    if x.device.type == "mps":
        return x.view(torch.int16).int().bitwise_and_(0xFFFF)
    return x.view(torch.uint16).int()


def _parts(numel: int, block: int) -> list[tuple[slice, slice]]:
    whole = numel // block
    found = [(slice(0, whole * block), slice(0, whole)), (slice(whole * block, numel), slice(whole, whole + 1))]
    return [each for each in found if each[0].start < each[0].stop]


def _rows(x: Tensor, part: slice, blocks: slice) -> Tensor:
    return x[:, part].unflatten(1, (blocks.stop - blocks.start, -1))


class LowBitAdamW(Uncompiled):
    """torch.optim.AdamW, with packed moments for tensors of 4096 elements or more."""

    form: ClassVar[LowBits]

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})
        self._tables_on: dict[tuple[torch.device, float], tuple[Tables, ...]] = {}

    def _tables(self, device: torch.device, beta2: float) -> tuple[Tables, ...]:
        """Return the tables of the first moment, and of the second one's root, which comes back decayed."""
        if (device, beta2) not in self._tables_on:
            books = zip(code_books(self.form), (1.0, beta2**0.5), strict=True)
            made = tuple(Tables.of(book, self.form.block, device, factor) for book, factor in books)
            self._tables_on[device, beta2] = made
        return self._tables_on[device, beta2]

    def state_shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        shape, numel = tuple(parameter.shape), parameter.numel()
        if not is_quantised(numel):
            return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
        codes = shape if self.form.bits == 8 else (self.form.n_bytes(numel),)
        return {"step": (), **dict.fromkeys(CODES, codes), **dict.fromkeys(SCALES, (self.form.n_blocks(numel),))}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        if held_back(self):
            return
        for group in self.param_groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            if updated and group["weight_decay"]:
                torch._foreach_mul_(updated, 1 - group["lr"] * group["weight_decay"])  # type: ignore[reportPrivateImportUsage]
            for parameter in updated:
                state = self.state[parameter] or self._first_state(parameter)
                state["step"] = state["step"].cpu() + 1  # a load may have put it on the device
                self._update(parameter, state, group)

    def _first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        for name, shape in self.state_shapes(parameter).items():
            if name == "step":
                state[name] = torch.zeros(())
                continue
            dtype = torch.uint8 if name in CODES and is_quantised(parameter.numel()) else torch.float32
            state[name] = torch.zeros(shape, dtype=dtype, device=parameter.device)
        return state

    def _update(self, parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        weight, grad = parameter.view(-1), parameter.grad
        assert grad is not None
        grad, count = grad.reshape(-1), int(state["step"])
        if not is_quantised(parameter.numel()):
            m, v = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
            m.lerp_(grad, 1 - group["betas"][0])
            v.mul_(group["betas"][1]).addcmul_(grad, grad, value=1 - group["betas"][1])
            _apply(weight, m, v.sqrt(), group, count)
            return
        tables = self._tables(parameter.device, group["betas"][1])
        for start in range(0, weight.numel(), CHUNK):
            held, blocks = _piece(start, 8 // self.form.bits), _piece(start, self.form.block)
            stored = zip(CODES, SCALES, tables, strict=True)
            moments = [Moment(state[c].view(-1)[held], state[s].view(-1)[blocks], table) for c, s, table in stored]
            _update_chunk(weight[_piece(start, 1)], grad[_piece(start, 1)], moments, group, count)


class AdamW8bit(LowBitAdamW):
    form = EIGHT


class AdamW4bit(LowBitAdamW):
    form = FOUR


def _piece(start: int, elements: int) -> slice:
    return slice(start // elements, (start + CHUNK) // elements)


def _update_chunk(weight: Tensor, grad: Tensor, moments: Sequence[Moment], group: dict[str, Any], count: int) -> None:
    """Update both moments at once, where one kernel serves: launches cost a card's host the most."""
    beta1, beta2 = group["betas"]
    x = widen(moments, grad.numel())
    m, root = x[:, : grad.numel()]
    m.lerp_(grad, 1 - beta1)
    torch.hypot(root, grad * (1 - beta2) ** 0.5, out=root)
    _apply(weight, m, root, group, count)
    narrow_(x, moments, grad.numel())


def _apply(weight: Tensor, m: Tensor, root: Tensor, group: dict[str, Any], count: int) -> None:
    beta1, beta2 = group["betas"]
    grown = (1 - beta2**count) ** 0.5
    weight.addcdiv_(m, root + EPS * grown, value=-group["lr"] * grown / (1 - beta1**count))
