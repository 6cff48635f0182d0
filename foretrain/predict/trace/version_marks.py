"""Sees what of a step other versions of torch allocate otherwise, for versions.py. Uncompiled code only."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.tracer import Tracer
from foretrain.predict.trace.versions import Norm

WHOLE = slice(None)
NARROW = (torch.float16, torch.bfloat16)


class Marks:
    """The calls of rms_norm, and the largest tensor of which a slice takes a whole dimension."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.norms: list[Norm] = []
        self.sliced_bytes = 0

    def patch(self, patches: Patches) -> None:
        """See them for as long as the patches last."""
        norm, take = F.rms_norm, Tensor.__getitem__

        def rms_norm(
            input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
        ) -> Any:
            first = len(self.tracer.record.sizes)
            out = norm(input, normalized_shape, weight, eps)
            kind = "none" if weight is None else "same" if weight.dtype == input.dtype else "other"
            if out.requires_grad:
                self.norms.append(
                    Norm(
                        first, len(self.tracer.record.sizes), math.prod(input.shape), input.dtype in NARROW, kind,
                        torch.is_autocast_enabled("cuda"),
                    )
                )  # fmt: skip
            return out

        def getitem(tensor: Tensor, index: Any) -> Any:
            if tensor.requires_grad and torch.is_grad_enabled() and _takes_a_whole_dimension(index):
                nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
                self.sliced_bytes = max(self.sliced_bytes, nbytes)
            return take(tensor, index)

        patches.set(F, "rms_norm", rms_norm)
        patches.set(Tensor, "__getitem__", getitem)

    def facts(self) -> dict[str, Any]:
        """As a trace keeps them; nothing where the step meets no difference."""
        norms = {"rms_norms": [list(norm) for norm in self.norms]} if self.norms else {}
        return norms | ({"whole_slices_bytes": self.sliced_bytes} if self.sliced_bytes else {})


def _takes_a_whole_dimension(index: Any) -> bool:
    return any(isinstance(part, slice) and part == WHOLE for part in (index if isinstance(index, tuple) else (index,)))
