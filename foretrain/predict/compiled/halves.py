"""The forward and the backward graph of a traced micro-batch. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from foretrain.predict.compiled.graph import INPUT, TANGENT, Compiler, Node
from foretrain.predict.compiled.kernels import Half
from foretrain.predict.compiled.order import arrange
from foretrain.predict.compiled.partition import Partition


@dataclass
class Graphs:
    """A traced micro-batch: its two halves, what goes between them, and what comes out."""

    forward: Half
    backward: Half | None
    saved: Sequence[Node]
    outputs: Sequence[Node]
    gradients: Sequence[Node]
    tangents: Sequence[Node]


def joint(machine: Compiler, outputs: Sequence[Node], *, whole: bool) -> Graphs:
    """The halves of a graph whose gradients have been traced."""
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
    """The graph of an evaluation."""
    machine.graph.link()
    own = before(outputs, set())
    half = Half([node for node in machine.graph.nodes if node in own], (), outputs)
    arrange(half, set())
    return Graphs(half, None, (), outputs, (), ())


def before(wanted: Sequence[Node], stop: set[Node]) -> set[Node]:
    """What is needed for something, and what was there already of it."""
    found: set[Node] = set()
    open_ = list(wanted)
    while open_:
        node = open_.pop()
        if node not in found:
            found.add(node)
            if node not in stop:
                open_ += node.inputs
    return found
