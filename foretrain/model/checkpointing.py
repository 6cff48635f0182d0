"""Recomputation of cheap tensors only: what a linear layer's backward needs is made again, the product is not.

Chen et al. 2016 (arXiv:1604.06174) drop whole segments; llm.c's `-r 2` recomputes GELU and LayerNorm alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def remake_input(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """layer(x), where layer ends in a linear layer whose input is made again from x in the backward pass.

    In eager mode the second pass stops as soon as the last tensor that backward needs is there, which is before the
    product. A compiler looks at the graph as a whole and is told to keep products.
    """
    compiling = torch.compiler.is_compiling()
    keep: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if compiling else {}
    out: Tensor = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False, **keep)
    return out
