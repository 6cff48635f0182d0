"""AdamW whose two moments are stored in 8 or 4 bits, block by block: 2.03 or 1.06 bytes a parameter instead of 8.

Each block of elements has the scale of its largest one, and a code for each. The arithmetic is fp32: a chunk of codes
is widened, updated, applied, and narrowed again.

8 bits, after Dettmers et al. 2021, 8-bit Optimizers via Block-wise Quantization (arXiv:2110.02861): blocks of 256, and
the codes of dynamic tree quantisation, whose steps shrink with the number.

4 bits, after Li et al. 2023, Memory Efficient Optimizers with 4-bit States (arXiv:2309.01507): blocks of 128, the same
tree with fewer bits for the first moment, and sixteenths of the scale for the second one, 1/16 to 1 without zero. Both
moments have a scale a block; the paper's rank-1 scales, of rows and columns, need two passes over a matrix.

One thing differs from both, on purpose: the square root of the second moment is stored. In 8 bits its square would fall
to zero at 1/4000 of a block's largest gradient while the first moment there does not, and their quotient would be
divided by eps alone, as happens to embeddings of rare tokens. And a root that is not zero never becomes zero. In 4 bits
the least number is 1/16 of the largest gradient in the place of 1/4: tiny models that learn one batch by heart had a
loss of 0.64 where AdamW had 0.52, and 0.72 with the second moment itself; on new rows in each step both were alike.

Why not torchao's optimizers (0.18, which have the same layout): their step is always torch.compile'd (11.7 s for the
first on one core), so it needs a compiler where foretrain needs none and no eager step with it can be traced; its
states are tensor subclasses, which safetensors does not write; its learning rate must be a tensor.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foretrain.model.techniques.low_bits import CHUNK, EIGHT, FOUR, LowBits, is_quantised
from foretrain.model.update import Uncompiled, held_back

EPS = 1e-8  # torch.optim.AdamW's
CODES, SCALES = ("exp_avg", "exp_avg_sq_root"), ("exp_avg_scale", "exp_avg_sq_root_scale")
_SMALLEST = 1e-30  # a scale of a block of zeros; any number does


def dynamic_tree(bits: int, *, signed: bool) -> list[float]:
    """The numbers of so many bits' codes, ascending, in [-1, 1] or [0, 1].

    A code is a number of leading zeros, which is a power of ten, and the rest of its bits divide 0.1 to 1 evenly.
    """
    found = [0.0, 1.0]
    for zeros in range(bits - 1):
        parts = 2 ** (bits - 2 - zeros + (not signed))
        middles = [(0.1 + 0.9 * (i + 0.5) / parts) * 10.0**-zeros for i in range(parts)]
        found += middles
        found += [-x for x in middles] if signed else []
    return sorted(found)


def even(bits: int) -> list[float]:
    """The numbers of so many bits' codes, ascending: equal steps up to 1 without zero."""
    return [(code + 1) / 2**bits for code in range(2**bits)]


def code_books(form: LowBits) -> tuple[list[float], list[float]]:
    """The numbers of the codes of the first moment, and of the second one's root."""
    return dynamic_tree(form.bits, signed=True), dynamic_tree(8, signed=False) if form.bits == 8 else even(form.bits)


@dataclass(frozen=True)
class Tables:
    """`numbers`: the fp32 numbers of each byte, two as one int64 where it has two codes. `codes`: the nearest code of
    each bfloat16, by its bits. `block`: elements of a scale.

    Rounding to bfloat16 first moves a border between two codes by 2⁻⁹ of itself at most, and makes the search one read.
    """

    numbers: Tensor
    codes: Tensor
    block: int

    @classmethod
    def of(cls, book: list[float], block: int, device: torch.device) -> "Tables":
        numbers = torch.tensor(book, dtype=torch.float64)
        every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
        codes = torch.bucketize(every, (numbers[1:] + numbers[:-1]) / 2)
        if book[0] == 0:
            codes = torch.where(every > 0, codes.clamp(min=1), 0)  # what is not zero stays so
        numbers = numbers.float()
        if len(book) == 16:  # the first of two codes is in a byte's lower half
            numbers = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), 1).view(torch.int64).view(-1)
        return cls(numbers.to(device), codes.to(torch.uint8).to(device), block)

    @property
    def two_a_byte(self) -> bool:
        return self.numbers.dtype == torch.int64


def widen(codes: Tensor, scales: Tensor, numel: int, tables: Tables) -> Tensor:
    """fp32 numbers of so many flat codes; `scales` of their blocks."""
    numbers = tables.numbers.index_select(0, codes.int()).view(torch.float32)
    return _by_block(numbers[:numel], scales, tables.block, Tensor.mul_)


