"""The ledger of an eager step of the modern recipe (model/modern.py): its norms, rotary positions and squared ReLU are
functions of their own, so the lifetimes differ from nanoGPT's; the head, its loss and the products' rules do not.

`D` is a head's width.
"""

from foretrain.predict.estimate.eager import EagerStep
from foretrain.predict.estimate.eager_attention import Heads
from foretrain.predict.estimate.eager_forward import Graph, Saved
from foretrain.predict.timeline import Tensor, Timeline, Variant


class ModernEagerStep(EagerStep):
    """Forward and backward passes of a micro-batch. Products: attn (queries and keys), value, proj, fc, out."""

    norm_keeps_result = True

    def __init__(self, timeline: Timeline, variant: Variant, n_layer: int) -> None:
        super().__init__(timeline, variant, n_layer)
        self.skip_gradient: Tensor | None = None  # of x0, which every block adds to
        self.passing: list[Tensor] = []  # what dies when the last norm has run

    def component_of(self, name: str) -> str:
        return self.gradients  # the head is not tied

    # -- forward -------------------------------------------------------------------------------------------

    def rms_norm(self, scale: Tensor, width: int = 1) -> tuple[Tensor, Tensor, Tensor | None]:
        """(result, scale, what dies with the function's name): x / rms(x), made in fp32 and cast."""
        t = self.t
        product = t.alloc("activations.norm", self.e(4 * width))
        if self.low == 4:
            return product, scale, None
        return t.alloc("activations.norm", self.e(2 * width)), scale, product

    def norm(self) -> tuple[Tensor, Tensor]:
        """A norm of the residual stream into the dtype of the products."""
        out, scale, product = self.rms_norm(self.t.alloc("activations.norm", self.t.size(4, "B", "T")))
        self.t.free(product)
        return out, scale

    def embed(self, saving: bool) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        t, wide = self.t, self.v.wide
        t.at("forward.embedding")
        embedded = t.alloc("activations.residual", self.e(wide))
        tables = [t.alloc("activations.attention", t.size(2, "T", "D")) for _ in range(2)] if self.low == 2 else []
        scale = t.alloc("activations.norm", t.size(4, "B", "T"))
        x0 = t.alloc("activations.residual", self.e(4))
        if wide == 2:
            t.free(x0)
            x0 = t.alloc("activations.residual", self.e(2))
        kept = [scale, x0, *tables]
        return (x0, [embedded], kept) if saving else (x0, [embedded, *kept], [])

    def forward(self, saving: bool) -> Graph:
        """`graph.inputs` holds what checkpointed blocks keep; x0 is the first one's and lives on besides."""
        t = self.t
        graph = Graph()
        x0, names, graph.embedding = self.embed(saving)
        x = x0
        for i in range(self.n_layer):
            keeps = saving and i >= self.v.checkpointed
            out, saved = self.block_forward(keeps)
            graph.blocks.append(saved)
            again = saving and not keeps and x is not x0
            graph.inputs.append(x if again else x0)
            if x is not x0 and not again:
                t.free(x)
            x = out
        self.passing = [x, *names]
        graph.inputs.append(t.alloc("activations.residual", t.size(0)))  # nobody needs what the last norm took
        self.head_forward(graph, saving)
        for i, saved in enumerate(graph.blocks):
            self.free_copies(saved, saving and i >= self.v.checkpointed)
        if not saving:
            t.free(*graph.head_copy)
        return graph

    def normed(self, saving: bool) -> tuple[Tensor, list[Tensor]]:
        """The last norm."""
        out, scale = self.norm()
        self.t.free(*self.passing, None if saving else scale)
        return out, [scale] if saving else []

    def cast_down(self) -> Tensor | None:
        return None

    def block_forward(self, saving: bool) -> tuple[Tensor, Saved]:
        t, s = self.t, Saved()
        self.attention_half(s, saving)
        h = self.mlp_half(s, saving)
        out = t.alloc("activations.residual", self.e(self.low))
        x3 = t.alloc("activations.residual", self.e(self.v.wide))
        t.free(s.middle, out)
        s.middle = None
        if not saving:
            t.free(h, s.gelu)
        return x3, s

    def attention_half(self, s: Saved, saving: bool) -> None:
        """x + skip·x0, then its attention; `s.middle` is the residual stream after it."""
        t, low = self.t, self.low
        t.at("forward.attention")
        x1 = t.alloc("activations.residual", self.e(self.v.wide))
        h, scale = self.norm()
        self.copy_weight("qk", s)
        self.cublas("forward")
        product = t.alloc("activations.attention", self.e(2 * low))
        turning = [t.alloc("activations.attention", self.e(2 * low)) for _ in range(2)]
        turned = t.alloc("activations.attention", self.e(2 * low))
        t.free(product, *turning)
        qk, qk_scale, wide = self.rms_norm(t.alloc("activations.norm", t.size(8, "B", "T", "H")), 2)
        t.free(wide)
        self.copy_weight("value", s)
        value = t.alloc("activations.attention", self.e(low))
        kind = self.attention.kind(saving)
        saved, side_by_side = self.attention.fused(kind, value, saving)
        self.copy_weight("proj", s)
        joined = t.alloc("activations.residual", self.e(low))
        t.free(turned, value if self.attention.padded(kind) else None)
        s.middle = t.alloc("activations.residual", self.e(self.v.wide))
        t.free(x1, joined)
        if saving:
            s.norm_1, s.heads = [scale, h], Heads(saved, side_by_side, [qk_scale, qk])
        else:
            t.free(scale, h, *saved, side_by_side, qk_scale, qk)

    def mlp_half(self, s: Saved, saving: bool) -> Tensor:
        t = self.t
        t.at("forward.mlp")
        h, scale = self.norm()
        self.copy_weight("fc", s)
        up = t.alloc("activations.mlp", self.e(4 * self.low))
        s.gelu = t.alloc("activations.mlp", self.e(4 * self.low))
        t.free(up)
        self.copy_weight("out", s)
        if saving:
            s.norm_2 = [scale, h]
        else:
            t.free(scale)
        return h

    def block_again(self) -> Saved:
        """A checkpointed block's second forward pass, up to the copy of its last weight."""
        s = Saved()
        self.attention_half(s, True)
        self.mlp_half(s, True)
        self.t.free(s.middle)
        s.middle = None
        return s

    # -- backward ------------------------------------------------------------------------------------------

    def backward(self, graph: Graph) -> None:
        t = self.t
        residual, _ = self.head_backward(graph)
        if graph.waiting:  # the head's gradient is whole; a later micro-batch's is added
            self.keep_gradient(graph.waiting[1])
        for i in reversed(range(self.n_layer)):
            if i < self.v.checkpointed:
                residual = self.recompute_and_backward(residual, graph.inputs[i])
                t.free(graph.inputs[i] if i and graph.inputs[i] is not graph.inputs[0] else None)
            else:
                residual = self.block_backward(residual, graph.blocks[i], graph.inputs[i])
        t.at("backward.embedding")
        t.free(self.skip_gradient)
        self.skip_gradient = None
        gradient = self.rms_backward(residual, 1, self.v.wide, [])
        t.free(*graph.embedding)
        half = t.alloc("temporaries", t.size(2, "V", "C")) if self.v.wide == 2 and self.v.cuda else None
        self.keep_gradient(t.alloc(self.gradients, t.size(4, "V", "C")))
        t.free(half, gradient)
        self.has_grads = True

    def rms_backward(self, incoming: Tensor, width: int, into: int, saved: list[Tensor]) -> Tensor:
        """Takes `incoming` over, of width·low bytes or the residual stream's; gives `into` bytes an element."""
        t, low = self.t, self.low if saved else self.v.wide
        t.free(t.alloc("temporaries", self.e(low * width)))
        out = t.alloc("temporaries", self.e(low * width))
        if into * width != low * width:
            full = t.alloc("temporaries", self.e(into * width))
            t.free(*saved, incoming, out)
            return full
        t.free(*saved, incoming)
        return out

    def norm_backward(self, incoming: Tensor, saved: list[Tensor], x: Tensor | None, residual: Tensor | None) -> Tensor:
        grad = self.rms_backward(incoming, 1, self.v.wide, saved)
        if residual is None:
            return grad
        self.t.free(grad)
        return residual

    def head_backward(self, graph: Graph) -> tuple[Tensor, Tensor]:
        """As nanoGPT's, but that the head's gradient is its own, and the norm's result its input."""
        t = self.t
        t.at("backward.loss")
        if graph.waiting:
            return self.norm_backward(graph.waiting[0], graph.final, None, None), graph.waiting[1]
        dlogits = self.loss_backward(graph.loss)
        t.at("backward.head")
        self.cublas("backward")
        half = self.weight_gradient("head")
        out = t.alloc("temporaries", self.e(self.low))
        t.free(dlogits, *graph.head_copy)
        gradient = self.cast_gradient("head", half)
        self.keep_gradient(gradient)
        return self.norm_backward(out, graph.final, None, None), gradient

    def block_backward_from(self, residual: Tensor, branch: Tensor, owned: bool, s: Saved, x: Tensor) -> Tensor:
        t, low = self.t, self.low
        t.at("backward.mlp")
        grad = self.linear_backward("out", branch if owned else None, 4, None, s.copies, 1)
        relu = t.alloc("temporaries", self.e(4 * low))
        t.free(grad, s.gelu)
        grad = self.linear_backward("fc", relu, 1, None, s.copies, 4)
        residual = self.norm_backward(grad, s.norm_2, None, residual)
        t.at("backward.attention")
        branch, owned = self.branch_gradient(residual, None)
        grad = self.linear_backward("proj", branch if owned else None, 1, s.heads.joined, s.copies, 1)
        incoming = self.attention_backward(grad, s)
        residual = self.norm_backward(incoming, s.norm_1, None, residual)
        return self.skip_backward(residual)

    def attention_backward(self, grad: Tensor, s: Saved) -> Tensor:
        """The gradient of the norm's result: the sum of those through queries and keys, and through values."""
        t, low = self.t, self.low
        kind, padded = self.v.attention, self.attention.padded(self.v.attention)
        grad, copies = self.attention.padded_gradient(grad)
        inside = t.alloc("workspace", t.size(1, "flash")) if kind in ("flash", "cudnn") else None
        heads = [t.alloc("temporaries", self.attention.head_size(kind)) for _ in range(3)]
        t.free(*s.heads.saved, grad, inside, *copies)
        for i in range(3 if padded else 0):
            head, heads[i] = heads[i], t.alloc("temporaries", self.e(low))
            t.free(head)
        dq, dk, dv = heads
        if copies:  # more than one padded head
            head, dv = dv, t.alloc("temporaries", self.e(low))
            t.free(head)
        through_value = self.linear_backward("value", dv, 1, None, s.copies, 1)
        joined = t.alloc("temporaries", self.e(2 * low))
        t.free(dq, dk)
        turned = self.rms_backward(joined, 2, low, s.heads.passing)
        product = t.alloc("temporaries", self.e(2 * low))
        rolled = t.alloc("temporaries", self.e(2 * low))
        t.free(product)
        product = t.alloc("temporaries", self.e(2 * low))
        t.free(turned, product)
        through_qk = self.linear_backward("qk", rolled, 1, None, s.copies, 2)
        total = t.alloc("temporaries", self.e(low))
        t.free(through_value, through_qk)
        return total

    def skip_backward(self, residual: Tensor) -> Tensor:
        """x + skip·x0: the gradients of the scalar and of x0, the latter summed over the blocks."""
        t = self.t
        products = [t.alloc("temporaries", self.e(self.v.wide)) for _ in range(2)]
        t.free(products[0])
        if self.skip_gradient is None:
            self.skip_gradient = products[1]
        else:
            t.free(products[1])
        return residual
