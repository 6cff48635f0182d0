"""The ledger of a compiled training step (torch.compile with Inductor, default mode).

The saved set is that of the min-cut partitioner: per block it is as large as in eager mode (36 B per element of
B x T x C in half precision), but a LayerNorm saves its normalised fp32 output instead of its input. The loss is
fused: no fp32 copies of the logits. Where the model returns only the loss, the gradient of the logits is written
over the logits; nanoGPT returns them, so autograd also makes a zero tangent of their size. All gradients of a
micro-batch live until its backward graph ends, and only then are they added to `.grad`.

Where the numbers come from: Inductor's own wrapper code, executed on fake tensors for an RTX 4070 with torch 2.13
(the way is described in docs/memory.md), and what PyTorch's CUDA build allocated (docs/cuda-truth.md). Known limits:
which short-lived buffers Inductor reuses is approximated; what padded matmuls keep (vocabularies that are not a
multiple of 8), max-autotune and CUDA graphs are not modelled. Where attention takes the math path, whose scores
Inductor fuses and reorders, traces are met to about a tenth (predict/memory.py widens).
"""

from dataclasses import dataclass, field

from foretrain.predict.estimate.chunked_head import chunked_head, divided_head, divides
from foretrain.predict.estimate.padding import Product, time_padding
from foretrain.predict.timeline import Size, Tensor, Timeline, Variant

# Of a sum over so few columns Inductor tries several ways to run it (triton_heuristics.py, persistent_reduction: of one
# over 256 and more, rounded up to a power of two, it takes the first).
FEW_COLUMNS = 128


@dataclass
class CompiledGraph:
    """What the forward graph saved: per block in order, the head's share, and the logits if they are kept."""

    blocks: list[list[Tensor]] = field(default_factory=list)
    position: list[Tensor] = field(default_factory=list)
    head: list[Tensor] = field(default_factory=list)
    head_copy: list[Tensor] = field(default_factory=list)
    logits: Tensor | None = None
    waiting: list[Tensor] = field(default_factory=list)  # a chunked head's gradients, made with its loss


