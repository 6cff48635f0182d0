"""What a traced tensor is, in the field's words, where no module or parameter names it: a text `tensor.ROLE`.

Told from the op that made it, its shape, and whether it was born in a forward or a backward pass. Compiled kernels
belong to no module, so for them this is all that there is.
"""

from foretrain.predict.trace.record import Allocation

# Components whose tensors always have a name of their own, or one role.
BY_COMPONENT = {
    "weights": "weight", "gradients": "gradient", "optimizer": "moment", "batch": "batch", "workspace": "workspace",
    "weight_copies": "weight_copy", "buffers": "buffer", "activations.dropout": "dropout_mask",
}  # fmt: skip


def role_of(a: Allocation, component: str, n_embd: int, *, forward: bool) -> str:
    """The id of the role. `component`: the estimate's row that it counts for; `forward`: born in a forward pass."""
    if component == "logits":
        return _of_logits(a, forward)
    if component in BY_COMPONENT:
        return BY_COMPONENT[component]
    if not forward:
        return "activation_gradient"
    return _of_activation(a, n_embd)


def _of_logits(a: Allocation, forward: bool) -> str:
    """Of the head's output and what the loss makes of it."""
    if forward:
        if "log_softmax" in a.op:
            return "log_probabilities"
        return "logits_fp32" if "_to_copy" in a.op and a.dtype == "float32" else "logits"
    if "nll_loss" in a.op and "log_softmax" not in a.op:
        return "log_probabilities_gradient"
    # What a model returns beside the loss has a gradient, too: autograd fills it with zeros, in the shape returned.
    return "returned_logits_gradient" if len(a.shape) > 2 else "logits_gradient"


def _of_activation(a: Allocation, n_embd: int) -> str:
    """Of what a forward pass leaves for the backward pass."""
    width = a.shape[-1] if a.shape else 0
    if "scaled_dot_product" in a.op or "flash" in a.op or "efficient_attention" in a.op:
        return "attention_output" if a.dtype != "float32" or len(a.shape) > 3 else "attention_statistics"
    if "gelu" in a.op:
        return "mlp_activation"
    if width == 3 * n_embd:
        return "attention_qkv"
    if width == 4 * n_embd:
        return "mlp_hidden"
    if width == n_embd:
        if a.op in ("mm", "addmm"):
            return "projection"
        return "residual" if a.dtype == "float32" else "norm_output"
    return "norm_statistics" if width == 1 else "activation"
