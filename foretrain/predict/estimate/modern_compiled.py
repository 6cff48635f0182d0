"""The ledger of a compiled step of the modern recipe (model/modern.py).

Its norms and its squared ReLU keep their results, which the partitioner cannot better, so the saved set is the eager
one; Inductor fuses all else into the kernels around the products.
"""

from foretrain.predict.estimate.chunked_head import chunked_head
from foretrain.predict.estimate.inductor import CompiledGraph, CompiledStep
from foretrain.predict.timeline import Tensor


class ModernCompiledStep(CompiledStep):
    """Writes compiled forward, backward and evaluation graphs into a timeline."""

    tied = False
    widths = (2, 1, 4)

    def norm_saved(self) -> list[Tensor]:
        """A norm keeps its result and a number a row."""
        t = self.t
        return [t.alloc("activations.norm", self.e(self.low)), t.alloc("activations.norm", t.size(4, "B", "T"))]

    def block_saved(self) -> list[Tensor]:
        t, low = self.t, self.low
        saved = [*self.norm_saved(), *self.copies((4,))]
        self.cublas("forward")
        saved += [
            t.alloc("activations.attention", self.e(2 * low)),
            t.alloc("activations.norm", t.size(8, "B", "T", "H")),
        ]
        if self.v.attention == "math":  # queries and keys, head by head, as its products read them
            saved += [t.alloc("activations.attention", self.e(low)) for _ in range(2)]
        padded = self.padded_heads(4)
        values = [] if padded else [t.alloc("activations.attention", self.e(low))]
        saved += [*self.copies((2,)), *values, *padded]
        saved += [t.alloc("activations.attention", self.e(low)), *self.attention_saved()]
        saved += [*self.copies((2,)), *self.norm_saved(), *self.copies((8, 8))]
        return [*saved, t.alloc("activations.mlp", self.e(4 * low))]

    def forward(self, saving: bool) -> CompiledGraph:
        if not saving:
            return self.evaluation()
        t = self.t
        graph = CompiledGraph()
        t.at("forward.embedding")
        self.compiles("training", learns=True)
        graph.head = [
            t.alloc("activations.residual", self.e(self.v.wide)),
            t.alloc("activations.norm", t.size(4, "B", "T")),
        ]
        t.at("forward.blocks")
        stream = t.alloc("temporaries", self.e(self.v.wide))
        for i in range(self.n_layer):
            if i < self.v.checkpointed:
                graph.blocks.append([t.alloc("activations.residual", self.e(self.v.wide))] if i else [])
                buffers = self.block_buffers()
                self.measure("forward", self.e(4 * self.low))
                t.free(*buffers)
            else:
                graph.blocks.append(self.block_saved())
                self.measure("forward")
        t.free(stream)
        t.at("forward.loss")
        graph.head += reversed(self.norm_saved())
        if self.v.chunked:
            graph.waiting = chunked_head(t, self.v, None, saving=True, first=not self.has_grads)
            return graph
        if self.v.casts:
            graph.head_copy.append(t.alloc("weight_copies", t.size(2, "V", "C")))
            self.measure("head")
        graph.logits = t.alloc("logits", self.nv(self.low))
        return graph

    def backward(self, graph: CompiledGraph) -> None:
        t = self.t
        x0, *head_saved = graph.head
        new: list[Tensor] = []
        if graph.waiting:
            t.at("backward.blocks")
            self.cublas("backward")
            out, head = graph.waiting
            t.free(head if self.has_grads else None)
        else:
            out, head, _ = self.head_backward(graph, head_saved.pop())
            if head is not None and self.v.casts:  # cast at once
                new.append(self.gradient(4, "V", "C"))
                t.free(head)
            elif head is not None:
                new.append(head)
        residual = [t.alloc("temporaries", self.e(self.v.wide)) for _ in range(2)]  # and the gradient of x0
        t.free(out, *head_saved)
        for i, saved in reversed(list(enumerate(graph.blocks))):
            new += self.block_backward(saved, again=i < self.v.checkpointed)
        t.at("backward.embedding")
        new.append(self.embedding_gradient(alone=True, over=None))
        t.free(x0, *residual)
        if self.v.wide == 2:
            new = self.in_fp32(new)
        if self.has_grads:
            t.free(*new)
        self.has_grads = True

    def block_backward(self, saved: list[Tensor], *, again: bool) -> list[Tensor]:
        t, low = self.t, self.low
        inputs = [*saved, *self.scores_ahead()] if again else []
        if again:
            t.at("backward.recompute")
            saved = self.block_saved()
        t.at("backward.blocks")
        *saved, squared = saved
        new = [self.matrix_gradient(16)]
        wide = t.alloc("temporaries", self.e(4 * low))
        self.measure("backward", self.e(4 * low))
        t.free(squared)
        new += [self.matrix_gradient(16), self.matrix_gradient(4)]
        t.free(wide)
        heads = [t.alloc("temporaries", self.e(low)) for _ in range(3)]
        if self.v.attention != "math":
            t.free(t.alloc("workspace", self.e(4 if self.v.half else 2)))
        t.free(*heads)
        new += [self.matrix_gradient(4), self.matrix_gradient(8)]
        t.free(*saved, *inputs)
        return new
