"""The ledger of an eager step, forward: the lifetime of every tensor, in the order in which PyTorch makes them.

Byte counts follow from the autograd formulas of PyTorch (tools/autograd/derivatives.yaml) and the cast lists of
autocast (aten/src/ATen/autocast_mode.h); `eager.py` has the backward pass.
Under autocast the residual stream, the LayerNorms and the loss are fp32 (4 B an element), matrix products and
what they save are half precision (2 B), and each matrix weight has a half-precision copy until its backward pass.

Known limits: temporaries inside cub, cuBLASLt and oneDNN, split-KV attention and reduction buffers are not
counted. Attention has a file of its own, eager_attention.py.
"""

from dataclasses import dataclass, field

from foretrain.predict.estimate.chunked_head import chunked_head
from foretrain.predict.estimate.eager_attention import EagerAttention, Heads
from foretrain.predict.timeline import Size, Tensor, Timeline, Variant


@dataclass
class Saved:
    """What one block keeps from its forward pass for its backward pass; None or [] where there is no such tensor."""

    norm_1: list[Tensor] = field(default_factory=list)
    heads: Heads = field(default_factory=lambda: Heads([], None, []))
    attention_mask: Tensor | None = None
    norm_2: list[Tensor] = field(default_factory=list)
    middle: Tensor | None = None
    fc: Tensor | None = None
    gelu: Tensor | None = None
    mlp_mask: Tensor | None = None
    copies: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Graph:
    """What a forward pass leaves behind for backward, and the logits where they are kept."""

    embedding: list[Tensor] = field(default_factory=list)
    blocks: list[Saved] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    final: list[Tensor] = field(default_factory=list)
    head_copy: list[Tensor] = field(default_factory=list)
    loss: list[Tensor] = field(default_factory=list)
    logits: Tensor | None = None
    waiting: list[Tensor] = field(default_factory=list)  # a chunked head's gradients, made with its loss


