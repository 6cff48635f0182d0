"""Autograd on tensors without values: torch/csrc/autograd/engine.cpp (order, validate_outputs), input_buffer.cpp (sums
in place where nobody else has the gradient), functions/accumulate_grad.h, torch/utils/checkpoint.py."""

import heapq
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.passage import OUTSIDE
from foretrain.predict.abstract.tensors import DType, Tensor, float32, note_kernel


class Parameter(Tensor):
    """A weight. The program owns its gradient, not its storage."""

    __slots__ = ("grad", "name")

    def __init__(self, shape: Sequence[int], dtype: DType) -> None:
        super().__init__(tuple(shape), m.contiguous_strides(shape), dtype, None)
        self.requires_grad = True
        self.grad: Tensor | None = None
        self.name = ""


Grads = Sequence[Tensor | None]  # one for each input
Backward = Callable[..., Grads]


class Edge:
    """Where a gradient goes: to a node's slot, or to a parameter; and its shape and dtype there."""

    __slots__ = ("dtype", "shape", "slot", "to")

    def __init__(self, to: Any, slot: int, shape: tuple[int, ...], dtype: DType) -> None:
        self.to, self.slot, self.shape, self.dtype = to, slot, shape, dtype


class Node:
    __slots__ = ("composite", "edges", "kind", "layer", "leaf", "moment", "name", "run", "saved", "seq", "slots")

    def __init__(self, run: Backward, inputs: Sequence[Tensor | None], saved: Sequence[Tensor | None]) -> None:
        machine = m.machine()
        self.run = run
        self.edges = [edge_of(x) for x in inputs]
        self.saved: list[Any] | None = [pack(x) for x in saved]
        self.seq = machine.sequence = machine.sequence + 1
        self.kind, self.name, self.layer = machine.kind, machine.name, machine.t.layer
        self.moment = machine.back or machine.t.moment.partition(".")[2]
        self.slots = 1
        self.leaf = False  # of a tensor that nothing made, whose gradient goes no further
        self.composite = False  # it stands for several nodes, and lets go of what it has as they do


def edge_of(x: Tensor | None) -> Edge | None:
    if x is None or not x.requires_grad:
        return None
    if isinstance(x, Parameter):
        return Edge(x, 0, x.shape, float32 if m.machine().wide_gradients else x.dtype)
    return Edge(x.node, x.slot, x.shape, x.dtype)


def pack(x: Tensor | None) -> Any:
    """Return what a node saves of x; a checkpoint keeps a place for it, for a weight too (saved_variable.cpp)."""
    if x is None:
        return None
    open_ = m.machine().packing
    return open_[-1].pack(x) if open_ else _kept(x)


def _kept(x: Tensor) -> Tensor:
    return x if isinstance(x, Parameter) else x.detach()


def unpack(held: Any) -> Any:
    return held.take() if isinstance(held, Holder) else held


def wants(*inputs: Tensor | None) -> bool:
    return m.machine() is not None and m.machine().grad and any(x is not None and x.requires_grad for x in inputs)


def record(
    out: Tensor | Sequence[Tensor], run: Backward, inputs: Sequence[Tensor | None],
    saved: Sequence[Tensor | None] = (), *, composite: bool = False,
) -> None:  # fmt: skip
    """Record how `out` was made. Call it where `wants(*inputs)`."""
    node = Node(run, inputs, saved)
    outs = (out,) if isinstance(out, Tensor) else out
    node.slots, node.composite = len(outs), composite
    for slot, each in enumerate(outs):
        each.node, each.slot, each.requires_grad = node, slot, True


def backward(scalar: list[Tensor]) -> None:
    root = scalar.pop()
    machine = m.machine()
    grad_before, machine.grad = machine.grad, False
    machine.thread = "backward"
    node = root.node
    buffers: dict[Node, list[Tensor | None]] = {node: [machine.tangent(root)]}
    root.node = None  # its graph goes as it is used
    del root
    uses = _uses(node)
    waiting: list[tuple[int, Node]] = [(-node.seq, node)]
    sums: dict[Parameter, Tensor] = {}  # of weights that are used more than once
    del node
    try:
        while waiting:
            _, node = heapq.heappop(waiting)
            machine.kind, machine.name = node.kind, node.name
            machine.t.layer, machine.t.moment = node.layer, f"backward.{node.moment}"
            grads = buffers.pop(node)
            outs = _outputs(node, grads)
            node.saved = None
            grads.clear()
            leaves: list[tuple[Parameter, Tensor]] = []
            for i, edge in enumerate(node.edges):
                gradient, outs[i] = outs[i], None
                if edge is None or gradient is None:
                    continue
                if isinstance(edge.to, Parameter):
                    leaves.append((edge.to, gradient))
                    gradient = None
                    continue
                slots = buffers.get(edge.to)
                if slots is None:
                    slots = buffers[edge.to] = [None] * edge.to.slots
                    heapq.heappush(waiting, (-edge.to.seq, edge.to))
                slots[edge.slot] = _summed(slots, edge.slot, gradient)
                gradient = slots = None
            node = edge = None
            while leaves:
                parameter, gradient = leaves.pop(0)
                uses[parameter] -= 1
                if parameter in sums:
                    met: list[Tensor | None] = [sums.pop(parameter)]
                    gradient = _summed(met, 0, gradient)
                if uses[parameter]:  # AccumulateGrad runs when all of its gradients are there
                    sums[parameter] = gradient
                else:
                    machine.accumulate(parameter, gradient)
                gradient = None
    finally:
        machine.thread, machine.grad = "forward", grad_before
        machine.t.layer = OUTSIDE


