"""Sees what of a step other versions of torch allocate otherwise, for versions.py."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule

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
        self.compiled_norms = 0  # calls under autocast, where a graph has one of 16 bits

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

    def patch_compiler(self, patches: Patches, inductor: Any) -> None:
        """See in each graph that Inductor gets the calls of rms_norm which autocast casts."""
        compile_fx = inductor.compile_fx

        def seen(model: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(model, GraphModule):
                for graph in (each.graph for each in model.modules() if isinstance(each, GraphModule)):
                    self._count_norms(graph)
            return compile_fx(model, *args, **kwargs)

        patches.set(inductor, "compile_fx", seen)

    def _count_norms(self, graph: Graph) -> None:
        autocast, count, narrow = [torch.is_autocast_enabled("cuda")], 0, False
        for node in graph.nodes:
            name = getattr(node.target, "__name__", "")
            if name == "_enter_autocast":
                autocast.append(node.args[2])
            elif name == "_exit_autocast":
                autocast.pop()
            elif name == "rms_norm" and autocast[-1]:
                value = node.args[0].meta.get("example_value")
                count, narrow = count + 1, narrow or (isinstance(value, Tensor) and value.dtype in NARROW)
        self.compiled_norms += count if narrow else 0

    def facts(self) -> dict[str, Any]:
        """As a trace keeps them; nothing where the step meets no difference."""
        norms = {"rms_norms": [list(norm) for norm in self.norms]} if self.norms else {}
        norms |= {"compiled_norms": self.compiled_norms} if self.compiled_norms else {}
        return norms | ({"whole_slices_bytes": self.sliced_bytes} if self.sliced_bytes else {})


def _takes_a_whole_dimension(index: Any) -> bool:
    return any(isinstance(part, slice) and part == WHOLE for part in (index if isinstance(index, tuple) else (index,)))
