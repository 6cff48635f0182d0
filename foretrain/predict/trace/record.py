"""The record of a trace: lifetimes (predict/allocator/blocks.py), and what each allocation is. No torch."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.predict.allocator.blocks import Label, Lifetimes, Mark, name_at
from foretrain.predict.allocator.replay import BUILD

SCHEMA = "foretrain.trace/1"


class Allocation(NamedTuple):
    """One storage: bytes, positions of allocation and free (None: alive at the end). `category`: a component id of the
    estimate; `op`: the aten op or compiled kernel that made it; `shape`: of the first tensor seen on it; `stream`: 0 is
    the default; `used_on`: others from Tensor.record_stream."""

    id: int
    nbytes: int
    allocated_at: int
    freed_at: int | None
    category: str
    name: str
    op: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    stream: int = 0
    used_on: tuple[int, ...] = ()


WORDS = ("category", "name", "op", "module", "shape", "dtype")
COLUMNS = ("nbytes", "allocated_at", "freed_at", *WORDS)


class Head(NamedTuple):
    """How logits can be told: the numbers of rows that they may have, their width, the width of activations."""

    rows: frozenset[int] = frozenset()
    width: int = 0
    other_widths: frozenset[int] = frozenset()

    @classmethod
    def of(cls, config: RunConfig) -> "Head":
        c = config
        rows = {c.batch_size * c.block_size, c.eval_batch * c.eval_block}
        if n := c.loss_chunk_size:  # whole chunks and what remains
            rows = {part for count in rows for part in (min(n, count), count % n) if part}
        widths = {width for shape in ModelShape.of(c).block_matrices for width in shape}
        return cls(frozenset(rows), c.vocab_size, frozenset({c.n_embd, 3 * c.n_embd, 4 * c.n_embd, *widths}))


class Trace(Lifetimes):
    """A finished trace: lifetimes, what each storage is, the moments of the step. `facts` were asserted in it;
    `answer`: its worker's, where its job had a question; no part of the record."""

    answer = ""

    def __init__(
        self,
        events: list[int],
        allocations: list[Allocation],
        phases: list[Mark],
        moments: list[Mark],
        facts: dict[str, Any] | None = None,
        emptied: Iterable[int] = (),
    ) -> None:
        super().__init__(
            events,
            [a.nbytes for a in allocations],
            phases,
            {a.id: a.stream for a in allocations if a.stream},
            {a.id: a.used_on for a in allocations if a.used_on},
            sorted(emptied),
        )
        self.allocations, self.moments = allocations, moments
        self.facts: dict[str, Any] = facts or {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and self.to_json() == other.to_json()

    def label(self, position: int) -> Label:
        allocation = self.allocations[self.events[position]]
        return Label(moment_id(self, position), allocation.op, allocation.module)

    def moment_at(self, position: int) -> str:
        return name_at(self.moments, position)

    def alive_at(self, position: int) -> list[Allocation]:
        return [
            a for a in self.allocations if a.allocated_at <= position and (a.freed_at is None or a.freed_at > position)
        ]

    def peaks(self) -> dict[str, tuple[int, int]]:
        """Return phase -> (highest sum of tensor bytes, position where it is reached). Requested bytes, not rounded."""
        sizes = self.sizes
        running, current = [], 0
        for event in self.events:
            current += sizes[event] if event >= 0 else -sizes[~event]
            running.append(current)
        found: dict[str, tuple[int, int]] = {}
        for phase, start, end in self.spans():
            if start < end:
                best = max(range(start, end), key=running.__getitem__)
                if phase not in found or running[best] > found[phase][0]:
                    found[phase] = (running[best], best)
        return found

    def to_json(self) -> dict[str, Any]:
        columns = {name: [getattr(a, name) for a in self.allocations] for name in COLUMNS}
        words: dict[Any, int] = {}
        for name in WORDS:
            columns[name] = [words.setdefault(value, len(words)) for value in columns[name]]
        return {
            "schema": SCHEMA, "events": self.events, "words": list(words), "allocations": columns,
            "phases": self.phases, "moments": self.moments, "facts": self.facts,
            "emptied": sorted(self.emptied),
            "streams": [(a.id, a.stream, a.used_on) for a in self.allocations if a.stream or a.used_on],
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Trace":
        """Invert `to_json`. Raises ValueError, KeyError, TypeError or IndexError on anything but such a trace."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError(f"not {SCHEMA}")
        words = [tuple(word) if isinstance(word, list) else word for word in data["words"]]
        columns = dict(data["allocations"])
        for name in WORDS:
            columns[name] = [words[i] for i in columns[name]]
        rows = zip(*(columns[name] for name in COLUMNS), strict=True)
        allocations = [Allocation(id, *row) for id, row in enumerate(rows)]
        for id, stream, used_on in data.get("streams", ()):  # older traces have none
            allocations[id] = allocations[id]._replace(stream=stream, used_on=tuple(used_on))
        if not all(-len(allocations) <= event < len(allocations) for event in data["events"]):
            raise ValueError("an event is of no allocation")
        return cls(
            events=data["events"],
            allocations=allocations,
            phases=[Mark(*mark) for mark in data["phases"]],
            moments=[Mark(*mark) for mark in data["moments"]],
            facts=data["facts"],
            emptied=data.get("emptied", ()),
        )


def moment_id(trace: Trace, position: int) -> str:
    """Return the moment of an event by the estimate's names: backward.loss, forward.mlp, optimizer…"""
    moment = trace.moment_at(position)
    event = trace.events[position] if trace.events else -1
    if trace.phase_at(position) == "build" and moment == "forward" and not trace.allocations[event].module:
        return "build"  # no module runs yet
    if moment == "optimizer" or event < 0:
        return moment if moment == "optimizer" else f"{moment}.blocks"
    allocation = trace.allocations[event]
    last = allocation.module.rsplit(".", 1)[-1]
    if allocation.category == "logits" or "nll_loss" in allocation.op or "log_softmax" in allocation.op:
        return f"{moment}.loss"
    places = {"lm_head": "head", "ln_f": "head", "wte": "embedding", "wpe": "embedding", "transformer": "embedding"}
    if last in places and f"{moment}.{places[last]}" != "forward.head":
        return f"{moment}.{places[last]}"
    if ".attn" in allocation.module or last == "ln_1":
        return f"{moment}.attention"
    if ".mlp" in allocation.module or last == "ln_2":
        return f"{moment}.mlp"
    return f"{moment}.blocks"


class Recorder(Lifetimes):
    events: list[int]
    sizes: list[int]
    phases: list[Mark]

    def __init__(self) -> None:
        super().__init__([], [], [Mark(0, BUILD)])
        self.labels: list[tuple[str, str, tuple[int, ...], str]] = []  # op, module, shape, dtype
        self.tags: dict[int, tuple[str, str]] = {}
        self.names: dict[int, str] = {}
        self.moments = [Mark(0, "forward")]
        self.freed_at: dict[int, int] = {}
        self.allocated_at: list[int] = []
        self.stream_now: Callable[[], int] = lambda: 0  # the stream that allocations are made on

    def alloc(self, nbytes: int, op: str, module: str, shape: tuple[int, ...], dtype: str) -> int:
        id = len(self.sizes)
        if stream := self.stream_now():
            self.streams[id] = stream
        self.sizes.append(nbytes)
        self.labels.append((op, module, shape, dtype))
        self.allocated_at.append(len(self.events))
        self.events.append(id)
        return id

    def free(self, id: int) -> None:
        if id not in self.freed_at:
            self.freed_at[id] = len(self.events)
            self.events.append(~id)

    def use(self, id: int, stream: int) -> None:
        before = self.used_on.get(id, ())
        if stream != self.streams.get(id, 0) and stream not in before:
            self.used_on[id] = (*before, stream)

    def empty_cache(self) -> None:
        self.emptied |= {len(self.events)}

    def phase(self, name: str) -> None:
        self.phases.append(Mark(len(self.events), name))

    def moment(self, name: str) -> None:
        if name != self.moments[-1].name:
            self.moments.append(Mark(len(self.events), name))

    def tag(self, id: int, category: str, name: str) -> None:
        self.tags.setdefault(id, (category, name))

    def name(self, id: int, name: str) -> None:
        self.names.setdefault(id, name)

    def finish(self, *, logits: Head | None = None, weight_shapes: frozenset[tuple[int, ...]] = frozenset()) -> Trace:
        """Return the trace, categorized by tag, or by shape and moment. `weight_shapes`: of what autocast copies."""
        self._order_frees()
        head = logits or Head()
        allocations = []
        for id, (op, module, shape, dtype) in enumerate(self.labels):
            category, name = self.tags.get(id, ("", ""))
            start, end = self.allocated_at[id], self.freed_at.get(id)
            a = Allocation(
                id, self.sizes[id], start, end, category, name, self.names.get(id, op), module, shape, dtype,
                self.streams.get(id, 0), self.used_on.get(id, ()),
            )  # fmt: skip
            if not category:
                a = a._replace(category=_category(a, head, weight_shapes, name_at(self.moments, start) == "forward"))
            allocations.append(a)
        return Trace([*self.events], allocations, self.phases, self.moments, emptied=self.emptied)

    def _order_frees(self) -> None:
        """Order frees between two other events by their allocations, as autocast's cache of weight copies is a hash map
        by address; to the allocator it makes no difference."""
        marks = {mark.position for mark in (*self.phases, *self.moments)} | self.emptied
        start = 0
        for position in range(len(self.events) + 1):
            ends = position == len(self.events) or self.events[position] >= 0 or position in marks
            if ends:
                self.events[start:position] = sorted(self.events[start:position], reverse=True)
                start = position + (position < len(self.events) and self.events[position] >= 0)
        self.freed_at = {~event: position for position, event in enumerate(self.events) if event < 0}


def _category(a: Allocation, head: Head, weights: frozenset[tuple[int, ...]], forward: bool) -> str:
    """Categorize as torch.distributed._tools.mem_tracker: ACT is of a forward pass, TEMP of a backward pass."""
    if a.op.endswith("(inside)"):
        return "workspace"
    if _is_logits(a, head, forward):
        return "logits"
    if not forward:
        return "temporaries"
    copied = "_to_copy" in a.op and a.dtype in ("float16", "bfloat16")
    is_weight = a.shape in weights or a.shape[::-1] in weights
    return "weight_copies" if copied and is_weight else "activations"


# What makes logits in the head, and what the loss makes of them, wherever it is written.
HEAD_OPS = {"lm_head": ("mm", "addmm"), "chunked_loss": ("mm", "_to_copy")}
LOSS_OPS = ("log_softmax", "nll_loss", "_to_copy")


def _is_logits(a: Allocation, head: Head, forward: bool) -> bool:
    """Judge by shape, and by module and op, as a vocabulary can be as wide as an activation; kernels have no module."""
    if len(a.shape) < 2 or a.shape[-1] != head.width or math.prod(a.shape[:-1]) not in head.rows:
        return False
    if not a.module and head.width not in head.other_widths:
        return True
    if a.module in HEAD_OPS:
        return forward and a.op in HEAD_OPS[a.module]
    if "." in a.module:  # a module within the model: at its root only the loss is left
        return False
    return any(op in a.op for op in LOSS_OPS[: 3 if a.module else 2])


# `tensor.ROLE` of what no module or parameter names, by the op that made it, its shape, and forward or backward pass.

# Components whose tensors always have a name of their own, or one role.
BY_COMPONENT = {
    "weights": "weight", "gradients": "gradient", "optimizer": "moment", "batch": "batch", "workspace": "workspace",
    "weight_copies": "weight_copy", "buffers": "buffer", "activations.dropout": "dropout_mask",
}  # fmt: skip


def role_of(a: Allocation, component: str, n_embd: int, *, forward: bool) -> str:
    """Return id of the role. `component`: the estimate's row that it counts for; `forward`: made in a forward pass."""
    if component == "logits":
        return _of_logits(a, forward)
    if component in BY_COMPONENT:
        return BY_COMPONENT[component]
    if not forward:
        return "activation_gradient"
    return _of_activation(a, n_embd)


def _of_logits(a: Allocation, forward: bool) -> str:
    if forward:
        if "log_softmax" in a.op:
            return "log_probabilities"
        return "logits_fp32" if "_to_copy" in a.op and a.dtype == "float32" else "logits"
    if "nll_loss" in a.op and "log_softmax" not in a.op:
        return "log_probabilities_gradient"
    # What a model returns beside the loss has a gradient, too: autograd fills it with zeros, in the shape returned.
    return "returned_logits_gradient" if len(a.shape) > 2 else "logits_gradient"


def _of_activation(a: Allocation, n_embd: int) -> str:
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