def _uses(root: Node) -> Counter[Parameter]:
    found: Counter[Parameter] = Counter()
    seen, open_ = {root}, [root]
    while open_:
        for edge in open_.pop().edges:
            if edge is None:
                continue
            if isinstance(edge.to, Parameter):
                found[edge.to] += 1
            elif edge.to not in seen:
                seen.add(edge.to)
                open_.append(edge.to)
    return found


def _outputs(node: Node, grads: list[Tensor | None]) -> list[Tensor | None]:
    saved = [unpack(held) for held in node.saved or ()]
    if node.composite or any(isinstance(held, Holder) for held in node.saved or ()):
        node.saved = None
    outs: list[Tensor | None] = list(node.run(saved, grads) if node.composite else node.run(saved, *grads))
    del saved
    for i, edge in enumerate(node.edges):
        gradient = outs[i]
        if edge is None:
            outs[i] = None
        elif gradient is not None:
            if gradient.shape != edge.shape:
                outs[i] = gradient = gradient.reduced(edge.shape)
            if gradient.dtype != edge.dtype:
                outs[i] = gradient = gradient.cast(edge.dtype)
        gradient = None
    return outs


def _references_of_one_variable() -> int:
    """Return getrefcount of an object in one variable: 2, and from Python 3.14 on 1, as it is borrowed."""
    held = object()
    return sys.getrefcount(held)


ONE_VARIABLE = _references_of_one_variable()


def _summed(slots: list[Tensor | None], slot: int, new: Tensor) -> Tensor:
    """Add a gradient to another, in place where nobody else has its storage."""
    old = slots[slot]
    if old is None:
        return new
    slots[slot] = None
    # Known references to the storage: the tensor's own, and the argument of getrefcount; to the tensor: `old`.
    if old.storage is not None and sys.getrefcount(old.storage) == 2 and sys.getrefcount(old) == ONE_VARIABLE:
        note_kernel("add", old, old, new)
        return old
    return old.summed(new)


class _AllSaved(Exception):
    pass


class Holder:
    __slots__ = ("__weakref__", "frame", "number")

    def __init__(self, frame: "Checkpoint", number: int) -> None:
        self.frame, self.number = frame, number

    def take(self) -> Tensor:
        if self.frame.remade is None:
            self.frame.run_again()
        assert self.frame.remade is not None
        found = self.frame.remade.pop(self.number)
        if not self.frame.remade:
            self.frame.result = self.frame.gradient = None
        return found


class Checkpoint:
    """One call whose saved tensors are recomputed (torch.utils.checkpoint); `whole`: to its end, if reentrant."""

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...], *, whole: bool) -> None:
        self.call, self.args, self.whole = call, args, whole
        self.result = self.gradient = None
        # What brings back a first argument that has left the device.
        self.arriving: Callable[[Checkpoint], Tensor] | None = None
        self.places: list[ref[Holder]] = []
        self.remade = None
        self.autocasting = m.machine().autocasting
        self.kind, self.moment = m.machine().kind, m.machine().t.moment

    remade: dict[int, Tensor] | None
    result: Any
    gradient: Tensor | None

    def pack(self, x: Tensor) -> Holder:
        place = Holder(self, len(self.places))
        self.places.append(ref(place))
        return place

    def leave(self) -> None:
        x = self.args[0]
        away = Tensor(x.shape, x.strides, x.dtype, None)
        away.requires_grad = x.requires_grad
        self.args = (away, *self.args[1:])

    def entered(self, result: Tensor) -> Tensor:
        """Return the result of the call, whose gradient starts the second run."""

        def run(saved: list[Any], grad: Tensor) -> Grads:
            self.gradient = grad
            self.run_again()
            return (grad,)

        out = result.detach()
        record(out, run, (result,))
        return out

    def run_again(self) -> None:
        machine = m.machine()
        again = _Recomputation(self.places, whole=self.whole)
        self.remade = again.kept
        before = machine.grad, machine.kind, machine.name, machine.t.moment, machine.packing
        machine.grad, machine.packing, machine.again = True, [again], True
        machine.kind, machine.t.moment = self.kind, self.moment
        given = self.args if self.arriving is None else (self.arriving(self), *self.args[1:])
        args = [a.detach() if isinstance(a, Tensor) else a for a in given]
        del given
        for a, original in zip(args, self.args, strict=True):
            if isinstance(a, Tensor) and original.requires_grad:
                leaf(a).node.leaf = self.whole or is_leaf(original)  # the reentrant kind makes leaves of its arguments
        try:
            if self.autocasting:
                with machine.autocast():
                    self.result = self.call(*args)
            else:
                self.result = self.call(*args)
        except _AllSaved:
            pass
        finally:
            machine.grad, machine.kind, machine.name, machine.t.moment, machine.packing = before
            machine.again = False


