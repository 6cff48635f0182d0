"""The operations of the modern recipe's model (model/modern.py): its products are nanoGPT's, all else differs."""

from foretrain.predict.speed.compiled_ops import CompiledOps
from foretrain.predict.speed.eager_ops import EagerOps


class ModernEagerOps(EagerOps):
    """Each kernel of the eager passes. Sums over a row are read, not written: they are one number a row."""

    def norm(self, elements: int, count: int, *, width: int | None = None, low: int | None = None) -> None:
        """Length, product and cast of `width` bytes an element; `low`: the width of the result."""
        width, low = width or self.wide, low or self.way.low
        self.traffic("norm", "add", elements, width, 0, count)
        self.traffic("norm", "add", elements, width, max(width, low), count)
        if low < width:
            self.autocast("norm", elements, count, down=True)

    def norm_backward(self, elements: int, count: int, *, width: int | None = None) -> None:
        """Product and mean with the result, addcmul, scaling; the gradient is of `width` bytes an element."""
        width, low = width or self.wide, self.way.low
        self.traffic("norm", "add", elements, 2 * low, low, count)
        self.traffic("norm", "add", elements, low, 0, count)
        self.traffic("norm", "add", elements, 2 * low, low, count)
        if width != low:
            self.autocast("norm", elements, count, down=False)
        self.traffic("norm", "add", elements, width, width, count)

    # -- forward -------------------------------------------------------------------------------------------

    def embed(self) -> None:
        self.traffic("embedding", "gather", self.elements, self.wide, self.wide)
        self.norm(self.elements, 1, low=self.wide)

    def block_forward(self, count: int) -> None:
        E, low = self.elements, self.way.low
        wide = self.wide
        self.traffic("skip", "add", E, 2 * wide, wide, count)
        self.norm(E, 2 * count)
        self.blocks_matmuls(backward=False, count=count)
        self.traffic("rotary positions", "add", 2 * E, low, low, 2 * count)
        self.traffic("rotary positions", "add", 2 * E, 2 * low, low, count)
        self.norm(2 * E, count, width=low)
        self.attention(count)
        self.traffic("squared relu", "add", 4 * E, low, low, 2 * count)
        self.traffic("residual", "add", E, wide + low, wide, 2 * count)

    def final_norm(self) -> None:
        self.norm(self.elements, 1)
        self.autocast("head copy", self.shape.vocab_size * self.shape.n_embd, 1, down=True)

    # -- backward ------------------------------------------------------------------------------------------

    def backward(self) -> None:
        V, C, L, E = self.shape.vocab_size, self.shape.n_embd, self.shape.n_layer, self.elements
        self.part = "backward"
        if self.way.chunk < self.tokens:
            self.traffic("head gradient", "add", V * C, 4, 4)
        else:
            self.head_backward()
        self.norm_backward(E, 1)
        self.recompute(self.way.checkpointed, 0)
        self.block_backward(L)
        self.norm_backward(E, 1)
        self.traffic("embedding", "scatter", E, self.wide, 0)
        self.traffic("embedding", "fill", V * C, 0, 4)

    def block_backward(self, count: int) -> None:
        E, C, low = self.elements, self.shape.n_embd, self.way.low
        wide = self.wide
        self.autocast("residual", E, 2 * count, down=True)
        self.blocks_matmuls(backward=True, count=count)
        self.cast("weight gradients", 12 * C * C, count, down=False)
        self.traffic("squared relu", "add", 4 * E, low, low, 3 * count)
        self.traffic("squared relu", "add", 4 * E, 2 * low, low, 2 * count)
        self.norm_backward(E, 2 * count)
        self.traffic("residual", "add", E, 2 * wide, wide, 2 * count)
        self.attention(count, backward=True)
        self.traffic("attention", "join", 2 * E, low, low, count)
        self.norm_backward(2 * E, count, width=low)
        self.traffic("rotary positions", "add", 2 * E, low, low, 3 * count)
        self.traffic("rotary positions", "add", 2 * E, 2 * low, low, count)
        self.traffic("attention", "add", E, 2 * low, low, count)  # of v's layer and of qk's
        # The gradients of x0, and of its scalar: a product and its sum each.
        self.traffic("skip", "add", E, 3 * wide, 2 * wide, count)
        self.traffic("skip", "add", E, 3 * wide, wide, count)


class ModernCompiledOps(CompiledOps):
    """Fused kernels around the products and attention."""

    def block_forward(self, count: int) -> None:
        E, low = self.elements, self.way.low
        self.traffic("skip", "fused", E, self.way.wide, 0, count)  # with the norm that follows
        self.norm_forward(2 * count)
        self.blocks_matmuls(backward=False, count=count)
        self.traffic("rotary positions", "fused", 2 * E, 2 * low, low, count)
        self.attention(count)
        self.traffic("squared relu", "fused", 4 * self.elements, low, low, count)

    def block_backward(self, count: int) -> None:
        E, C, low = self.elements, self.shape.n_embd, self.way.low
        self.norm_backward(2 * count)
        self.blocks_matmuls(backward=True, count=count)
        if self.way.half:
            self.traffic("weight gradients", "fused", 12 * C * C, 2, 4, count)
        self.traffic("squared relu", "fused", 4 * E, 2 * low, low, count)
        self.attention(count, backward=True)
        self.traffic("rotary positions", "fused", 2 * E, 3 * low, low, count)
        self.traffic("skip", "fused", E, 3 * self.way.wide, self.way.wide, count)
