"""The operations of a compiled step: Inductor leaves products and attention alone and fuses all else around them.

The kernels are those of Inductor's wrapper for this model (torch 2.13, read in the traces of predict/trace): per
block forward two norms with the residual addition before them and one GELU, backward one kernel for each of these
with the bias-like reductions, and a copy that joins dq, dk and dv.
"""

from foretrain.predict.speed.ops import Kind, OperationList


class CompiledOps(OperationList):
    """Writes forward and backward passes with fused kernels."""

    # -- forward -------------------------------------------------------------------------------------------

    def forward(self) -> None:
        E, L, C = self.elements, self.shape.n_layer, self.shape.n_embd
        self.traffic("embedding", "fused", E, 2 * self.way.wide, self.way.wide)
        if self.way.casts and not self.way.eight_bits:
            self.traffic("weight copies", "fused", 12 * C * C, 4, 2, L)
        self.block_forward(L)
        self.norm_forward(1)
        if self.way.casts:
            self.traffic("head copy", "fused", self.shape.vocab_size * C, 4, 2)
        self.head_forward()

    def norm_forward(self, count: int) -> None:
        """Residual addition, norm and cast in one: the normalised fp32 output is written where backward needs it."""
        low, wide = self.way.low, self.way.wide
        kept = self.way.train and wide == 4 and not (self.way.checkpointed or self.way.cheap_blocks)
        self.traffic("norm", "fused", self.elements, wide + low, wide + low + (4 if kept else 0), count)

    def block_forward(self, count: int) -> None:
        self.norm_forward(2 * count)
        self.blocks_matmuls(backward=False, count=count)
        self.attention(count)
        self.traffic("gelu", "gelu", 4 * self.elements, self.way.low, self.way.low, count)

    def head_forward(self) -> None:
        """The loss reads the logits once, or twice (maximum, then sum); nothing else of their size is written."""
        reads = 1 if self.way.torch.online_softmax else 2
        V, C, low = self.shape.vocab_size, self.shape.n_embd, self.way.low
        chunked = self.way.chunk < self.tokens
        for rows, count in self.chunks():
            self.linear("head", V, C, rows, count)
            self.traffic("loss", "softmax", rows * V, reads * low, 0, count)
            if chunked and self.way.train:
                self.traffic("loss", "softmax_backward", rows * V, low, low, count)
                self.linear_backward("head", V, C, rows, count)
                self.traffic("head gradient", "add", V * C, 8, 4, count)

    # -- backward ------------------------------------------------------------------------------------------

    def backward(self) -> None:
        V, C, L, E = self.shape.vocab_size, self.shape.n_embd, self.shape.n_layer, self.elements
        low = self.way.low
        self.part = "backward"
        if self.way.chunk < self.tokens:
            self.traffic("head gradient", "add", V * C, 4, 4)
        else:
            tangent = low if self.way.step == "nanogpt" else 0  # of the returned logits: zeros, written and read
            self.traffic("loss", "fill", self.tokens * V, 0, tangent)
            self.traffic("loss", "softmax_backward", self.tokens * V, low + tangent, low)
            self.linear_backward("head", V, C, self.tokens, 1)
            self.traffic("head gradient", "fused", V * C, low, 4)
        self.norm_backward(1)
        self.part = "recompute"
        if self.way.checkpointed:
            self.block_forward(self.way.checkpointed)
        if cheap := self.way.cheap_blocks:
            self.norm_forward(2 * cheap)
            self.traffic("gelu", "gelu", 4 * E, low, low, cheap)
        self.part = "backward"
        self.block_backward(L)
        self.traffic("embedding", "scatter", E, 4, 0)
        self.traffic("embedding", "fill", V * C, 0, 4)
        self.traffic("embedding", "add", V * C, 8, 4)

    def norm_backward(self, count: int) -> None:
        """Norm, residual and cast in one, and the sum over rows for the norm's weight."""
        low, wide = self.way.low, self.way.wide
        copy = low if self.way.casts else 0
        self.traffic("norm", "fused", self.elements, low + 2 * wide, wide + copy, count)
        self.traffic("norm weight", "fused", self.elements, low + wide, 0, count)

    def block_backward(self, count: int) -> None:
        E, C, low = self.elements, self.shape.n_embd, self.way.low
        self.norm_backward(2 * count)
        self.blocks_matmuls(backward=True, count=count)
        if self.way.half and not self.way.eight_bits:
            self.traffic("weight gradients", "fused", 12 * C * C, 2, 4, count)
        self.traffic("gelu", "gelu_backward", 4 * E, 2 * low, low, count)
        self.attention(count, backward=True)
        self.traffic("attention", "fused", 3 * E, low, low, count)

    def traffic(self, name: str, kind: Kind, elements: int, read: float, written: float, count: int = 1) -> None:
        factor = self.way.torch.compiled_bytes
        super().traffic(name, kind, elements, read * factor, written * factor, count)

    def head_matmul(self, kind: Kind, m: int, n: int, k: int, count: int) -> None:
        """A product of the head. Where its sizes are not multiples of 8 Inductor pads them: the gradient of the logits
        is copied, a weight's copy is small, a result is only sliced."""
        self.matmul("head", kind, m, n, k, count)
        if self.way.torch.pads_matmuls:
            padded = (m + -m % 8, n + -n % 8, k + -k % 8)
            self.found[-1] = self.found[-1]._replace(shape=padded)
            if padded != (m, n, k) and kind != "matmul":
                low = self.way.low
                self.traffic(
                    "head", "fused", self.shape.vocab_size * (k if kind == "matmul_weight" else m), low, low, count
                )

    def linear(self, name: str, wide: int, narrow: int, rows: int, count: int) -> None:
        if name == "head":
            self.head_matmul("matmul", rows, wide, narrow, count)
        else:
            super().linear(name, wide, narrow, rows, count)

    def linear_backward(self, name: str, wide: int, narrow: int, rows: int, count: int) -> None:
        if name == "head":
            self.head_matmul("matmul_input", rows, narrow, wide, count)
            self.head_matmul("matmul_weight", wide, narrow, rows, count)
        else:
            super().linear_backward(name, wide, narrow, rows, count)
