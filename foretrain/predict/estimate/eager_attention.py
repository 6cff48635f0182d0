"""The ledger of attention in eager mode: what each path of scaled_dot_product_attention makes, saves and frees.

The fused kernels keep their output and a log-sum-exp for each row. The math path (aten/src/ATen/native/transformers/
attention.cpp, _scaled_dot_product_attention_math) writes the B x H x T x T scores out, in fp32 whatever the dtype.
"""

from typing import NamedTuple

from foretrain.predict.estimate.sdpa import AttentionKind
from foretrain.predict.timeline import Size, Tensor, Timeline, Variant

HERE = "activations.attention"


class Heads(NamedTuple):
    """What attention's forward pass leaves behind.

    `saved`: for its backward; `joined`: the next product's input where that is a copy, which that product saves;
    `passing`: what dies with the names of the forward function.
    """

    saved: list[Tensor]
    joined: Tensor | None
    passing: list[Tensor]


class EagerAttention:
    """Attention of one micro-batch, between the joined q, k, v and the input of the next product."""

    def __init__(self, timeline: Timeline, variant: Variant) -> None:
        self.t, self.v = timeline, variant
        self.low = 2 if variant.half else 4

    def e(self, coefficient: int) -> Size:
        return self.t.size(coefficient, "B", "T", "C")

    def scores(self, coefficient: int) -> Size:
        """`coefficient` bytes for each score."""
        return self.t.size(coefficient, "B", "H", "T", "T")

    def kind(self, saving: bool) -> AttentionKind:
        return self.v.attention if saving else self.v.evaluation_attention

    def padded(self, kind: AttentionKind) -> bool:
        """FlashAttention takes heads of a multiple of 8 only; PyTorch pads others (pad_last_dim in attention.cpp)."""
        return kind == "flash" and self.t.symbols["A"] != self.t.symbols["C"]

    def forward(self, qkv: Tensor, saving: bool) -> Heads:
        """`saving`: with a graph for backward. `qkv` is taken over."""
        t, kind = self.t, self.kind(saving)
        if kind == "math":
            return self._written(qkv, saving)
        if kind == "bmm":
            return self._products(qkv, saving)
        saved, joined = self.fused(kind, qkv, saving)
        passing = [qkv] if self.padded(kind) else []
        if saving:
            return Heads(saved, joined, passing)
        out, lse, *inputs = saved
        t.free(lse)
        return Heads([], None, [*passing, *inputs, out, *([joined] if joined else [])])

    def head_size(self, kind: AttentionKind) -> Size:
        """Of q, k, v or the output as the kernel takes them."""
        return self.t.size(self.low, "B", "T", "A") if self.padded(kind) else self.e(self.low)

    def fused(self, kind: AttentionKind, source: Tensor, saving: bool) -> tuple[list[Tensor], Tensor | None]:
        """A fused kernel's output, its log-sum-exp and its inputs, which are copies of `source` where heads are padded;
        and the output side by side again, where that is a copy."""
        t, size, joined = self.t, self.head_size(kind), None
        inputs = [t.alloc(HERE, size) for _ in range(3)] if self.padded(kind) else [source]
        out, lse = t.alloc(HERE, size), t.alloc(HERE, t.size(4, "B", "H", "T"))
        if kind == "flash" and self.v.cuda and not (saving and self.v.dropout):
            t.pass_by("workspace", t.size(1, "split"))
        if self.padded(kind) and (t.symbols["H"] > 1 or self.v.keeps_logits):  # one head can be seen without a copy
            joined = t.alloc(HERE, self.e(self.low))
        return [out, lse, *inputs], joined

    def padded_gradient(self, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The gradient as the kernel takes it; and copies of it and the output as (B, T, H, D), which padded heads of
        more than one are not laid out as."""
        t, kind = self.t, self.v.attention
        if not self.padded(kind):
            return grad, []
        whole = t.alloc("temporaries", self.head_size(kind))
        t.free(grad)
        copies = [t.alloc("workspace", self.head_size(kind)) for _ in range(2)] if t.symbols["H"] > 1 else []
        return whole, copies

    def backward(self, grad: Tensor, saved: list[Tensor]) -> list[Tensor]:
        """dq, dk and dv; FlashAttention-2 also takes fp32 sums inside (Dao-AILab flash_api.cpp, mha_bwd)."""
        t, kind = self.t, self.v.attention
        if kind == "math":
            return self._written_backward(grad, saved)
        if kind == "bmm":
            return self._products_backward(grad, saved)
        grad, copies = self.padded_gradient(grad)
        heads = [t.alloc("temporaries", self.head_size(kind)) for _ in range(3)]
        if kind in ("flash", "cudnn"):
            t.free(t.alloc("workspace", t.size(1, "flash")))
        t.free(grad, *saved, *copies)
        return heads

    # -- batched products (model/attention.py) ----------------------------------------------------------------

    def group(self, count: int) -> Size:
        """`count` tensors of the scores that exist at one time."""
        return self.t.size(count * self.low, "halfgroup" if self.low == 2 else "group")

    def _products(self, qkv: Tensor, saving: bool) -> Heads:
        """q, k and v head by head, the probabilities where they are kept, the result, and it side by side again."""
        t, keeps = self.t, self.t.symbols["kept"] > 0
        kept = [t.alloc(HERE, self.e(3 * self.low))]
        if keeps:
            kept.append(t.alloc(HERE, t.size(self.low, "kept")))
        result = t.alloc(HERE, self.e(self.low))
        t.free(t.alloc("workspace", self.group(1 if keeps else 2)))
        joined = t.alloc(HERE, self.e(self.low))
        t.free(result)
        return Heads(kept, joined, [qkv]) if saving else Heads([], None, [qkv, *kept, joined])

    def _products_backward(self, grad: Tensor, saved: list[Tensor]) -> list[Tensor]:
        t = self.t
        dy, heads = t.alloc("temporaries", self.e(self.low)), [t.alloc("temporaries", self.e(self.low)) for _ in "qkv"]
        t.free(t.alloc("workspace", self.group(2 if t.symbols["kept"] else 3)))
        t.free(dy, grad, *saved)
        return heads

    # -- the math path -------------------------------------------------------------------------------------

    @property
    def lays_out(self) -> bool:
        """A product of batches copies factors whose batch and head cannot be seen as one dimension."""
        return self.t.symbols["B"] > 1 and self.t.symbols["H"] > 1

    def _written(self, qkv: Tensor, saving: bool) -> Heads:
        t, e = self.t, self.e(4)
        casts = [t.alloc(HERE, e) for _ in range(3)] if self.v.half else []
        factors = [t.alloc(HERE, e)]  # q, scaled
        names = [t.alloc(HERE, t.size(4, "T", "T"))]  # the causal mask
        factors.append(t.alloc(HERE, e))  # k, scaled
        dead = factors
        if self.lays_out:
            names.append(factors[0])
            scaled_k, factors = factors[1], [t.alloc(HERE, e) for _ in range(2)]
            scores = t.alloc(HERE, self.scores(4))
            t.free(scaled_k)
            dead = factors
        else:
            scores = t.alloc(HERE, self.scores(4))
            dead = factors[1:]
            names += factors[:1] if not saving else []
        if not saving:
            t.free(*dead)
        # Rows without a single finite score are looked for in a tensor of booleans (_safe_softmax).
        masked = t.alloc("workspace", self.scores(1))
        weights = [t.alloc(HERE, self.scores(4))]
        t.free(scores, masked)
        if saving and self.v.dropout:
            weights += [t.alloc(HERE, self.scores(4)), t.alloc("activations.dropout", self._mask())]
        if self.v.half:
            names.append(t.alloc(HERE, self.scores(2)))  # returned besides the output
        value, passing = self._value(qkv, casts)
        out = t.alloc(HERE, e)
        if self.v.half:
            names.append(out)
            out = t.alloc(HERE, self.e(2))
        t.free(*casts, *names)
        if saving:
            return self._joined([*factors, *weights, value], out, passing)
        t.free(*weights, value if value is not qkv else None)
        return self._joined([], out, [qkv])

    def _value(self, qkv: Tensor, casts: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """(v as the product saves it, what then still dies with the forward function's names)."""
        if self.lays_out:
            return self.t.alloc(HERE, self.e(4)), [qkv]
        return (casts.pop(), [qkv]) if casts else (qkv, [])

    def _joined(self, saved: list[Tensor], out: Tensor, passing: list[Tensor]) -> Heads:
        """The heads side by side again: a copy where there is more than one."""
        if self.t.symbols["H"] == 1:
            return Heads(saved, out, passing) if saved else Heads([], None, [*passing, out])
        joined = self.t.alloc(HERE, self.e(self.low))
        if self.v.keeps_logits:  # nanoGPT gives the copy the name that the output had
            self.t.free(out)
        else:
            passing = [*passing, out]
        return Heads(saved, joined, passing) if saved else Heads([], None, [*passing, joined])

    def _mask(self) -> Size:
        """Dropout's mask; on a CPU it is noise of the scores' own dtype."""
        return self.scores(1 if self.v.cuda else 4)

    def _written_backward(self, grad: Tensor, saved: list[Tensor]) -> list[Tensor]:
        """Back through the product, dropout, softmax, the product of q and k, their scaling, and the casts."""
        t, e = self.t, self.e(4)
        q, k, softmax, *dropout, v = saved
        for _ in range(self.v.half + self.lays_out):  # cast to fp32; laid out for the product
            following = t.alloc("temporaries", e)
            t.free(grad)
            grad = following
        dv, d_scores = t.alloc("temporaries", e), t.alloc("temporaries", self.scores(4))
        t.free(grad, v, *dropout[:1])
        for made_from in (*dropout[1:], softmax):
            before, d_scores = d_scores, t.alloc("temporaries", self.scores(4))
            if made_from is softmax and self.v.cuda:  # the gradient times the output
                t.pass_by("workspace", self.scores(4))
            t.free(before, made_from)
        heads = [dv, t.alloc("temporaries", e), t.alloc("temporaries", e)]
        t.free(d_scores, q, k)
        for _ in range(2):  # k, then q, scaled
            heads.insert(1, t.alloc("temporaries", e))
            t.free(heads.pop())
        if self.v.half:
            for _ in range(3):
                heads.append(t.alloc("temporaries", self.e(2)))
                t.free(heads.pop(0))
        if t.symbols["H"] > 1:  # two of the three are laid out anew
            t.free(t.alloc("temporaries", self.e(self.low)))
        return heads
