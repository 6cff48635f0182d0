"""The forward and the backward graph of a traced micro-batch. No torch."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from foretrain.predict.abstract import autograd, modules
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.dims import Dim
from foretrain.predict.abstract.passage import OUTSIDE, Recorder
from foretrain.predict.compiled.graph import INPUT, TANGENT, Compiler, Node, Traced
from foretrain.predict.compiled.kernels import Half, Kernel, Lives
from foretrain.predict.compiled.operations import traced
from foretrain.predict.compiled.partition import Partition

# The order in which Inductor runs kernels: of four orders the one whose estimated peak is lowest
# (torch/_inductor/memory.py, reorder_for_peak_memory): the order of the graph; the kernel next that leaves least memory
# ("LPMF"); that whose inputs are oldest ("BFS"); and depth first from small kernels on ("DFS").

MUTATED = "index_put"  # written in place: a new name, and no memory


class Plan:
    def __init__(self, kernels: Sequence[Kernel], given: set[Node], wanted: set[Node]) -> None:
        self.kernels = kernels
        made = {node: i for i, kernel in enumerate(kernels) for node in kernel.members}
        self.names = self._names(kernels)
        self.reads: list[list[Node]] = []  # buffers
        self.before: list[list[int]] = []
        self.readers: dict[Node, list[int]] = {}
        self.size: list[int] = []
        for i, kernel in enumerate(kernels):
            reads = sorted(kernel.reads, key=lambda node: node.index)
            self.before.append(list(dict.fromkeys(made[node] for node in reads if node in made)))
            buffers = list(dict.fromkeys(self.names.get(node, node) for node in reads))
            self.reads.append([node for node in buffers if node in made or node in given])
            for node in self.reads[-1]:
                self.readers.setdefault(node, []).append(i)
            self.size.append(sum(node.nbytes for node in kernel.writes if node.name != MUTATED))
        self.given = [node for node in self.readers if node in given]
        self.wanted = {self.names.get(node, node) for node in wanted}
        self.after: list[list[int]] = [[] for _ in kernels]
        for i, each in enumerate(self.before):
            for j in each:
                self.after[j].append(i)

    def _names(self, kernels: Sequence[Kernel]) -> dict[Node, Node]:
        return {
            kernel.first: next(node for node in kernel.reads if node.name == "full")
            for kernel in kernels if kernel.first.name == MUTATED
        }  # fmt: skip

    def bytes_at(self, order: Sequence[int]) -> list[int]:
        step = {number: i for i, number in enumerate(order)}
        change = [0] * (len(order) + 1)
        for node in self.given:
            change[0] += node.nbytes
            if node not in self.wanted:
                change[max(step[i] for i in self.readers[node]) + 1] -= node.nbytes
        for i, number in enumerate(order):
            change[i] += self.size[number]
            for node in self.kernels[number].writes:
                if node.name != MUTATED and node not in self.wanted:
                    last = max((step[each] for each in self.readers.get(node, ())), default=i)
                    change[last + 1] -= node.nbytes
        return list(accumulate(change))

    def least_memory(self) -> list[int]:
        """Choose the next kernel after which least is left, among those that stay below the peak so far."""
        missing = [len(each) for each in self.before]
        uses = {node: len(each) + (node in self.wanted) for node, each in self.readers.items()}
        frees = [
            sum(node.nbytes for node in reads if uses[node] == 1)
            + sum(node.nbytes for node in kernel.writes
                  if node.name != MUTATED and node not in self.wanted and node not in uses)
            for reads, kernel in zip(self.reads, self.kernels, strict=True)
        ]  # fmt: skip
        now = sum(node.nbytes for node in self.given)
        most = max(now, sum(node.nbytes for node in self.wanted))
        ready = {i for i, count in enumerate(missing) if not count}
        found: list[int] = []
        while ready:
            room = most - now
            chosen = min(ready, key=lambda i: (self.size[i] if self.size[i] > room else 0, self.size[i] - frees[i], i))
            ready.remove(chosen)
            found.append(chosen)
            now += self.size[chosen]
            most = max(most, now)
            now -= frees[chosen]
            for i in self.after[chosen]:
                missing[i] -= 1
                if not missing[i]:
                    ready.add(i)
            for node in self.reads[chosen]:
                uses[node] -= 1
                if uses[node] == 1:
                    for i in self.readers[node]:
                        frees[i] += node.nbytes
        return found

    def oldest_inputs(self) -> list[int]:
        missing = [len(each) for each in self.before]
        place: dict[int, int] = {}
        ready: list[tuple[list[int], int]] = [([], i) for i, count in enumerate(missing) if not count]
        heapq.heapify(ready)
        found: list[int] = []
        while ready:
            _, chosen = heapq.heappop(ready)
            place[chosen] = len(found)
            found.append(chosen)
            for i in self.after[chosen]:
                missing[i] -= 1
                if not missing[i]:
                    heapq.heappush(ready, (sorted(place[j] for j in self.before[i]), i))
        return found

    def small_first(self) -> list[int]:
        moved = [size + sum(node.nbytes for node in reads) for size, reads in zip(self.size, self.reads, strict=True)]
        key: Callable[[int], tuple[int, int]] = lambda i: (moved[i], i)  # noqa: E731
        found: list[int] = []
        seen: set[int] = set()
        for start in sorted(range(len(moved)), key=key):
            if start in seen:
                continue
            seen.add(start)
            open_ = [(start, iter(sorted(self.before[start], key=key)))]
            while open_:
                number, rest = open_[-1]
                following = next((i for i in rest if i not in seen), None)
                if following is None:
                    found.append(number)
                    open_.pop()
                else:
                    seen.add(following)
                    open_.append((following, iter(sorted(self.before[following], key=key))))
        return found


def arrange(half: Half, given: set[Node]) -> None:
    """Order the kernels of a graph as they run. `given`: inputs that end with their last use."""
    kernels = half.kernels
    plan = Plan(kernels, given, half.wanted)
    orders = [list(range(len(kernels))), plan.least_memory(), plan.oldest_inputs(), plan.small_first()]
    orders = [order for order in orders if len(order) == len(kernels)]
    alive = [plan.bytes_at(order) for order in orders]
    best = min(range(len(orders)), key=lambda i: max(alive[i]))
    half.kernels, half.bytes_at = [kernels[i] for i in orders[best]], alive[best]


@dataclass
class Graphs:
    forward: Half
    backward: Half | None
    saved: Sequence[Node]
    outputs: Sequence[Node]
    gradients: Sequence[Node]
    tangents: Sequence[Node]


def joint(machine: Compiler, outputs: Sequence[Node], *, whole: bool) -> Graphs:
    gradients = [node for _, node in machine.gradients]
    cut = Partition(machine.graph, outputs, gradients)
    kept = set(cut.saved)
    reached = before(gradients, kept)
    saved = [node for node in cut.saved if node in reached]  # what nobody takes is left out
    wanted = [*outputs, *saved]
    own = before(wanted, set())
    forward = Half([node for node in cut.nodes if node in own], (), wanted)
    order: list[Node] = []
    seen = set(saved)
    for node in cut.nodes:  # what is recomputed comes right before what takes it (reordering_to_mimic_autograd_engine)
        if node in cut.backward and node in reached:
            fresh = sorted(before([node], seen) - seen, key=lambda each: each.index)
            order += fresh
            seen.update(fresh)
    tangents = [node for node in cut.nodes if node.kind == TANGENT]
    backward = Half(order, kept, gradients, whole=whole)
    ends = {node.base for node in saved if node.base.kind != INPUT}  # tangents are taken to stay (memory.py)
    arrange(forward, set())
    arrange(backward, ends)
    return Graphs(forward, backward, saved, outputs, gradients, tangents)


def forward_only(machine: Compiler, outputs: Sequence[Node]) -> Graphs:
    machine.graph.link()
    own = before(outputs, set())
    half = Half([node for node in machine.graph.nodes if node in own], (), outputs)
    arrange(half, set())
    return Graphs(half, None, (), outputs, (), ())


def before(wanted: Sequence[Node], stop: set[Node]) -> set[Node]:
    found: set[Node] = set()
    open_ = list(wanted)
    while open_:
        node = open_.pop()
        if node not in found:
            found.add(node)
            if node not in stop:
                open_ += node.inputs
    return found


def recorded(
    machine: Compiler, symbols: dict[str, int], model: Any, forward: Callable[[Any, Any, Any], tuple[Any, Any]]
) -> Recorder:
    """Record both passes in training; forward(model, token ids, labels) returns loss and logits, to be released."""
    t = machine.t = Recorder(symbols)
    machine.grad = True
    modules.name_operations(model)
    model.train(True)
    graphs, logits = _graphs(machine, model, forward)
    lives = Lives(t, machine)
    kept = {node.base: node.base.component for node in (*graphs.saved, *graphs.outputs)}
    lives.half(graphs.forward, kept, set(kept), thread="forward")
    t.layer = OUTSIDE
    if logits in {node.base for node in graphs.saved}:
        lives.given_away = frozenset({logits})
    else:
        lives.free(logits)
    t.split = len(t.events)
    for node in backward(lives, graphs):
        t.take(lives.alive[node])
    t.ended = True
    return t


def _graphs(machine: Compiler, model: Any, forward: Callable[[Any, Any, Any], tuple[Any, Any]]) -> tuple[Graphs, Node]:
    symbols = machine.t.symbols
    shape = (Dim(symbols["B"], 1, ("B",)), Dim(symbols["T"], 1, ("T",)))
    with m.running(machine):
        idx, labels = (machine.input(shape, m.int64) for _ in range(2))
        with machine.autocast():
            loss, logits = (traced(x) for x in forward(model, idx, labels))
        autograd.backward([with_tangent(machine, loss, logits)])
        graphs = joint(machine, [loss.value, logits.value], whole=True)
    return graphs, logits.value.base


def backward(
    lives: Lives, graphs: Graphs, component: str = "gradients", stays: frozenset[Node] = frozenset()
) -> list[Node]:
    """Return the gradients: all are there when the graph ends, beside them only what `stays`."""
    lives.t.moment = "backward.loss"
    for tangent in graphs.tangents:
        if tangent.shape and tangent not in lives.alive:  # of what is returned besides the loss: zeros of the runtime's
            lives.allocate(tangent, "logits")
    gradients = list(dict.fromkeys(node.base for node in graphs.gradients))
    held = {*gradients, *stays}
    assert graphs.backward is not None
    lives.half(graphs.backward, dict.fromkeys(gradients, component), held, thread="backward")
    lives.t.layer = OUTSIDE
    lives.free(*(node for node in list(lives.alive) if node not in held))
    return gradients


def with_tangent(machine: Compiler, root: Traced, logits: Traced) -> Traced:
    """Return the loss with the other results, whose gradient comes from outside."""
    both = Traced(root.value, root.shape)
    tangent = machine.input(logits.shape, logits.dtype, TANGENT)
    autograd.record(both, lambda saved, grad: (grad, tangent), (root, logits))
    return both