def narrow_(x: Tensor, codes: Tensor, scales: Tensor, tables: Tables) -> None:
    """Store flat fp32 numbers in `codes` and `scales`; x is spoilt."""
    block = tables.block
    whole = x.numel() // block * block
    for part, scale in ((x[:whole].view(-1, block), scales[: whole // block]), (x[whole:].view(1, -1), scales[-1:])):
        if part.numel():
            torch.maximum(part.amax(1), part.amin(1).neg_(), out=scale)
            scale.clamp_(min=_SMALLEST)
    bits = _by_block(x, scales, block, Tensor.div_).bfloat16().view(torch.int16).int().bitwise_and_(0xFFFF)
    found = tables.codes.index_select(0, bits)
    if not tables.two_a_byte:
        codes.copy_(found)
        return
    if found.numel() % 2:
        found = torch.nn.functional.pad(found, (0, 1))
    torch.add(found[0::2], found[1::2], alpha=16, out=codes)


def _by_block(x: Tensor, scales: Tensor, block: int, apply_: Callable[[Tensor, Tensor], Any]) -> Tensor:
    """x (flat) with each block multiplied with its scale, or divided by it, in place."""
    whole = x.numel() // block * block
    if whole:
        apply_(x[:whole].view(-1, block), scales[: whole // block, None])
    if whole < x.numel():
        apply_(x[whole:], scales[-1])
    return x


class LowBitAdamW(Uncompiled):
    """AdamW as torch.optim.AdamW computes it, with moments as above for tensors of 4096 elements or more."""

    form: ClassVar[LowBits]

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})
        self._tables_on: dict[torch.device, tuple[Tables, ...]] = {}

    def _tables(self, device: torch.device) -> tuple[Tables, ...]:
        """Of the first moment, and of the second one's root."""
        if device not in self._tables_on:
            self._tables_on[device] = tuple(Tables.of(b, self.form.block, device) for b in code_books(self.form))
        return self._tables_on[device]

    def state_shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of a parameter's state."""
        shape, numel = tuple(parameter.shape), parameter.numel()
        if not is_quantised(numel):
            return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
        codes = shape if self.form.bits == 8 else (self.form.n_bytes(numel),)
        return {
            "step": (),
            **dict.fromkeys(CODES, codes),
            **dict.fromkeys(SCALES, (self.form.n_blocks(numel),)),
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None
        if held_back(self):
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter] or self._first_state(parameter)
                    state["step"] = state["step"].cpu() + 1  # a load may have put it on the device
                    self._update(parameter, state, group)

    def _first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Moments of zero, as their scales are zero."""
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
            _average_(m, v, grad, group)
            _apply(weight, m, v.sqrt(), group, count)
            return
        first, second = self._tables(parameter.device)
        flat = [state[name].view(-1) for name in (*CODES, *SCALES)]
        for start in range(0, weight.numel(), CHUNK):
            part, blocks = _piece(start, 1), _piece(start, self.form.block)
            held = _piece(start, 8 // self.form.bits)
            codes_m, codes_root, scales_m, scales_root = flat[0][held], flat[1][held], flat[2][blocks], flat[3][blocks]
            g = grad[part]
            m, root = widen(codes_m, scales_m, g.numel(), first), widen(codes_root, scales_root, g.numel(), second)
            _average_(m, root.mul_(root), g, group)
            _apply(weight[part], m, root.sqrt_(), group, count)
            narrow_(m, codes_m, scales_m, first)
            narrow_(root, codes_root, scales_root, second)


class AdamW8bit(LowBitAdamW):
    """With 8 bits."""

    form = EIGHT


class AdamW4bit(LowBitAdamW):
    """With 4 bits."""

    form = FOUR


def _piece(start: int, elements: int) -> slice:
    """The place of a chunk in a tensor that holds so many elements in each of its own."""
    return slice(start // elements, (start + CHUNK) // elements)


def _average_(m: Tensor, v: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
    """Add a gradient to both moments."""
    beta1, beta2 = group["betas"]
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)


def _apply(weight: Tensor, m: Tensor, root: Tensor, group: dict[str, Any], count: int) -> None:
    """Decay the weights and move them along m / root, both corrected for their start at zero."""
    beta1, beta2 = group["betas"]
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    denominator = (root / (1 - beta2**count) ** 0.5).add_(EPS)
    weight.addcdiv_(m, denominator, value=-group["lr"] / (1 - beta1**count))
