"""AdamW whose two moments are stored in 8 bits, block by block: 2.03 bytes a parameter instead of 8.

After Dettmers et al. 2021, 8-bit Optimizers via Block-wise Quantization (arXiv:2110.02861): each block of 256 elements
has the scale of its largest one, and the codes are those of dynamic tree quantisation, whose steps shrink with the
number. The arithmetic is fp32: a chunk of codes is widened, updated, applied, and narrowed again.

One thing differs, on purpose: the square root of the second moment is stored. Its square would fall to zero at 1/4000
of a block's largest gradient while the first moment there does not, and their quotient would be divided by eps alone,
as happens to embeddings of rare tokens. And a root that is not zero never becomes zero.

Why not torchao's AdamW8bit (0.18, which has the same layout): its step is always torch.compile'd (11.7 s for the first
on one core), so it needs a compiler where foretrain needs none and no eager step with it can be traced; its states
are tensor subclasses, which safetensors does not write; its learning rate must be a tensor.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretrain.model.adamw8bit_sizes import BLOCK, CHUNK, is_quantised, n_blocks
from foretrain.model.update import Uncompiled, held_back

EPS = 1e-8  # torch.optim.AdamW's
CODES, SCALES = ("exp_avg", "exp_avg_sq_root"), ("exp_avg_scale", "exp_avg_sq_root_scale")
_SMALLEST = 1e-30  # a scale of a block of zeros; any number does


def dynamic_tree(signed: bool) -> list[float]:
    """The 256 numbers of the codes, ascending, in [-1, 1] or [0, 1].

    A code is a number of leading zeros, which is a power of ten, and the rest of its bits divide 0.1 to 1 evenly.
    """
    found = [0.0, 1.0]
    for zeros in range(7):
        parts = 2 ** (6 - zeros + (not signed))
        middles = [(0.1 + 0.9 * (i + 0.5) / parts) * 10.0**-zeros for i in range(parts)]
        found += middles
        found += [-x for x in middles] if signed else []
    return sorted(found)


@dataclass(frozen=True)
class Tables:
    """`numbers`: the fp32 number of each code. `codes`: the nearest code of each bfloat16, by its bits.

    Rounding to bfloat16 first moves a border between two codes by 2⁻⁹ of itself at most, and makes the search one read.
    """

    numbers: Tensor
    codes: Tensor

    @classmethod
    def of(cls, signed: bool, device: torch.device) -> "Tables":
        numbers = torch.tensor(dynamic_tree(signed), dtype=torch.float64)
        every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
        codes = torch.bucketize(every, (numbers[1:] + numbers[:-1]) / 2)
        if not signed:
            codes = torch.where(every > 0, codes.clamp(min=1), 0)  # a root that is not zero stays so
        return cls(numbers.float().to(device), codes.to(torch.uint8).to(device))


def widen(codes: Tensor, scales: Tensor, tables: Tables) -> Tensor:
    """fp32 numbers of flat codes; `scales` of their blocks."""
    return _by_block(tables.numbers.index_select(0, codes.int()), scales, Tensor.mul_)


def narrow_(x: Tensor, codes: Tensor, scales: Tensor, tables: Tables) -> None:
    """Store flat fp32 numbers in `codes` and `scales`; x is spoilt."""
    whole = x.numel() // BLOCK * BLOCK
    for part, scale in ((x[:whole].view(-1, BLOCK), scales[: whole // BLOCK]), (x[whole:].view(1, -1), scales[-1:])):
        if part.numel():
            torch.maximum(part.amax(1), part.amin(1).neg_(), out=scale)
            scale.clamp_(min=_SMALLEST)
    bits = _by_block(x, scales, Tensor.div_).bfloat16().view(torch.int16).int().bitwise_and_(0xFFFF)
    codes.copy_(tables.codes.index_select(0, bits))


def _by_block(x: Tensor, scales: Tensor, apply_: Callable[[Tensor, Tensor], Any]) -> Tensor:
    """x (flat) with each block multiplied with its scale, or divided by it, in place."""
    whole = x.numel() // BLOCK * BLOCK
    if whole:
        apply_(x[:whole].view(-1, BLOCK), scales[: whole // BLOCK, None])
    if whole < x.numel():
        apply_(x[whole:], scales[-1])
    return x


class AdamW8bit(Uncompiled):
    """AdamW as torch.optim.AdamW computes it, with moments as above for tensors of 4096 elements or more."""

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})
        self._tables_on: dict[torch.device, tuple[Tables, Tables]] = {}

    def _tables(self, device: torch.device) -> tuple[Tables, Tables]:
        """Of numbers with a sign, and without."""
        if device not in self._tables_on:
            self._tables_on[device] = (Tables.of(True, device), Tables.of(False, device))
        return self._tables_on[device]

    def state_shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of a parameter's state."""
        shape, blocks = tuple(parameter.shape), (n_blocks(parameter.numel()),)
        if not is_quantised(parameter.numel()):
            return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
        return {"step": (), **dict.fromkeys(CODES, shape), **dict.fromkeys(SCALES, blocks)}

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
        """Moments of zero."""
        state: dict[str, Tensor] = self.state[parameter]
        for name, shape in self.state_shapes(parameter).items():
            if name == "step":
                state[name] = torch.zeros(())
                continue
            dtype = torch.uint8 if name in CODES and is_quantised(parameter.numel()) else torch.float32
            state[name] = torch.zeros(shape, dtype=dtype, device=parameter.device)
        if is_quantised(parameter.numel()):
            state["exp_avg"].fill_(dynamic_tree(True).index(0.0))
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
        signed, unsigned = self._tables(parameter.device)
        flat = [state[name].view(-1) for name in (*CODES, *SCALES)]
        for start in range(0, weight.numel(), CHUNK):
            part, blocks = slice(start, start + CHUNK), slice(start // BLOCK, (start + CHUNK) // BLOCK)
            codes_m, codes_root, scales_m, scales_root = flat[0][part], flat[1][part], flat[2][blocks], flat[3][blocks]
            g = grad[part]
            m = widen(codes_m, scales_m, signed).lerp_(g, 1 - group["betas"][0])
            root = widen(codes_root, scales_root, unsigned)
            root.mul_(root).mul_(group["betas"][1]).addcmul_(g, g, value=1 - group["betas"][1]).sqrt_()
            _apply(weight[part], m, root, group, count)
            narrow_(m, codes_m, scales_m, signed)
            narrow_(root, codes_root, scales_root, unsigned)


def _apply(weight: Tensor, m: Tensor, root: Tensor, group: dict[str, Any], count: int) -> None:
    """Decay the weights and move them along m / root, both corrected for their start at zero."""
    beta1, beta2 = group["betas"]
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    denominator = (root / (1 - beta2**count) ** 0.5).add_(EPS)
    weight.addcdiv_(m, denominator, value=-group["lr"] / (1 - beta1**count))
