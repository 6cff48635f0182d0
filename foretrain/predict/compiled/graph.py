"""The graph of a training step as AOTAutograd sees it: a model's code runs on `Traced` tensors, each a node; equal ones
are one (torch/_functorch/compile_utils.py, fx_graph_cse). No torch."""

from collections.abc import Sequence
from typing import Any

from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.autograd import Parameter
from foretrain.predict.abstract.tensors import DType, Tensor, contiguous_strides, elements

# Kinds of nodes: an input, an incoming gradient, elementwise, a reduction, a view, one of several results, random
# numbers, a library's kernel, or a gather.
INPUT, TANGENT, POINTWISE, REDUCTION, VIEW, ITEM, RANDOM, EXTERN, GATHER = range(9)
# torch/_functorch/partitioners.py, get_default_op_list: these are recomputed, and fused with each other.
PIECE = "piece"  # the name of what a split gives
RECOMPUTABLE = frozenset({POINTWISE, REDUCTION, VIEW, ITEM})
FUSIBLE = RECOMPUTABLE | {RANDOM}


class Node:
    __slots__ = (
        "base", "component", "constants", "dtype", "index", "inputs", "item", "kind", "layer", "moment", "must_save",
        "name", "nbytes", "numel", "recompute", "region", "shape", "static", "users",
    )  # fmt: skip

    def __init__(self, name: str, kind: int, inputs: tuple["Node", ...], shape: tuple[int, ...], dtype: DType) -> None:
        self.name, self.kind, self.inputs, self.shape, self.dtype = name, kind, inputs, shape, dtype
        self.numel = elements(shape)
        self.nbytes = dtype.itemsize * self.numel
        self.base: Node = inputs[0].base if kind == VIEW else self
        self.users: list[Node] = []
        self.constants: frozenset[Any] = frozenset()  # among its inputs
        self.index = 0
        self.layer, self.moment, self.component = -1, "", ""
        self.static = False  # of an input: it is there anyway
        self.recompute = False  # it belongs to a checkpointed function
        self.must_save = False  # and that one keeps it
        self.region = 0  # which one
        self.item = 0  # of ITEM nodes: which of the results

    def __repr__(self) -> str:
        return f"{self.name}{self.index}{list(self.shape)}"


def compiler() -> "Compiler":
    machine = m.machine()
    assert isinstance(machine, Compiler)
    return machine


class Graph:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._known: dict[Any, Node] = {}
        self.checkpoints = 0

    def add(
        self, name: str, kind: int, inputs: Sequence[Node], shape: Sequence[int], dtype: DType, *detail: Any
    ) -> Node:
        """Return the node of an operation, an existing one if it is the same."""
        machine: Any = m.machine()
        inputs, shape = tuple(inputs), tuple(shape)
        key = (name, kind, inputs, shape, dtype, detail)
        if kind != RANDOM and (known := self._known.get(key)) is not None:
            return known
        node = Node(name, kind, inputs, shape, dtype)
        node.index = len(self.nodes)
        node.constants = frozenset(detail)
        node.layer, node.moment = machine.t.layer, machine.t.moment
        node.component = machine.component(shape)
        node.region = machine.checkpointing if machine.thread == "forward" else 0
        node.recompute = node.region > 0
        if machine.keeps_matmuls and name == "mm":
            node.recompute, node.must_save = False, True
        self.nodes.append(node)
        self._known[key] = node
        return node

    def link(self) -> None:
        for node in self.nodes:
            node.users = []
        for node in self.nodes:
            for each in dict.fromkeys(node.inputs):
                each.users.append(node)


