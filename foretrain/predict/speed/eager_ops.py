"""The operations of an eager step: each kernel that aten runs for nanoGPT's model under autocast, one by one."""

from foretrain.predict.speed.ops import OperationList, Way


class EagerOps(OperationList):
    """Writes forward and backward passes. Under autocast, casts are kernels of their own."""

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.dropout = way.config.dropout > 0 and way.train
        self.wide = way.wide

    # -- forward -------------------------------------------------------------------------------------------

    def embed(self) -> None:
        """Up to the first block's input."""
        self.traffic("embedding", "gather", self.elements, self.wide, self.wide)
        self.traffic("embedding", "add", self.elements, self.wide, self.wide)
        self.drop(1, self.wide)

    def forward(self) -> None:
        L, C = self.shape.n_layer, self.shape.n_embd
        self.embed()
        if not self.way.eight_bits:
            self.autocast("weight copies", 12 * C * C, L, down=True)
        self.block_forward(L)
        if self.way.chunk < self.tokens:
            self.chunked_head()
        else:
            self.head_forward()

    def block_forward(self, count: int) -> None:
        """Norms, products, attention, GELU and the two additions to the residual stream."""
        E, low = self.elements, self.way.low
        self.norms(2 * count)
        self.blocks_matmuls(backward=False, count=count)
        if self.way.written_attention:
            self.attention_matmuls(count)
            self.attention_passes(count)
        elif self.dropout and not self.way.cuda:
            self.plain_attention(count, backward=False)
        else:
            self.attention(count)
        self.traffic("gelu", "gelu", 4 * E, low, low, count)
        self.drop(2 * count, low)
        self.traffic("residual", "add", E, self.wide + low, self.wide, 2 * count)

    def plain_attention(self, count: int, *, backward: bool) -> None:
        """A CPU with dropout writes the scores out: softmax, noise and product, forward and back."""
        low, scores = self.way.low, self.batch * self.shape.n_head * self.block**2
        self.attention(count, backward=backward)
        passes = 5 if backward else 6
        self.traffic("scores", "add", scores, passes * low, passes * low / 2, count)

    def drop(self, count: int, width: int) -> None:
        if self.dropout:
            self.traffic("dropout", "dropout", self.elements, width, width + (1 if self.way.cuda else width), count)

    def cast(self, name: str, elements: int, count: int, *, down: bool) -> None:
        """fp32 to half or back; nothing where all is fp32."""
        if self.way.half and count:
            self.traffic(name, "cast", elements, 4 if down else 2, 2 if down else 4, count)

    def autocast(self, name: str, elements: int, count: int, *, down: bool) -> None:
        """A cast that half-precision weights do without."""
        if self.way.casts:
            self.cast(name, elements, count, down=down)

    def norms(self, count: int) -> None:
        self.traffic("norm", "norm", self.elements, self.wide, self.wide, count)
        self.autocast("norm", self.elements, count, down=True)

    def final_norm(self) -> None:
        self.norms(1)
        self.autocast("head copy", self.shape.vocab_size * self.shape.n_embd, 1, down=True)

    def head_forward(self) -> None:
        """log_softmax keeps half precision on CUDA and nll_loss takes an fp32 copy; a CPU casts first."""
        V, C, low = self.shape.vocab_size, self.shape.n_embd, self.way.low
        logits = self.tokens * V
        self.final_norm()
        self.linear("head", V, C, self.tokens, 1)
        late = self.way.cuda and self.way.casts
        width = low if late else 4
        self.cast("loss", logits, 0 if late else 1, down=False)
        self.traffic("loss", "softmax", logits, width, width)
        self.cast("loss", logits, 1 if late else 0, down=False)

    def chunked_head(self) -> None:
        """model/loss.py: the softmax in fp32, in place; with the gradients where the step trains."""
        V, C, low = self.shape.vocab_size, self.shape.n_embd, self.way.low
        self.final_norm()
        for rows, count in self.chunks():
            logits = rows * V
            self.linear("head", V, C, rows, count)
            self.cast("loss", logits, count, down=False)
            self.traffic("loss", "softmax", logits, 16, 8, count)  # maximum, difference, exponential, sum
            if self.way.train:
                self.traffic("loss", "add", logits, 4, 4, count)
                self.traffic("loss", "cast", logits, 4, low, count if self.way.half else 0)
                self.linear_backward("head", V, C, rows, count)
                self.traffic("head gradient", "add", V * C, 8, 4, count)

    # -- backward ------------------------------------------------------------------------------------------

    def backward(self) -> None:
        V, C, L, E = self.shape.vocab_size, self.shape.n_embd, self.shape.n_layer, self.elements
        self.part = "backward"
        if self.way.chunk < self.tokens:
            self.traffic("head gradient", "add", V * C, 4, 4)
        else:
            self.head_backward()
        self.autocast("norm", E, 1, down=False)
        self.traffic("norm", "norm_backward", E, 3 * self.wide, self.wide)
        self.recompute(self.way.checkpointed, self.way.cheap_blocks)
        self.block_backward(L)
        self.traffic("embedding", "scatter", E, self.wide, 0)
        self.traffic("embedding", "fill", V * C, 0, 4)
        self.traffic("embedding", "add", V * C, 8, 4)

    def recompute(self, whole: int, cheap: int) -> None:
        """Blocks that run again, and blocks of which norms and GELU do."""
        E, C, low = self.elements, self.shape.n_embd, self.way.low
        self.part = "recompute"
        if whole:
            self.autocast("weight copies", 12 * C * C, whole, down=True)
            self.block_forward(whole)
        if cheap:
            self.autocast("weight copies", 11 * C * C, cheap, down=True)
            self.norms(2 * cheap)
            self.traffic("gelu", "gelu", 4 * E, low, low, cheap)
        self.part = "backward"

    def block_backward(self, count: int) -> None:
        E, C, low = self.elements, self.shape.n_embd, self.way.low
        self.autocast("residual", E, 2 * count, down=True)
        self.drop(2 * count, low)
        self.blocks_matmuls(backward=True, count=count)
        if not self.way.eight_bits:
            self.cast("weight gradients", 12 * C * C, count, down=False)
        self.traffic("gelu", "gelu_backward", 4 * E, 2 * low, low, count)
        if not self.way.eight_bits:
            self.autocast("norm", E, 2 * count, down=False)
        wide = self.wide
        self.traffic("norm", "norm_backward", E, 3 * wide, wide, 2 * count)  # another sums the weight's gradient
        self.traffic("residual", "add", E, 2 * wide, wide, 2 * count)
        if self.way.written_attention:
            self.attention_matmuls(count, backward=True)
            self.attention_passes(count, backward=True)
        elif self.dropout and not self.way.cuda:
            self.plain_attention(count, backward=True)
        else:
            self.attention(count, backward=True)
        if not self.way.products_attention:
            self.traffic("attention", "join", 3 * E, low, low, count)  # dq, dk and dv are joined

    def head_backward(self) -> None:
        V, C, low = self.shape.vocab_size, self.shape.n_embd, self.way.low
        logits = self.tokens * V
        self.traffic("loss", "fill", logits, 0, 4)
        early = self.way.cuda and self.way.casts
        self.cast("loss", logits, 1 if early else 0, down=True)
        width = low if early else 4
        self.traffic("loss", "softmax_backward", logits, 2 * width, width)
        self.cast("loss", logits, 0 if early else 1, down=True)
        self.linear_backward("head", V, C, self.tokens, 1)
        self.cast("head gradient", V * C, 1, down=False)
