"""The ledger of an eager step, backward: what is freed when, and which gradients and temporaries come to life.

The order is that of the autograd engine (torch/csrc/autograd/engine.cpp): nodes run in reverse order of their
making; a node's saved tensors die when it has run; a weight's gradient is cast and accumulated before the engine
goes on to the layer's input. Gradients that meet are added in place.
"""

from foretrain.predict.estimate.eager_forward import EagerForward, Graph, Saved
from foretrain.predict.timeline import Tensor


class EagerStep(EagerForward):
    """Forward and backward passes of a micro-batch, written into a timeline."""

    @property
    def gradients(self) -> str:
        """What a fresh weight gradient counts as: from the second micro-batch on it is added to .grad and dies."""
        return "temporaries" if self.has_grads else "gradients"

    def component_of(self, name: str) -> str:
        """The head's gradient waits for the embedding's. In half precision that is added to it, in place, so that it
        becomes .grad; in fp32 it is a transposed view, and their sum is a new tensor."""
        return "temporaries" if name == "head" and not self.v.half else self.gradients

    # -- backward ------------------------------------------------------------------------------------------

    def backward(self, graph: Graph) -> None:
        """The whole backward pass; gradients stay alive, everything saved is freed."""
        t = self.t
        residual, head_grad = self.head_backward(graph)
        for i in reversed(range(self.n_layer)):
            saved, self.cheap = graph.blocks[i], self.is_cheap(i)
            if i < self.v.checkpointed:
                residual = self.recompute_and_backward(residual, graph.inputs[i])
            else:
                residual = self.block_backward(residual, saved, graph.inputs[i])
        t.at("backward.embedding")
        t.free(*graph.embedding)
        position = t.alloc("temporaries", t.size(self.v.wide, "T", "C"))
        half = t.alloc("temporaries", t.size(2, "W", "C")) if self.v.wide == 2 else None
        self.keep_gradient(t.alloc(self.gradients, t.size(4, "W", "C")))
        t.free(position, half)
        # A CPU sums these in fp32 at once (model/embedding.py).
        half = t.alloc("temporaries", t.size(2, "V", "C")) if self.v.wide == 2 and self.v.cuda else None
        embedding = t.alloc("temporaries", t.size(4, "V", "C"))
        t.free(residual)
        total = head_grad if self.v.half or graph.waiting else t.alloc(self.gradients, t.size(4, "V", "C"))
        t.free(embedding, half, head_grad if total is not head_grad else None)
        self.keep_gradient(total)
        self.has_grads = True

    def keep_gradient(self, gradient: Tensor) -> None:
        """AccumulateGrad: the first gradient of a step becomes .grad, later ones are added to it and freed."""
        if self.has_grads:
            self.t.free(gradient)

    def vector_gradient(self, multiple_of_c: int = 1) -> None:
        self.keep_gradient(self.t.alloc(self.gradients, self.t.size(4 * multiple_of_c, "C")))

    def weight_gradient(self, name: str) -> Tensor:
        """The gradient of a matrix: computed in half precision, then cast to fp32."""
        if not self.v.half:
            return self.t.alloc(self.component_of(name), self.weight(name, 4))
        return self.t.alloc("temporaries", self.weight(name, 2))

    def cast_gradient(self, name: str, gradient: Tensor) -> Tensor:
        if not self.v.half:
            return gradient
        full = self.t.alloc(self.component_of(name), self.weight(name, 4))
        self.t.free(gradient)
        return full

    def linear_backward(
        self,
        name: str,
        incoming: Tensor | None,
        width: int,
        saved_input: Tensor | None,
        copies: dict[str, Tensor],
        bias: int,
    ) -> Tensor:
        """Both products of a linear layer: the gradient of its input (width·E bytes·low) and of its weight."""
        t = self.t
        self.cublas("backward")
        out = t.alloc("temporaries", self.e(width * self.low))
        half = self.weight_gradient(name)
        saved = [saved_input, copies.pop(name, None), copies.pop(f"{name}.bias", None)]
        if self.recomputed or (self.cheap and name != "proj"):  # a checkpoint hands its tensors out and keeps none
            t.free(*saved)
            saved = []
        if self.v.bias and self.v.cuda:
            t.pass_by("workspace", t.size(1, f"sums{bias}"))
        t.free(incoming, *saved)
        if self.v.bias:
            self.vector_gradient(bias)
        self.keep_gradient(self.cast_gradient(name, half))
        return out

    def norm_backward(self, incoming: Tensor, saved: list[Tensor], x: Tensor | None, residual: Tensor | None) -> Tensor:
        """Cast to fp32, LayerNorm's backward, and the sum with the residual's gradient, in place."""
        t = self.t
        if self.v.casts:
            full = t.alloc("temporaries", self.e(4))
            t.free(incoming)
            incoming = full
        grad = t.alloc("temporaries", self.e(self.v.wide))
        self.vector_gradient()
        if self.v.bias:
            self.vector_gradient()
        t.free(incoming, x, *saved)
        if residual is None:
            return grad
        t.free(grad)
        return residual

    def branch_gradient(self, residual: Tensor, mask: Tensor | None) -> tuple[Tensor, bool]:
        """The residual's gradient as a branch takes it: cast to half, and through the dropout's mask."""
        branch, owned = residual, False
        if self.v.casts:
            branch, owned = self.t.alloc("temporaries", self.e(2)), True
        return self.undropped(branch, owned, mask)

    def undropped(self, branch: Tensor, owned: bool, mask: Tensor | None) -> tuple[Tensor, bool]:
        """A gradient back through a dropout; `owned`: nobody else needs what comes in."""
        if mask is None:
            return branch, owned
        out = self.t.alloc("temporaries", self.e(self.low))
        self.t.free(mask, branch if owned else None)
        return out, True

    def block_backward(self, residual: Tensor, s: Saved, x: Tensor) -> Tensor:
        """One block; `residual` is the gradient of its output and becomes the gradient of its input."""
        branch, owned = self.branch_gradient(residual, s.mlp_mask)
        return self.block_backward_from(residual, branch, owned, s, x)

    def block_backward_from(self, residual: Tensor, branch: Tensor, owned: bool, s: Saved, x: Tensor) -> Tensor:
        t, low = self.t, self.low
        t.at("backward.mlp")
        if self.cheap:
            s.gelu = t.alloc("activations.mlp", self.e(4 * low))
            self.copy_weight("out", s)
        grad = self.linear_backward("out", branch if owned else None, 4, s.gelu, s.copies, 1)
        gelu = t.alloc("temporaries", self.e(4 * low))
        t.free(grad, s.fc)
        self.make_norm_again(s, "fc", s.norm_2)
        cast_2 = s.norm_2.pop()
        grad = self.linear_backward("fc", gelu, 1, cast_2, s.copies, 4)
        residual = self.norm_backward(grad, s.norm_2, s.middle, residual)

        t.at("backward.attention")
        branch, owned = self.branch_gradient(residual, s.attention_mask)
        grad = self.linear_backward("proj", branch if owned else None, 1, s.heads.joined, s.copies, 1)
        heads = self.attention.backward(grad, s.heads.saved)
        joined = t.alloc("temporaries", self.e(3 * low))
        t.free(*heads)
        self.make_norm_again(s, "attn", s.norm_1)
        cast_1 = s.norm_1.pop()
        grad = self.linear_backward("attn", joined, 1, cast_1, s.copies, 3)
        return self.norm_backward(grad, s.norm_1, x, residual)

    def make_norm_again(self, s: Saved, product: str, norm: list[Tensor]) -> None:
        """What `recompute_norm_gelu` did not keep: a norm's statistics and output, and the next weight's copy."""
        if self.cheap:
            out, cast, stats = self.norm_to_product(s, product, True)
            norm += [*stats, cast or out]
            self.t.free(out if cast else None)

    def recompute_and_backward(self, residual: Tensor, x: Tensor) -> Tensor:
        """A checkpointed block: its forward pass again, up to the last tensor that backward needs."""
        branch, owned = self.branch_gradient(residual, None)
        saved = self.block_again()
        branch, owned = self.undropped(branch, owned, saved.mlp_mask)
        self.recomputed = True
        residual = self.block_backward_from(residual, branch, owned, saved, x)
        self.recomputed = False
        return residual

    def head_backward(self, graph: Graph) -> tuple[Tensor, Tensor]:
        """Loss and head; returns the residual's gradient and the head's weight gradient, which waits for wte's."""
        t, low = self.t, self.low
        t.at("backward.loss")
        if graph.waiting:
            grad_hidden, grad_weight = graph.waiting
            return self.norm_backward(grad_hidden, graph.final, graph.inputs[-1], None), grad_weight
        dlogits = self.loss_backward(graph.loss)
        t.at("backward.head")
        self.cublas("backward")
        out = t.alloc("temporaries", self.e(low))
        half = self.weight_gradient("head")
        cast = graph.final.pop()
        t.free(dlogits, cast, *graph.head_copy)
        head_grad = self.cast_gradient("head", half)
        return self.norm_backward(out, graph.final, graph.inputs[-1], None), head_grad

    def loss_backward(self, saved: list[Tensor]) -> Tensor:
        """The gradient of the logits; the peak of most steps is here, inside nll_loss's backward."""
        t = self.t
        grad = t.alloc("logits", self.nv(4))
        if not self.v.half:
            dlogits = t.alloc("logits", self.nv(4))
            t.free(grad, *saved)
            return dlogits
        if self.v.cuda and self.v.casts:
            log_probs, *others = saved
            t.free(*others)
            half = t.alloc("logits", self.nv(2))
            t.free(grad)
            dlogits = t.alloc("logits", self.nv(2))
            t.free(half, log_probs)
            return dlogits
        full = t.alloc("logits", self.nv(4))
        t.free(grad, *saved)
        dlogits = t.alloc("logits", self.nv(2))
        t.free(full)
        return dlogits
