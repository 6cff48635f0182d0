"""Token embeddings whose gradient is summed in fp32.

A CPU adds the rows of embedding's gradient in the dtype that they have: in bfloat16 a sum of ones ends at 256
(aten/src/ATen/native/Embedding.cpp, embedding_dense_backward_cpu). CUDA's kernels and Inductor's sum in fp32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, idx: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(idx)
        ctx.shape = weight.shape
        return F.embedding(idx, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (idx,) = ctx.saved_tensors
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=idx.device)
        return None, total.index_add_(0, idx.flatten(), grads[0].flatten(0, -2).float())


class TokenEmbedding(nn.Embedding):
    """nn.Embedding: token ids of any shape to that shape x C."""

    def forward(self, input: Tensor) -> Tensor:
        half = self.weight.dtype != torch.float32
        if half and self.weight.device.type == "cpu" and not torch.compiler.is_compiling():
            out: Tensor = _Lookup.apply(input, self.weight)
            return out
        return F.embedding(input, self.weight)