class _Recomputation:
    """Keeps what a second run saves where its place still exists; with `whole` backward takes what is kept here."""

    def __init__(self, places: "list[ref[Holder]]", *, whole: bool) -> None:
        self.places, self.whole, self.count = places, whole, 0
        self.kept: dict[int, Tensor] = {}

    def pack(self, x: Tensor) -> Any:
        if self.places[self.count]() is not None:
            self.kept[self.count] = _kept(x)
        self.count += 1
        if self.count == len(self.places) and not self.whole:
            raise _AllSaved
        return None if self.whole else _kept(x)


def leaf(x: Tensor) -> Tensor:
    """Return x with a gradient that ends here; the gradient's receiver holds x (AccumulateGrad)."""
    if not x.requires_grad:
        held = x.detach()

        def run(saved: list[Any], *grads: Tensor | None, held: Tensor = held) -> Grads:
            return ()

        record(x, run, (), ())
        x.node.leaf = True
    return x


def is_leaf(x: Tensor) -> bool:
    return isinstance(x, Parameter) or (x.node is not None and x.node.leaf)


def checkpoint(call: Callable[..., Any], *args: Any, use_reentrant: bool = False, **_: Any) -> Any:
    return checkpointed(call, args, whole=use_reentrant)[0]


def offloaded(call: Callable[..., Any], *args: Any) -> Any:
    """Checkpoint, with the first argument on the host until backward has it in a permanent place."""
    result, frame = checkpointed(call, args, whole=True)
    if frame is not None:
        frame.leave()
    return result


def checkpointed(call: Callable[..., Any], args: tuple[Any, ...], *, whole: bool) -> tuple[Any, Checkpoint | None]:
    machine = m.machine()
    if not machine.grad:
        return call(*args), None
    frame = Checkpoint(call, args, whole=whole)
    machine.packing = [*machine.packing, frame]
    try:
        result = call(*args)
    finally:
        machine.packing = machine.packing[:-1]
    return (frame.entered(result) if whole and result.requires_grad else result), frame


@contextmanager
def no_grad() -> Any:
    before, m.machine().grad = m.machine().grad, False
    try:
        yield
    finally:
        m.machine().grad = before


class Context:
    def __init__(self) -> None:
        self._saved: tuple[Any, ...] = ()

    def save_for_backward(self, *found: Tensor | None) -> None:
        self._saved = found

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self._saved


KINDS = {
    "_Norm": "norm",
    "_SquaredRelu": "mlp",
    "_Head": "head",
    "_FusedHead": "head",
}  # of functions, and what they make


class Function:
    @classmethod
    def apply(cls, *args: Any) -> Any:
        ctx: Any = Context()
        inputs = [a for a in args if isinstance(a, Tensor)]
        ctx.needs_input_grad = [isinstance(a, Tensor) and a.requires_grad for a in args]
        tracked = wants(*inputs)
        machine = m.machine()
        before, machine.kind = machine.kind, KINDS.get(cls.__name__, machine.kind)
        with no_grad():
            out = cls.forward(ctx, *args)  # type: ignore[attr-defined]
        machine.kind = before
        if tracked:
            kept, ctx._saved = ctx._saved, ()
            positions = [i for i, a in enumerate(args) if isinstance(a, Tensor)]

            def run(saved: list[Any], *grads: Tensor | None) -> Grads:
                ctx._saved = tuple(saved)
                saved.clear()
                found = cls.backward(ctx, *grads)  # type: ignore[attr-defined]
                ctx._saved = ()
                found = found if isinstance(found, tuple) else (found,)
                return [found[i] for i in positions]

            out = out.detach() if isinstance(out, Tensor) else out
            record(out, run, inputs, kept)
        return out