class Traced(Tensor):
    __slots__ = ("value",)

    def __init__(self, value: Node, shape: Sequence[int], strides: Sequence[int] | None = None) -> None:
        super().__init__(tuple(shape), tuple(strides or contiguous_strides(shape)), value.dtype, None)
        self.value = value

    @property
    def component(self) -> str:
        return self.value.component

    def detach(self) -> "Traced":
        return Traced(self.value, self.shape, self.strides)

    def viewed(self, shape: Sequence[int], strides: Sequence[int], start: int = 0) -> "Traced":
        node = compiler().graph.add("view", VIEW, (self.value,), shape, self.dtype, tuple(strides), start)
        return Traced(node, shape, strides)

    def pieces(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return results of one operation, which are not views to the partition."""
        whole = compiler().graph.add("split", VIEW, (self.value,), self.shape, self.dtype, *shapes)
        nodes = [compiler().graph.add(PIECE, VIEW, (whole,), s, self.dtype, i) for i, s in enumerate(shapes)]
        return [Traced(node, node.shape, self.strides) for node in nodes]

    def made(
        self, shape: Sequence[int], dtype: DType, *others: Tensor | None, component: str | None = None
    ) -> "Traced":
        return emit("pointwise", POINTWISE, (self, *(o for o in others if o is not None)), shape, dtype)

    def cast(self, dtype: DType, component: str | None = None) -> "Traced":
        out = emit("convert", POINTWISE, (self,), self.shape, dtype)
        if component and out.value.component != component:
            out.value.component = component
        return Traced(out.value, self.shape, self.strides)

    def reduced(self, shape: tuple[int, ...]) -> "Traced":
        return emit("sum", REDUCTION, (self,), shape, self.dtype)

    def summed(self, other: Tensor) -> "Traced":
        return emit("add", POINTWISE, (self, other), self.shape, self.dtype)


def node_of(x: Tensor) -> Node:
    return x.value if isinstance(x, Traced) else compiler().given(x)


def emit(name: str, kind: int, inputs: Sequence[Tensor], shape: Sequence[int], dtype: DType, *detail: Any) -> Traced:
    on: Any = m.machine()
    if on is None:  # while a model is built
        return m.allocate(shape, dtype)  # type: ignore[return-value]
    nodes = [x.value if isinstance(x, Traced) else on.given(x) for x in inputs]
    return Traced(on.graph.add(name, kind, nodes, shape, dtype, *detail), shape)


def item(of: Node, number: int, shape: Sequence[int], dtype: DType, strides: Sequence[int] | None = None) -> Traced:
    node = compiler().graph.add(f"item{number}", ITEM, (of,), shape, dtype)
    node.item = number
    return Traced(node, shape, strides)


class Compiler(m.Machine):
    traces = True
    wide_gradients = False

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.graph = Graph()
        self.checkpointing, self.regions = 0, 0  # the number of the checkpointed function that runs, and the last one
        self.keeps_matmuls = False
        self._given: dict[int, tuple[Tensor, Node]] = {}  # with the tensor, so that no other gets its id
        self.gradients: list[tuple[Parameter, Node]] = []

    def region(self, call: Any, *args: Any, **named: Any) -> Any:
        """Return call(*args), recomputed in the backward pass; with a policy of its own all but matmuls are."""
        if not self.grad:
            return call(*args)
        before = self.checkpointing, self.keeps_matmuls
        self.regions += 1
        self.checkpointing, self.keeps_matmuls = self.regions, "context_fn" in named
        try:
            return call(*args)
        finally:
            self.checkpointing, self.keeps_matmuls = before

    def given(self, x: Tensor) -> Node:
        if id(x) not in self._given:
            before, self.checkpointing = self.checkpointing, 0
            node = self.graph.add("input", INPUT, (), x.shape, x.dtype, id(x))
            self.checkpointing = before
            node.static = True
            self._given[id(x)] = x, node
        return self._given[id(x)][1]

    def input(self, shape: Sequence[int], dtype: DType, kind: int = INPUT) -> Traced:
        node = self.graph.add("input", kind, (), shape, dtype, len(self.graph.nodes))
        return Traced(node, shape)

    def workspace(self) -> None:
        """Do nothing: it is written where kernels run (kernels.py)."""

    def accumulate(self, parameter: Parameter, gradient: Any) -> None:
        self.gradients.append((parameter, gradient.value))

    def tangent(self, root: Tensor) -> Traced:
        return self.input(root.shape, root.dtype, TANGENT)
