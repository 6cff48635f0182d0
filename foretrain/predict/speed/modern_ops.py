"""The operations of the modern recipe's compiled step: its products are nanoGPT's, all else differs."""

from foretrain.predict.speed.compiled_ops import CompiledOps


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
