"""The ledger of a head whose loss is chunked (lm/loss.py): both gradients are made in the forward pass.

n is the number of tokens of a chunk. The loop is plain Python whether the model is compiled or not; compiled, what
is done to a chunk's logits is one fused kernel without copies.
"""

from foretrain.predict.timeline import Tensor, Timeline, Variant


def chunked_head(
    t: Timeline, v: Variant, hidden: Tensor | None, *, saving: bool, fused: bool, first: bool
) -> list[Tensor]:
    """Writes the loop; frees `hidden` where nobody keeps it; returns what waits for backward: the gradients of hidden and of the weight.

    `first`: no gradients are there yet, so that of the weight becomes `.grad`, to which wte's share is added in place.
    """
    low = 2 if v.half else 4
    copy = t.alloc("weight_copies", t.size(2, "V", "C")) if v.casts else None
    waiting = []
    if saving:
        weight = "gradients" if first else "activations.head"
        waiting = [t.alloc("activations.head", t.size(low, "B", "T", "C")), t.alloc(weight, t.size(4, "V", "C"))]
    logits = t.alloc("logits", t.size(low, "n", "V"))
    if v.half and not fused:
        t.free(t.alloc("logits", t.size(4, "n", "V")))
    if saving:
        # Where no kernel makes fp32 of half-precision factors, it is a cast (_weight_product in lm/loss.py).
        half = t.alloc("activations.head", t.size(2, "V", "C")) if v.half and not v.cuda else None
        t.free(t.alloc("activations.head", t.size(4, "V", "C")), half)
    t.free(logits, copy, hidden)
    return waiting
