"""A head whose loss is chunked, by foretrain (model/loss.py) or by Inductor (its auto_chunker). No torch.

The gradients of what it reads and of its weight are made in the forward pass.

n is the number of tokens of a chunk. foretrain's loop is plain Python also where the model is compiled; what is done to
a chunk's logits is then one fused kernel without copies. Inductor makes eight chunks, m tokens each, in the graph
(torch/_inductor/fx_passes/auto_chunker).
"""

from collections.abc import Sequence

from foretrain.predict.abstract.passage import Recorder
from foretrain.predict.spec import Variant
from foretrain.predict.timeline import Timeline

LEAST_LOGITS_BYTES, LEAST_RATIO = 1 << 20, 2  # of logits to what they are made from; model/step.py sets the ratio
CHUNKS = 8


def divides(t: Timeline, v: Variant) -> bool:
    """Whether Inductor's auto_chunker finds the logits large enough."""
    s = t.symbols
    rows, low = s["B"] * s["T"], 2 if v.half else 4
    logits = rows * s["V"]
    made_from = (rows + s["V"]) * s["C"]
    return v.auto_chunker and logits * low > LEAST_LOGITS_BYTES and logits > LEAST_RATIO * made_from


class _Tensors:
    """Births and deaths by their size."""

    def __init__(self, t: Recorder) -> None:
        self.t = t

    def make(self, component: str, *size: int | str) -> int:
        """The serial number of a tensor of so many bytes: (4, "V", "C")."""
        return self.t.birth(component, 1, (), size, ours=False)

    def free(self, *serials: int) -> None:
        """They end."""
        for serial in serials:
            self.t.death(serial)


def chunked(t: Recorder, v: Variant, *, saving: bool) -> list[int]:
    """Writes the loop. Returns what waits for backward: the gradients of what the head reads and of its weight."""
    tensors, low = _Tensors(t), 2 if v.half else 4
    make, free = tensors.make, tensors.free
    copy = [make("weight_copies", 2, "V", "C")] if v.casts else []
    waiting = []
    if saving:
        waiting = [make("activations.head", low, "B", "T", "C"), make("activations.head", 4, "V", "C")]
    logits = make("logits", low, "n", "V")
    if saving:
        # Where no kernel makes fp32 of half-precision factors, it is a cast (_weight_product in model/loss.py).
        half = [make("activations.head", 2, "V", "C")] if v.half and not v.cuda else []
        free(make("activations.head", 4, "V", "C"), *half)
    free(logits, *copy)
    return waiting


def divided(t: Recorder, v: Variant, *, saving: bool) -> list[int]:
    """As `chunked`, in Inductor's eight chunks: each adds to the weight's gradient in a new tensor."""
    assert saving, "an evaluation is not divided"
    tensors, low = _Tensors(t), 2 if v.half else 4
    make, free = tensors.make, tensors.free
    copy = [make("weight_copies", 2, "V", "C")] if v.casts else []
    weight = make("activations.head", low, "V", "C")
    parts = []
    for _ in range(CHUNKS):
        logits = make("logits", low, "m", "V")
        if v.half:
            gradient = make("logits", low, "m", "V")
            free(logits)
            logits = gradient
        parts.append(make("activations.head", low, "m", "C"))
        summed = make("activations.head", low, "V", "C")
        free(weight, logits)
        weight = summed
    whole = make("activations.head", low, "B", "T", "C")
    free(*parts, *copy)
    return [whole, weight]


def halved(t: Recorder, head: int) -> int:
    """The gradient of the head's weight, cast to half precision, as autograd gives it to a weight of that dtype."""
    cast = t.birth("temporaries", 1, (), (2, "V", "C"), ours=False)
    t.death(head)
    return cast


def add_head(t: Recorder, v: Variant, head: int, tables: Sequence[int], *, wide: bool) -> int:
    """The gradient of the head's weight, to which that of the embedding, if it is the same weight, is added. `wide`:
    it is fp32 where the weight is half precision."""
    if v.chunked:
        for table in tables:
            if v.wide == 2 and wide:
                t.death(t.birth("temporaries", 4, t.births[table].shape, ours=False))
            t.death(table)
        return head
    if not v.half:  # the sum is written over it
        t.death(head)
    total = t.birth("gradients", 1, (), (4, "V", "C"), ours=False)
    for serial in (*tables, *([head] if v.half else [])):
        t.death(serial)
    return total