class CompiledStep:
    """Writes compiled forward, backward and evaluation graphs into a timeline. Symbols as in simulated_run.py."""

    tied = True  # whether the head's weight is the embedding's
    widths = (3, 1, 4)  # of a block's products of n_embd columns

    def __init__(self, timeline: Timeline, variant: Variant, n_layer: int) -> None:
        self.t = timeline
        self.v = variant
        self.n_layer = n_layer
        self.low = 2 if variant.half else 4
        self.has_grads = False
        self.workspaces: set[str] = set()
        self.cheap = False  # whether the block at hand makes norms and GELU again
        self.measured: set[str] = set()

    def zero_grad(self) -> None:
        """Gradients end."""
        self.t.free_component("gradients")
        self.has_grads = False

    def measure(self, kernels: str, *changed: Size) -> None:
        """The first time that a kernel runs which can run in two ways, Inductor measures both, with a buffer as large
        as the card's cache and a copy of each tensor that the kernel changes, `changed`.

        A copy for which there is no room below the run's peak goes to the host. The first way's buffer is part of that
        peak for the second (torch/_inductor/runtime/triton_heuristics.py, copy_args_to_cpu_if_needed).
        """
        cache = self.t.size(1, "L2")
        if kernels in self.measured or not cache.nbytes:
            return
        self.measured.add(kernels)
        for _ in range(2 if changed else 1):
            room, copied = self.t.room, []
            for size in changed:
                if size.nbytes <= room:
                    room -= size.nbytes
                    copied.append(size)
            self.t.free(*[self.t.alloc("measuring", size) for size in copied])
            buffer = self.t.alloc("measuring", cache)
            self.t.free(*[self.t.alloc("measuring", size) for size in copied])
            self.t.free(buffer)

    def compiles(self, graph: str, *, learns: bool) -> None:
        """The first time that a graph is needed, Inductor times its products with unaligned sides."""
        if graph in self.measured or not self.t.size(1, "L2").nbytes:
            return
        self.measured.add(graph)
        after = self.t.moment
        self.t.at("compile")
        self.cublas("forward")
        products = self.products(learns=learns)
        time_padding(self.t, products + [each for one in products if learns for each in one.backward], self.low)
        self.t.at(after)

    def products(self, *, learns: bool) -> list[Product]:
        """Of a forward pass, without those of attention's kernels."""
        s = self.t.symbols
        rows, C, T = s["B"] * s["T"], s["C"], s["T"]
        found = [Product(rows, C, n * C) for n in self.widths] + [Product(rows, 4 * C, C)]
        head = s["n"] if self.v.chunked else s["m"] if learns and divides(self.t, self.v) else rows
        found.append(Product(min(head, rows), C, s["V"]))
        if (self.v.attention if learns else self.v.evaluation_attention) == "math":
            found += [Product(T, s["D"], T, s["B"] * s["H"]), Product(T, T, s["D"], s["B"] * s["H"])]
        return found

    def e(self, coefficient: int) -> Size:
        return self.t.size(coefficient, "B", "T", "C")

    def nv(self, coefficient: int) -> Size:
        return self.t.size(coefficient, "B", "T", "V")

    def scores(self, coefficient: int) -> Size:
        return self.t.size(coefficient, "B", "H", "T", "T")

    def cc(self, coefficient: int) -> Size:
        return self.t.size(coefficient, "C", "C")

    def cublas(self, thread: str) -> None:
        if self.v.cuda and thread not in self.workspaces:
            self.workspaces.add(thread)
            self.t.alloc("workspace", self.t.size(1, "cuBLAS"))

    # -- forward -------------------------------------------------------------------------------------------

    def block_saved(self) -> list[Tensor]:
        """What one block keeps for backward, in the order in which it is made."""
        t, low = self.t, self.low
        saved = self.product_input((6,))
        product = t.alloc("activations.attention", self.e(3 * low))
        self.cublas("forward")
        padded = self.padded_heads(4)
        t.free(product if padded else None)
        saved += [*([] if padded else [product]), *padded, t.alloc("activations.attention", self.e(low))]
        saved += self.attention_saved()
        saved += [*self.copies((2,)), *self.mask(), *self.product_input((8,))]
        if self.cheap:
            saved.append(t.alloc("activations.mlp", self.e(4 * low)))
            t.free(t.alloc("activations.mlp", self.e(4 * low)), *self.copies((8,)))
            return saved + self.mask()
        saved += self.copies((8,))
        saved += [t.alloc("activations.mlp", self.e(4 * low)) for _ in range(2)]
        return saved + self.mask()

    def padded_heads(self, count: int) -> list[Tensor]:
        """Queries, keys, values and output of flash attention, where a head's width is not a multiple of 8: it works on
        copies that are wider, and they are kept."""
        if self.v.attention != "flash" or self.t.symbols["A"] == self.t.symbols["C"]:
            return []
        return [self.t.alloc("activations.attention", self.t.size(self.low, "B", "T", "A")) for _ in range(count)]

    def product_input(self, copies: tuple[int, ...]) -> list[Tensor]:
        """What the norm before a product keeps and the product's weight; made again, the norm's input alone."""
        if not self.cheap:
            return [*self.norm_saved(), *self.copies(copies)]
        kept = self.t.alloc("activations.residual", self.e(self.v.wide))
        self.t.free(self.t.alloc("activations.norm", self.e(self.low)), *self.copies(copies))
        return [kept]

    def attention_saved(self) -> list[Tensor]:
        """A log-sum-exp for each row; the math path's softmax, and with dropout its mask and what it lets through."""
        t = self.t
        if self.v.attention == "bmm":
            return [t.alloc("activations.attention", t.size(self.low, "kept"))]
        if self.v.attention != "math":
            return [t.alloc("activations.attention", t.size(4, "B", "H", "T"))]
        coefficients = (4, 4, 1) if self.v.dropout else (4,)
        return [t.alloc("activations.attention", self.scores(c)) for c in coefficients]

    def norm_saved(self) -> list[Tensor]:
        """LayerNorm: the normalised fp32 output, 1/std, and the linear layer's input.

        Of a half-precision stream what was added to it before the norm is kept, with the mean and 1/std.
        """
        t = self.t
        if self.v.wide == 2:
            return [
                t.alloc("activations.residual", self.e(2)),
                *(t.alloc("activations.norm", t.size(4, "B", "T")) for _ in range(2)),
                t.alloc("activations.norm", self.e(2)),
            ]
        return [
            t.alloc("activations.norm", self.e(4)),
            t.alloc("activations.norm", t.size(4, "B", "T")),
            t.alloc("activations.norm", self.e(self.low)),
        ]

    def copies(self, coefficients: tuple[int, ...]) -> list[Tensor]:
        return [self.t.alloc("weight_copies", self.cc(c)) for c in coefficients] if self.v.casts else []

    def mask(self) -> list[Tensor]:
        return [self.t.alloc("activations.dropout", self.e(1))] if self.v.dropout else []

    def forward(self, saving: bool) -> CompiledGraph:
        """One micro-batch through the forward graph."""
        if not saving:
            return self.evaluation()
        t = self.t
        graph = CompiledGraph()
        t.at("forward.embedding")
        self.compiles("training", learns=True)
        graph.position = self.position()
        graph.head += self.mask()
        t.at("forward.blocks")
        # Branch outputs that wait to be added to the residual stream.
        whole = self.v.checkpointed == self.n_layer
        passing = [] if whole or self.v.cheap else [t.alloc("temporaries", self.e(3 * self.low))]
        for i in range(self.n_layer):
            self.cheap = self.v.cheap and i >= self.v.checkpointed
            if i < self.v.checkpointed:
                graph.blocks.append([t.alloc("activations.residual", self.e(self.v.wide))])
                buffers = self.block_buffers()
                self.measure("forward", self.e(4 * self.low))
                t.free(*buffers)
            else:
                graph.blocks.append(self.block_saved())
                self.measure("forward")
        t.free(*passing)
        t.at("forward.loss")
        graph.head += self.norm_saved()
        if self.v.chunked:
            if whole:  # traces keep the last norm's input alone, as they do the blocks'
                t.free(graph.head.pop(-3))
            graph.waiting = chunked_head(t, self.v, graph.head.pop(), saving=True, first=not self.has_grads)
            return graph
        if divides(t, self.v):
            graph.waiting = divided_head(t, self.v, graph.head.pop())
            return graph
        if self.v.casts:
            graph.head_copy.append(t.alloc("weight_copies", t.size(2, "V", "C")))
            self.measure("head")
        graph.logits = t.alloc("logits", self.nv(self.low))
        return graph

    def position(self) -> list[Tensor]:
        """The positions' embeddings, where the partitioner keeps both embeddings and not the first norm's output, which
        is less of one or two rows, and behind a dropout."""
        if (self.t.symbols["B"] < 3 or self.v.dropout) and not self.v.checkpointed:
            return []
        return [self.t.alloc("activations.residual", self.t.size(self.v.wide, "T", "C"))]

    def evaluation(self) -> CompiledGraph:
        """The evaluation graph: one set of buffers for all blocks, then the logits; nothing is saved."""
        t, low = self.t, self.low
        t.at("forward.blocks")
        self.compiles("evaluating", learns=False)
        self.first_block()
        residual = t.alloc("temporaries", self.e(self.v.wide))
        t.free(*self.block_buffers(), residual)
        t.at("forward.loss")
        out = t.alloc("temporaries", self.e(low))
        if self.v.chunked:
            chunked_head(t, self.v, out, saving=False, first=not self.has_grads)
            return CompiledGraph()
        copy = [t.alloc("weight_copies", t.size(2, "V", "C"))] if self.v.casts else []
        logits = t.alloc("logits", self.nv(low))
        t.free(out, *copy)
        if self.v.keeps_logits:
            return CompiledGraph(logits=logits)
        t.free(logits)
        return CompiledGraph()

    def first_block(self) -> None:
        """What is there where an evaluation's first GELU, which is written over its input, is measured."""
        t, low = self.t, self.low
        self.cublas("forward")
        later = (low,) if self.n_layer > 1 else ()  # a buffer that the next block takes over
        there = self.copies((8,) if later else ())
        there += [t.alloc("temporaries", self.e(c)) for c in (*later, low, 4 * low)]
        self.measure("evaluation", self.e(4 * low))
        t.free(*there)

    def block_buffers(self) -> list[Tensor]:
        """The buffers that blocks share when nothing is saved; from three blocks on, the MLP's stays mapped."""
        low = self.low
        copies = self.copies((8,))
        self.cublas("forward")
        coefficients = (low, low, 3 * low, low) if self.n_layer > 2 else (low, low)
        mlp = [self.t.alloc("temporaries", self.e(c)) for c in (*coefficients, 4 * low)]
        if self.v.evaluation_attention == "math":
            mlp.append(self.t.alloc("temporaries", self.scores(4)))
        return mlp + copies

    # -- backward ------------------------------------------------------------------------------------------

    def backward(self, graph: CompiledGraph) -> None:
        """The backward graph; the gradients of the micro-batch are its outputs."""
        t = self.t
        head_saved = graph.head
        head_grad: Tensor | None = None
        late: list[Tensor] = []
        if graph.waiting:
            t.at("backward.blocks")
            self.cublas("backward")
            out, head_grad = graph.waiting
        else:
            out, head_grad, late = self.head_backward(graph, head_saved.pop())
        residual = t.alloc("temporaries", self.e(self.v.wide))
        # The stream's gradient as products read it: in half precision, or through a dropout.
        branch = [t.alloc("temporaries", self.e(self.low))] if self.v.casts or self.v.dropout else []
        t.free(out, *head_saved)
        new = [self.gradient(4, "C")]
        for i, saved in reversed(list(enumerate(graph.blocks))):
            self.cheap = self.v.cheap and i >= self.v.checkpointed
            new += self.block_backward(saved, again=i < self.v.checkpointed)
        t.at("backward.embedding")
        t.free(*graph.position)
        new.append(self.gradient(4, "W", "C"))
        over = head_grad if graph.waiting and not (self.v.chunked or self.v.half) else None
        new.append(self.embedding_gradient(alone=self.v.chunked, over=over))
        t.free(None if over else head_grad, residual, *branch, *late)
        if self.v.wide == 2:
            new = self.in_fp32(new)
        if self.has_grads:
            t.free(*new)
        self.has_grads = True

    def embedding_gradient(self, *, alone: bool, over: Tensor | None) -> Tensor:
        """`alone`: in a graph without the head, so that nothing is added to it there. `over`: the head's, if the sum of
        both is written over it."""
        t = self.t
        alone = alone and self.v.wide == 4
        table = self.gradient(4, "V", "C") if alone else t.alloc("temporaries", t.size(4, "V", "C"))
        self.measure("embedding")
        if t.symbols["C"] <= FEW_COLUMNS:
            self.measure("embedding.sum", self.e(self.v.wide), t.size(4, "V", "C"))
        if alone:
            return table
        t.free(over)
        found = self.gradient(4, "V", "C")
        if self.v.half:  # a kernel adds it to the head's, or casts it
            self.measure("sum")
        t.free(table)
        return found

    def head_backward(self, graph: CompiledGraph, cast: Tensor) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """The gradients of the head's input and of its weight. The weight's, where it is the embedding's and nothing is
        cast, is a product that adds to the embedding's gradient (addmm), at the end of the graph: what it is made from
        stays until then, and is returned last.

        `cast`: the head's saved input.
        """
        t, low = self.t, self.low
        t.at("backward.loss")
        tangent, dlogits = None, None
        if self.v.keeps_logits:
            tangent = t.alloc("logits", self.nv(low))
            dlogits = t.alloc("logits", self.nv(low))
        t.at("backward.head")
        self.cublas("backward")
        t.free(tangent)
        dlogits = dlogits or graph.logits
        assert dlogits is not None
        if self.tied and not (self.v.casts or self.v.pieces):
            return t.alloc("temporaries", self.e(low)), None, [dlogits, cast]
        head_grad = t.alloc("temporaries" if self.v.half else "gradients", t.size(low, "V", "C"))
        t.free(cast)
        out = t.alloc("temporaries", self.e(low))
        t.free(*graph.head_copy, dlogits)
        return out, head_grad, []

    def block_backward(self, saved: list[Tensor], *, again: bool) -> list[Tensor]:
        """One block, made `again` where it is checkpointed: frees what it saved, returns its gradients."""
        t, low = self.t, self.low
        if again:
            t.at("backward.recompute")
            pending = [t.alloc("temporaries", self.e(5 * low)), *self.scores_ahead()]  # products that Inductor puts off
            inputs, saved = [*saved, *pending], self.block_saved()
        else:  # made again: the GELU's output, beside its gradient; products of these are put off
            inputs = [t.alloc("temporaries", self.e(4 * low)) for _ in range(2)] if self.cheap else []
        t.at("backward.blocks")
        attention = 4 if self.v.half else 2
        late, early = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        new = [self.matrix_gradient(16)]
        # Written over the gradient that it reads. (With biases and few rows it is in one kernel with the sum that is a
        # bias's gradient, which runs in one way only: then this is too much.)
        self.measure("backward", self.e(4 * low))
        t.free(*early[-2:])
        new.append(self.matrix_gradient(16))
        t.free(*early[:-2])
        new.append(self.matrix_gradient(4))
        heads = [t.alloc("temporaries", self.e(low)) for _ in range(3)]
        if self.v.attention == "math":  # the scores' gradient, which softmax's is written over
            t.free(t.alloc("temporaries", self.scores(4)))
        else:
            t.free(t.alloc("workspace", self.e(attention)))
        t.free(*heads)
        new.append(self.matrix_gradient(12))
        t.free(*late, *inputs)
        biases = (4, 4, 12, 4, 16, 4) if self.v.bias else ()
        return new + [self.gradient(c, "C") for c in (4, 4, *biases)]

    def scores_ahead(self) -> list[Tensor]:
        """Of blocks before one that is made again: Inductor makes their scores in one kernel with this one's."""
        ahead = min(2, self.n_layer - 1) if self.v.attention == "math" else 0
        return [self.t.alloc("temporaries", self.scores(4)) for _ in range(ahead)]

    def matrix_gradient(self, coefficient: int) -> Tensor:
        half = self.t.alloc("temporaries", self.cc(coefficient // 2)) if self.v.casts else None
        self.t.free(half)
        return self.gradient(coefficient, "C", "C")

    def gradient(self, coefficient: int, *factors: str) -> Tensor:
        """A gradient of 4 bytes an element; half of it where the weights are half precision."""
        if self.v.wide == 2:
            return self.t.alloc("temporaries", self.t.size(coefficient // 2, *factors))
        return self.t.alloc("gradients", self.t.size(coefficient, *factors))

    def in_fp32(self, gradients: list[Tensor]) -> list[Tensor]:
        """Autograd casts what the backward graph returned, one after the other (grad_dtype in model/master.py)."""
        found = []
        for half in gradients:
            coefficient, *factors = half.size.formula.split("·")
            found.append(self.t.alloc("gradients", self.t.size(2 * int(coefficient), *factors)))
            self.t.free(half)
        return found
