"""The micro-batches of a compiled step: the model's code traced into a graph, cut in two, and run kernel by kernel."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from foretrain.config.families import family_of
from foretrain.predict.abstract import autograd, views
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.attention import padded
from foretrain.predict.abstract.autograd import Grads, record, wants
from foretrain.predict.abstract.dims import Dim
from foretrain.predict.abstract.passage import OUTSIDE, Recorder
from foretrain.predict.abstract.programs import Loader
from foretrain.predict.abstract.step import EagerProgram, Lettered, State
from foretrain.predict.abstract.tensors import DType, Tensor, bool_, float32
from foretrain.predict.compiled import operations
from foretrain.predict.compiled.graph import EXTERN, REDUCTION, Compiler, Node, Traced, compiler, emit, item, node_of
from foretrain.predict.compiled.halves import Graphs, backward, forward_only, joint, with_tangent
from foretrain.predict.compiled.kernels import Lives
from foretrain.predict.compiled.operations import add, autocast, convert, dropout, mul, point, to, total, traced
from foretrain.predict.compiled.timing import Walk, first_walk
from foretrain.predict.spec import Variant
from foretrain.predict.timeline import Tensor as TracedTensor
from foretrain.predict.timeline import Timeline


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """A kernel of PyTorch's own, or the math path, which Inductor fuses. FlashAttention takes no mask."""
    q, k, v = autocast(q), autocast(k), autocast(v)  # type: ignore[assignment]
    kind = m.machine().attention(wants(q, k, v))
    D = q.shape[-1]
    if attn_mask is not None:
        bias = point("where", attn_mask.shape, q.dtype, attn_mask)
        return _fused("efficient" if kind in ("flash", "math") else kind, q, k, v, dropout_p, bias)
    if kind == "math":
        return _math(q, k, v, dropout_p)
    width = padded(D) if kind == "flash" else D
    if width is D:
        return _fused(kind, q, k, v, dropout_p)
    return _narrowed(_fused(kind, _padded(q, width), _padded(k, width), _padded(v, width), dropout_p), D)


def _padded(x: Tensor, width: int) -> Tensor:
    """Pad heads to a multiple of 8, which FlashAttention needs."""
    own = x.shape
    out = point("pad", (*own[:-1], width), x.dtype, x)
    out = Traced(out.value, out.shape, by_rows(out.shape))
    if wants(x):
        record(out, lambda saved, grad: (traced(grad).viewed(own, grad.strides),), (x,))
    return out


def _narrowed(x: Tensor, width: int) -> Tensor:
    whole = x.shape
    out = traced(x).viewed((*whole[:-1], width), x.strides)
    if wants(x):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            wide = point("pad", whole, grad.dtype, grad)
            return (Traced(wide.value, whole, by_rows(whole)),)

        record(out, run, (x,))
    return out


def _fused(kind: str, q: Tensor, k: Tensor, v: Tensor, dropout: float, bias: Tensor | None = None) -> Tensor:
    B, H, T, D = q.shape
    masks = () if bias is None else (bias,)
    out, lse = kernel("attention", (q, k, v, *masks), [((B, H, T, D), q.dtype), ((B, H, T), float32)], kind, dropout)
    out = Traced(out.value, (B, H, T, D), by_rows(q.shape))
    if wants(q, k, v):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            shapes = [(x.shape, x.dtype) for x in saved[:3]]
            found = kernel("attention_backward", (grad, *saved), shapes, kind, dropout)
            return [Traced(x.value, x.shape, by_rows(x.shape)) for x in found]

        record(out, run, (q, k, v), (q, k, v, out, lse, *masks))
    return out


def by_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """Return strides of B x H x T x D that lie in memory as B x T x H x D."""
    _, H, T, D = shape
    return (T * H * D, D, H * D, 1)


