"""The ledger of a head whose loss is chunked, by foretrain (model/loss.py) or by Inductor (its auto_chunker): both
gradients are made in the forward pass.

n is the number of tokens of a chunk. foretrain's loop is plain Python also where the model is compiled; what is
done to a chunk's logits is then one fused kernel without copies. Inductor makes eight chunks, m tokens each, in the
graph (torch/_inductor/fx_passes/auto_chunker).
"""

from foretrain.predict.timeline import Tensor, Timeline, Variant


def chunked_head(t: Timeline, v: Variant, hidden: Tensor | None, *, saving: bool, first: bool) -> list[Tensor]:
    """Writes the loop; frees `hidden` where nobody keeps it.

    Returns what waits for backward: the gradients of hidden and of the weight.
    `first`: no gradients are there yet, so that of the weight becomes `.grad`, to which wte's share is added in place.
    """
    low = 2 if v.half else 4
    copy = t.alloc("weight_copies", t.size(2, "V", "C")) if v.casts else None
    waiting = []
    if saving:
        weight = "gradients" if first else "activations.head"
        waiting = [t.alloc("activations.head", t.size(low, "B", "T", "C")), t.alloc(weight, t.size(4, "V", "C"))]
    logits = t.alloc("logits", t.size(low, "n", "V"))
    if saving:
        # Where no kernel makes fp32 of half-precision factors, it is a cast (_weight_product in model/loss.py).
        half = t.alloc("activations.head", t.size(2, "V", "C")) if v.half and not v.cuda else None
        t.free(t.alloc("activations.head", t.size(4, "V", "C")), half)
    t.free(logits, copy, hidden)
    return waiting


LEAST_LOGITS_BYTES, LEAST_RATIO = 1 << 20, 2  # of logits to what they are made from; model/step.py sets the ratio


def divides(t: Timeline, v: Variant) -> bool:
    """Whether Inductor's auto_chunker finds the logits large enough."""
    s = t.symbols
    rows, low = s["B"] * s["T"], 2 if v.half else 4
    logits = rows * s["V"]
    made_from = (rows + s["V"]) * s["C"]
    return v.auto_chunker and logits * low > LEAST_LOGITS_BYTES and logits > LEAST_RATIO * made_from


def divided_head(t: Timeline, v: Variant, hidden: Tensor) -> list[Tensor]:
    """As `chunked_head`, in Inductor's eight chunks: each adds to the weight's gradient in a new tensor."""
    low = 2 if v.half else 4
    copy = t.alloc("weight_copies", t.size(2, "V", "C")) if v.casts else None
    weight = t.alloc("activations.head", t.size(low, "V", "C"))
    parts = []
    for _ in range(8):
        logits = t.alloc("logits", t.size(low, "m", "V"))
        if v.half:
            gradient = t.alloc("logits", t.size(low, "m", "V"))
            t.free(logits)
            logits = gradient
        parts.append(t.alloc("activations.head", t.size(low, "m", "C")))
        summed = t.alloc("activations.head", t.size(low, "V", "C"))
        t.free(weight, logits)
        weight = summed
    whole = t.alloc("activations.head", t.size(low, "B", "T", "C"))
    t.free(*parts, copy, hidden)
    return [whole, weight]
