"""The compiled pass of a model that gives its loss and its logits, as a program of others' calls it. No torch."""

from collections.abc import Callable
from typing import Any

from foretrain.predict.abstract import autograd, modules
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.dims import Dim
from foretrain.predict.abstract.passage import OUTSIDE, Recorder
from foretrain.predict.compiled.graph import TANGENT, Compiler, Node, Traced
from foretrain.predict.compiled.halves import Graphs, joint
from foretrain.predict.compiled.lives import Lives
from foretrain.predict.compiled.operations import traced


def recorded(
    machine: Compiler, symbols: dict[str, int], model: Any, forward: Callable[[Any, Any, Any], tuple[Any, Any]]
) -> Recorder:
    """Forward and backward pass in training. forward(model, token ids, labels) gives the loss and the logits; the
    caller lets go of the logits before backward."""
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
    """The two halves, and the node that the logits are."""
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
    """The gradients: all are there when the graph ends, and nothing else but what `stays`. `component`: what they count
    as."""
    lives.t.moment = "backward.loss"
    for tangent in graphs.tangents:
        if tangent.shape and tangent not in lives.alive:  # of what is returned besides the loss: zeros of the runtime's
            lives.birth(tangent, "logits")
    gradients = list(dict.fromkeys(node.base for node in graphs.gradients))
    held = {*gradients, *stays}
    assert graphs.backward is not None
    lives.half(graphs.backward, dict.fromkeys(gradients, component), held, thread="backward")
    lives.t.layer = OUTSIDE
    lives.free(*(node for node in list(lives.alive) if node not in held))
    return gradients


def with_tangent(machine: Compiler, root: Traced, logits: Traced) -> Traced:
    """The loss with what is returned besides it, whose gradient comes from outside."""
    both = Traced(root.value, root.shape)
    tangent = machine.input(logits.shape, logits.dtype, TANGENT)
    autograd.record(both, lambda saved, grad: (grad, tangent), (root, logits))
    return both