def _math(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    low, T = q.dtype, q.shape[2]
    q, k, v = (to(x, float32) for x in (q, k, v))
    scores = _bmm(mul(q, 0.5), mul(views.transpose(k, 2, 3), 0.5), low)
    mask = point("mask", (T, T), float32)
    weights = dropout(_softmax(add(scores, mask), low), dropout_p)
    return to(_bmm(weights, v, low), low)


def _bmm(x: Tensor, y: Tensor, low: DType) -> Tensor:
    """Return x·y of each head, whose matrices are contiguous. Backward is in half precision under autocast."""
    x, y = _laid_out(x), _laid_out(y)
    out = emit("bmm", EXTERN, (x, y), (*x.shape[:-1], y.shape[-1]), x.dtype)
    if wants(x, y):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            own = grad.dtype
            grad, x, y = (convert(each, low) for each in (grad, *saved))
            over, across = views.transpose(y, 2, 3), views.transpose(x, 2, 3)
            dy = emit("bmm", EXTERN, (across, grad), y.shape, low)
            dx = emit("bmm", EXTERN, (grad, over), x.shape, low)
            return convert(dx, own), convert(dy, own)

        record(out, run, (x, y), (x, y))
    return out


def _laid_out(x: Tensor) -> Tensor:
    if views.is_contiguous(x):
        return x
    out = point("clone", x.shape, x.dtype, x)
    if wants(x):
        record(out, views.identity, (x,))
    return out


def _softmax(x: Tensor, low: DType) -> Tensor:
    s, f, rows = x.shape, float32, (*x.shape[:-1], 1)
    power = point("exp", s, f, point("sub", s, f, x, total(x, rows, "amax")))
    out = point("div", s, f, power, total(power, rows))
    if low.itemsize == 2:  # rows without a single finite score (_safe_softmax)
        hidden = point("eq", s, bool_, x, "-inf")
        some = emit("any", REDUCTION, (point("not", s, bool_, hidden),), rows, bool_)
        out = point("where", s, f, point("not", rows, bool_, some), out)
    if wants(x):

        def run(saved: list[Any], grad: Tensor) -> Grads:
            product = point("mul", s, f, grad, saved[0])
            return (point("fma", s, f, saved[0], total(product, rows), product),)

        record(out, run, (x,), (out,))
    return out


def causal_attention(qkv: Tensor, H: int) -> Tensor:
    """model/attention.py, one operation for the compiler too: attention as batched matmuls, B x T x 3C to B x T x C."""
    B, T, width = qkv.shape
    scores = m.machine().t.symbols["kept"]
    shapes: list[tuple[tuple[int, ...], DType]] = [((B, T, width // 3), qkv.dtype), ((B, T, width), qkv.dtype)]
    if scores:
        shapes.append(((Dim(scores, 1, ("kept",)),), qkv.dtype))
    out, *saved = kernel("products", (qkv,), shapes, H)
    if wants(qkv):
        shape, dtype = qkv.shape, qkv.dtype
        record(out, lambda held, grad: kernel("products_backward", (grad, *held), [(shape, dtype)], H), (qkv,), saved)
    return out


def kernel(name: str, inputs: Sequence[Tensor], results: Any, *detail: Any) -> list[Traced]:
    of = compiler().graph.add(name, EXTERN, [node_of(x) for x in inputs], (), float32, *detail)
    return [item(of, i, shape, dtype) for i, (shape, dtype) in enumerate(results)]


# A head whose loss is chunked, by foretrain (model/loss.py) or by Inductor (its auto_chunker), with gradients made in
# the forward pass. n is the number of tokens of a chunk. foretrain's loop is plain Python also where the model is
# compiled; a chunk's logits are then processed by one fused kernel without copies. Inductor makes eight chunks, m
# tokens each, in the graph (torch/_inductor/fx_passes/auto_chunker).

LEAST_LOGITS_BYTES, LEAST_RATIO = 1 << 20, 2  # of logits to what they are made from; model/step.py sets the ratio
CHUNKS = 8


def auto_chunker_applies(t: Timeline, v: Variant) -> bool:
    s = t.symbols
    rows, low = s["B"] * s["T"], 2 if v.half else 4
    logits = rows * s["V"]
    made_from = (rows + s["V"]) * s["C"]
    return v.auto_chunker and logits * low > LEAST_LOGITS_BYTES and logits > LEAST_RATIO * made_from


class _Tensors:
    def __init__(self, t: Recorder) -> None:
        self.t = t

    def make(self, component: str, *size: int | str) -> int:
        return self.t.allocate(component, 1, (), size, ours=False)

    def free(self, *serials: int) -> None:
        for serial in serials:
            self.t.free(serial)


def chunked_loss_pass(t: Recorder, v: Variant, *, saving: bool) -> list[int]:
    """Write the loop. Return what is saved for backward: the gradients of the head's input and weight."""
    tensors, low = _Tensors(t), 2 if v.half else 4
    make, free = tensors.make, tensors.free
    copy = [make("weight_copies", 2, "V", "C")] if v.casts else []
    waiting = []
    if saving:
        waiting = [make("activations.head", low, "B", "T", "C"), make("activations.head", 4, "V", "C")]
    logits = make("logits", low, "n", "V")
    if saving:
        # Where no kernel makes fp32 of half-precision factors, it is a cast (_weight_gradient in model/loss.py).
        half = [make("activations.head", 2, "V", "C")] if v.half and not v.cuda else []
        free(make("activations.head", 4, "V", "C"), *half)
    free(logits, *copy)
    return waiting


def auto_chunker_pass(t: Recorder, v: Variant, *, saving: bool) -> list[int]:
    """Write `chunked` in Inductor's eight chunks: each adds to the weight's gradient in a new tensor."""
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


def head_gradient_in_half(t: Recorder, head: int) -> int:
    """Cast the gradient of the head's weight to half precision, as autograd gives it to a weight of that dtype."""
    cast = t.allocate("temporaries", 1, (), (2, "V", "C"), ours=False)
    t.free(head)
    return cast


def add_head(t: Recorder, v: Variant, head: int, tables: Sequence[int], *, wide: bool) -> int:
    """Return the head's weight gradient with a tied embedding's added. `wide`: it is fp32 where the weight is half."""
    if v.chunked:
        for table in tables:
            if v.wide == 2 and wide:
                t.free(t.allocate("temporaries", 4, t.allocated[table].shape, ours=False))
            t.free(table)
        return head
    if not v.half:  # the sum is written over it
        t.free(head)
    total = t.allocate("gradients", 1, (), (4, "V", "C"), ours=False)
    for serial in (*tables, *([head] if v.half else [])):
        t.free(serial)
    return total


SIZES = "BTCHVWnADEKG"  # letters of the model and of its micro-batch (predict/spec.py)
LOADER = Loader(
    operations, attention=scaled_dot_product_attention, own_attention=causal_attention,
    checkpoint=lambda *args, **named: compiler().region(*args, **named), compiling=True,
)  # fmt: skip


class FirstMicroBatch(NamedTuple):
    walk: Walk
    logits: TracedTensor | None


class CompiledProgram(EagerProgram):
    TAKEN = ("kept", "flash", "split")
    OF_ITS_SIZES = True
    KERNELS = False

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.run = self.groups  # what is remembered of a pass is by the layers that are run
        self.timed: set[bool] = set()  # passes whose kernels are chosen

    def _shape_of(self, saving: bool) -> Any:
        """Return all that decides a pass; sizes do, too, as saved tensors, order and reuse follow from bytes."""
        s, c = self.t.symbols, self.config
        sizes = tuple(s[letter] for letter in (*SIZES, *family_of(c).letters.values()))
        return "compiled", super()._shape_of(saving), sizes, self.v.checkpointed > 0, c.n_layer == self.v.checkpointed

    def _built(self) -> Any:
        casts = self._dtypes()
        if self.model is None:
            name, kind = family_of(self.config).model
            if self.v.keeps_logits:
                name, kind = "foretrain.model.gpt2", "NanoGPT"
            self.model = LOADER.model(name, kind, Lettered(self.config, self.run[0], sum(self.run)))
            self.parameters = list(self.model.parameters())
            self.buffers = [
                (module, name, x) for module in self.model.modules() for name, x in vars(module).items()
                if type(x) is m.Tensor
            ]  # fmt: skip
        self.machine = Compiler(cuda=self.v.cuda, low=casts, attention=self._attention, functional=operations)
        return self.model

    def forward(self, saving: bool) -> Any:
        cache = self.t.size(1, "L2")
        if saving in self.timed or not cache.nbytes:
            return super().forward(saving)
        there, passage, structure = len(self.workspaces), self._whole(saving), self._structure(saving)
        self.timed.add(saving)
        walk = first_walk(self.t, passage, structure, there, self.given(passage), cuda=self.v.cuda)
        if not saving:
            self._take(walk)
        logits = next((tensor for tensor in walk.alive.values() if tensor.component == "logits"), None)
        return FirstMicroBatch(walk, logits if self.v.keeps_logits else None)

    def backward(self, result: Any) -> None:
        if not isinstance(result, FirstMicroBatch):
            super().backward(result)
            return
        self.gradients = result.walk.backward()
        self._take(result.walk)

    def _take(self, walk: Walk) -> None:
        self.left += walk.left(*self.ranks.leaves)
        self.workspaces += [each for each in walk.left("workspace") if each.size.formula.endswith("cuBLAS")]

    def _recorded(self, saving: bool, state: State) -> Recorder:
        model, symbols = self._built(), self.t.symbols
        machine: Any = self.machine
        t = machine.t = Recorder(symbols)
        machine.grad = saving
        if model.training != saving:
            model.train(saving)
        shape = (Dim(symbols["B"], 1, ("B",)), Dim(symbols["T"], 1, ("T",)))
        apart = self.v.chunked or (saving and auto_chunker_applies(self.t, self.v))
        with m.running(machine):
            idx, targets = (machine.input(shape, m.int64) for _ in range(2))
            for module, name, x in self.buffers:
                module.__dict__[name] = operations.traced(x)
            with machine.autocast():
                found = model.head_input(idx) if apart else model(idx, targets)
            logits, root = found if self.v.keeps_logits else (None, found)
            outputs = [each.value for each in (root, logits) if each is not None]
            if saving:
                autograd.backward([root if logits is None else with_tangent(machine, root, logits)])
                graphs = joint(machine, outputs, whole=not self.v.pieces)
            else:
                graphs = forward_only(machine, outputs)
        kept = None if logits is None else logits.value.base
        lives = Lives(t, machine)
        if saving and self.v.keeps_logits:
            lives.allocate(targets.value.base, "batch")
        waiting = self._forward(lives, graphs, kept, apart=apart)
        t.split = len(t.events)
        if saving:
            self._backward(lives, graphs, kept, waiting)
        t.ended = True
        return t

    def _forward(self, lives: Lives, graphs: Graphs, logits: Node | None, *, apart: bool) -> list[int]:
        t = lives.t
        components = {node.base: node.base.component for node in (*graphs.saved, *graphs.outputs)}
        if logits is not None:
            components[logits] = "logits"
        lives.half(graphs.forward, components, set(components), thread="forward")
        t.layer = OUTSIDE
        saved = {node.base for node in graphs.saved}
        outputs = [node.base for node in graphs.outputs]
        waiting: list[int] = []
        if apart:
            t.moment = "forward.loss"
            losing = chunked_loss_pass if self.v.chunked else auto_chunker_pass
            waiting = losing(t, self.v, saving=graphs.backward is not None)
            lives.free(*(node for node in outputs if node not in saved))
        elif graphs.backward is None:
            lives.free(*(node for node in outputs if node is not logits))
        return waiting

    def _backward(self, lives: Lives, graphs: Graphs, logits: Node | None, waiting: list[int]) -> None:
        """Run the backward graph. All gradients are there when it ends; then they become .grad one by one."""
        t, half, sends = lives.t, self.v.wide == 2, self.ranks.sends
        weight = self.model.lm_head.weight
        tied = [node.base for parameter, node in lives.machine.gradients if parameter is weight] if waiting else []
        leaving: list[int] = []  # the head's gradient: held until the next one leaves (model/master.py)
        if waiting:
            lives.alive.update(dict.fromkeys(graphs.tangents, waiting[0]))
            if sends and half:
                waiting[1] = head_gradient_in_half(t, waiting[1])
            if sends and not tied:
                leaving.append(waiting.pop())
        stays = frozenset(() if logits is None else (logits,))
        gradients = backward(lives, graphs, "temporaries" if half or sends else "gradients", stays)
        taken = leaving + [lives.alive[node] for node in gradients]
        if len(waiting) > 1:
            tables = [lives.alive[node] for node in tied]
            head = add_head(t, self.v, waiting[1], tables, wide=not sends)
            (t.free if sends else t.take)(head)
            taken = [serial for serial in taken if serial not in tables]
        for serial in taken:
            if sends:
                t.free(serial)
            else:
                t.take(_in_fp32(t, serial) if half else serial)


def _in_fp32(t: Recorder, half: int) -> int:
    """Cast a gradient as autograd does (grad_dtype in model/master.py)."""
    wide = t.allocate("gradients", 4, t.allocated[half].shape, ours=False)
    t.free(half)
    return wide