class EagerForward:
    """Writes the forward, backward, optimizer and evaluation passes into a timeline.

    Symbols of the timeline: B, T, C, H, V, L; W = block_size (the rows of wpe); h(L) parameters outside matrices.
    """

    norm_keeps_result = False  # a LayerNorm keeps its input

    def __init__(self, timeline: Timeline, variant: Variant, n_layer: int) -> None:
        self.t = timeline
        self.v = variant
        self.n_layer = n_layer
        self.attention = EagerAttention(timeline, variant)
        self.low = 2 if variant.half else 4  # bytes of an element in a matrix product
        self.has_grads = False  # from the second micro-batch of a step on, gradients are added in place
        self.workspaces: set[str] = set()
        self.cheap = False  # whether the block at hand makes norms and GELU again
        self.recomputed = False  # whether its forward pass has run again, within backward

    # -- sizes ---------------------------------------------------------------------------------------------

    def e(self, coefficient: int) -> Size:
        """`coefficient` bytes for each element of a B x T x C tensor."""
        return self.t.size(coefficient, "B", "T", "C")

    def nv(self, coefficient: int) -> Size:
        """`coefficient` bytes for each logit."""
        return self.t.size(coefficient, "B", "T", "V")

    def weight(self, name: str, bytes_per_element: int) -> Size:
        if name == "head":
            return self.t.size(bytes_per_element, "V", "C")
        return self.t.size(
            {"attn": 3, "qk": 2, "value": 1, "proj": 1, "fc": 4, "out": 4}[name] * bytes_per_element, "C", "C"
        )

    def loss_forward(self) -> list[Tensor]:
        """What cross-entropy saves: log-probabilities.

        On CUDA log_softmax keeps the dtype of the logits and nll_loss takes an fp32 copy (aten LossNLL.cpp); on a
        CPU autocast casts the logits to fp32 first.
        """
        t = self.t
        if not self.v.casts:
            return [t.alloc("logits", self.nv(4))]
        if self.v.cuda:
            return [t.alloc("logits", self.nv(2)), t.alloc("logits", self.nv(4))]
        cast = t.alloc("logits", self.nv(4))
        log_probs = t.alloc("logits", self.nv(4))
        t.free(cast)
        return [log_probs]

    # -- forward -------------------------------------------------------------------------------------------

    def copy_weight(self, name: str, saved: Saved) -> None:
        """The half-precision copy that autocast makes of a matrix weight and that backward needs."""
        if self.v.casts:
            saved.copies[name] = self.t.alloc("weight_copies", self.weight(name, 2))
            if self.v.bias:
                size = self.t.size({"attn": 6, "proj": 2, "fc": 8, "out": 2}[name], "C")
                saved.copies[f"{name}.bias"] = self.t.alloc("weight_copies", size)

    def cublas(self, thread: str) -> None:
        """cuBLAS keeps one workspace per handle: one for the main thread, one for autograd's."""
        if self.v.cuda and thread not in self.workspaces:
            self.workspaces.add(thread)
            self.t.alloc("workspace", self.t.size(1, "cuBLAS"))

    def normed(self, saving: bool) -> tuple[Tensor, list[Tensor]]:
        """LayerNorm: the output in fp32 and, where they are saved, mean and 1/std."""
        out = self.t.alloc("activations.norm", self.e(self.v.wide))
        stats = [self.t.alloc("activations.norm", self.t.size(4, "B", "T")) for _ in range(2)]
        if saving:
            return out, stats
        self.t.free(*stats)
        return out, []

    def cast_down(self) -> Tensor | None:
        """Autocast's copy of a norm's output."""
        return self.t.alloc("activations.norm", self.e(2)) if self.v.casts else None

    def drop_out(self, x: Tensor, saving: bool) -> tuple[Tensor, Tensor | None]:
        """Dropout: a new tensor and a mask of 1 B; on a CPU the noise has the tensor's own dtype."""
        if not (self.v.dropout and saving):
            return x, None
        out = self.t.alloc(x.component, x.size)
        mask = self.t.alloc("activations.dropout", self.e(1) if self.v.cuda else x.size)
        self.t.free(x)
        return out, mask

    def block_forward(self, saving: bool) -> tuple[Tensor, Saved]:
        """One block; its caller holds the input. Returns the output and what was saved (nothing in evaluation)."""
        t, s = self.t, Saved()
        self.attention_branch(s, saving)
        ln_2, cast = self.mlp_branch(s, saving)
        out = t.alloc("activations.residual", self.e(self.low))
        if not saving or self.cheap:
            t.free(s.gelu)
        out, s.mlp_mask = self.drop_out(out, saving)
        if saving and ln_2:
            s.norm_2.append(cast or ln_2)
        if cast or not saving:
            t.free(ln_2)
        x = t.alloc("activations.residual", self.e(self.v.wide))
        t.free(out)
        if not saving:
            t.free(s.middle)
        return x, s

    def block_again(self) -> Saved:
        """A checkpointed block's second forward pass: it ends with the last tensor that backward needs.

        That is the MLP's last mask where there is dropout, else the copy of its last weight: the product is not made.
        """
        t, s = self.t, Saved()
        self.attention_branch(s, True)
        ln_2, cast = self.mlp_branch(s, True)
        if self.v.dropout:
            out, s.mlp_mask = self.drop_out(t.alloc("activations.residual", self.e(self.low)), True)
            t.free(out)
        if ln_2:
            s.norm_2.append(cast or ln_2)
        if cast:
            t.free(ln_2)
        return s

    def norm_to_product(self, s: Saved, name: str, keeping: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """A norm, the half-precision copy of what it gives, and of the next product's weight; and the statistics."""
        out, stats = self.normed(keeping)
        cast = self.cast_down()
        self.copy_weight(name, s)
        return out, cast, stats

    def attention_branch(self, s: Saved, saving: bool) -> None:
        """Up to the residual stream between attention and MLP, `s.middle`."""
        t, keeping = self.t, saving and not self.cheap
        t.at("forward.attention")
        ln_1, cast, s.norm_1 = self.norm_to_product(s, "attn", keeping)
        self.cublas("forward")
        qkv = t.alloc("activations.attention", self.e(3 * self.low))
        if not keeping:
            t.free(cast, ln_1 if saving else None)
        s.heads = self.attention.forward(qkv, saving)
        self.copy_weight("proj", s)
        out, s.attention_mask = self.drop_out(t.alloc("activations.residual", self.e(self.low)), saving)
        t.free(*s.heads.passing)
        if keeping:
            s.norm_1.append(cast or ln_1)
        if not saving or (cast and keeping):
            t.free(ln_1)
        s.middle = t.alloc("activations.residual", self.e(self.v.wide))
        t.free(out)

    def mlp_branch(self, s: Saved, saving: bool) -> tuple[Tensor | None, Tensor | None]:
        """Up to the copy of the MLP's last weight; returns the norm's output and its half-precision copy."""
        t, keeping = self.t, saving and not self.cheap
        t.at("forward.mlp")
        ln_2, cast, s.norm_2 = self.norm_to_product(s, "fc", keeping)
        s.fc = t.alloc("activations.mlp", self.e(4 * self.low))
        if not keeping:
            t.free(cast, ln_2 if saving else None)
        s.gelu = t.alloc("activations.mlp", self.e(4 * self.low))
        if not saving:
            t.free(s.fc)
        self.copy_weight("out", s)
        return (None, None) if saving and not keeping else (ln_2, cast)

    def embed(self, saving: bool) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """(the first block's input, names that live until forward returns, what embedding and dropout save)."""
        t = self.t
        t.at("forward.embedding")
        wide = self.v.wide
        token = t.alloc("activations.residual", self.e(wide))
        position = t.alloc("activations.residual", t.size(wide, "T", "C"))
        x, mask = self.drop_out(t.alloc("activations.residual", self.e(wide)), saving)
        if self.v.keeps_logits:  # nanoGPT's forward names them tok_emb and pos_emb
            return x, [token, position], [mask] if mask else []
        t.free(token, position)
        return x, [], [mask] if mask else []

    def forward(self, saving: bool) -> Graph:
        """One micro-batch through the model and the loss; `saving`: with a graph for backward."""
        t = self.t
        graph = Graph()
        x, names, graph.embedding = self.embed(saving)
        for i in range(self.n_layer):
            self.cheap = self.is_cheap(i)
            out, saved = self.block_forward(saving and i >= self.v.checkpointed)
            graph.blocks.append(saved)
            graph.inputs.append(x)
            if not saving:
                t.free(x)
            x = out
        graph.inputs.append(x)
        self.head_forward(graph, saving)
        t.free(*names)
        for i, saved in enumerate(graph.blocks):  # autocast's cache is emptied when the context ends
            self.free_copies(saved, saving and i >= self.v.checkpointed)
        if not saving:
            t.free(*graph.head_copy)
        return graph

    def is_cheap(self, block: int) -> bool:
        """A block that is made again whole has nothing to do so within."""
        return self.v.cheap and block >= self.v.checkpointed

    def free_copies(self, saved: Saved, saving: bool) -> None:
        """Of a block's weight copies those that nothing was saved of."""
        for name in list(saved.copies):
            if not saving or (self.v.cheap and not name.startswith("proj")):
                self.t.free(saved.copies.pop(name))

    def head_forward(self, graph: Graph, saving: bool) -> None:
        """Last LayerNorm, head and cross-entropy."""
        t = self.t
        t.at("forward.loss")
        x = graph.inputs[-1]
        ln_f, stats = self.normed(saving)
        if not saving:
            t.free(x)
        cast = self.cast_down()
        if self.v.chunked:
            if cast:
                t.free(ln_f)
            self.cublas("forward")
            kept = saving and self.norm_keeps_result
            hidden = None if kept else cast or ln_f
            graph.waiting = chunked_head(t, self.v, hidden, saving=saving, fused=False, first=not self.has_grads)
            graph.final = [*stats, ln_f] if kept else stats
            return
        if self.v.casts:
            graph.head_copy = [t.alloc("weight_copies", self.weight("head", 2))]
        graph.logits = t.alloc("logits", self.nv(self.low))
        if not saving:
            t.free(cast)
        dies = cast is not None or not saving
        if dies and not self.v.keeps_logits:
            t.free(ln_f)
        if self.v.master and self.v.half:  # no autocast, so the model casts by itself
            full = t.alloc("logits", self.nv(4))
            t.free(graph.logits)
            graph.logits = full
        graph.loss = self.loss_forward()
        if not saving:
            t.free(*graph.loss)
            graph.loss = []
        graph.final = [*stats, cast or ln_f] if saving else []
        if dies and self.v.keeps_logits:  # nanoGPT's forward has it under the name x until it returns
            t.free(ln_f)
        if not self.v.keeps_logits:
            t.free(graph.logits)
            graph.logits = None
