"""A separately compiled function called by eager code (torch/_functorch/_aot_autograd): the backward graph empties its
list of saved tensors, and all gradients are there when it ends. The eager caller holds its arguments."""

from collections.abc import Callable, Sequence
from typing import Any

from foretrain.config.families import family_of
from foretrain.predict.abstract import autograd
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.autograd import Parameter
from foretrain.predict.abstract.passage import Recorder
from foretrain.predict.abstract.ranks import State
from foretrain.predict.abstract.step import EagerProgram, Lettered
from foretrain.predict.abstract.tensors import Storage, Tensor
from foretrain.predict.compiled import operations
from foretrain.predict.compiled.graph import INPUT, TANGENT, Compiler, Node, Traced
from foretrain.predict.compiled.halves import Graphs, forward_only, joint
from foretrain.predict.compiled.kernels import Lives
from foretrain.predict.compiled.step import LOADER, CompiledProgram


class _Lives(Lives):
    def __init__(self, t: Recorder, machine: Compiler, layer: int) -> None:
        super().__init__(t, machine)
        self.layer = layer
        self.storages: dict[int, Storage] = {}

    def hold(self, kept: dict[Node, Tensor]) -> None:
        for node, tensor in kept.items():
            if (storage := tensor.storage) is not None:
                self.alive[node], self.storages[storage.serial] = storage.serial, storage

    def free(self, *nodes: Node) -> None:
        for node in nodes:
            serial = self.alive.pop(node)
            if self.storages.pop(serial, None) is None:
                self.t.free(serial)

    def give(self, node: Node) -> Tensor:
        serial = self.alive[node.base]
        if serial not in self.storages:
            self.storages[serial] = Storage(self.t, serial)
        return Tensor(node.shape, m.contiguous_strides(node.shape), node.dtype, self.storages[serial])


class _Traced:
    def __init__(self, graphs: Graphs, inputs: Sequence[Node], sources: Sequence[int], out: Node) -> None:
        self.graphs, self.inputs, self.out = graphs, inputs, out
        self.sources = sources  # the input or weight that each gradient is of
        self.saved = list(dict.fromkeys(node.base for node in graphs.saved))
        self.gradients = list(dict.fromkeys(node.base for node in graphs.gradients))


class Function:
    """`call` of a model that a machine of `make` traces with weights of its own, compiled once. `seen`: run kernels."""

    def __init__(
        self, make: Callable[[], Compiler], call: Callable[..., Any], own: Sequence[Parameter], seen: set[Any]
    ) -> None:
        self.make, self.call, self.own, self.seen = make, call, own, seen
        self._known: dict[Any, _Traced] = {}

    def traced(self, args: Sequence[Tensor]) -> _Traced:
        eager = m.machine()
        key = eager.grad, eager.autocasting, tuple((x.shape, x.dtype, x.requires_grad) for x in args)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._trace(args, saving=eager.grad, casting=eager.autocasting)
        return found

    def _trace(self, args: Sequence[Tensor], *, saving: bool, casting: bool) -> _Traced:
        eager, machine = m.machine(), self.make()
        machine.t, machine.grad = Recorder(eager.t.symbols), saving
        machine.t.layer, machine.t.moment = 0, eager.t.moment
        inputs: list[Traced] = []
        wanted: dict[int, Node] = {}  # gradients by the number of their input
        with m.running(machine):
            for number, x in enumerate(args):
                made = machine.input(x.shape, x.dtype)
                if saving and x.requires_grad:

                    def take(saved: list[Any], grad: Any, number: int = number) -> Sequence[Tensor]:
                        wanted[number] = grad.value
                        return ()

                    autograd.record(made, take, ())
                inputs.append(made)
            nodes = [x.value for x in inputs]
            if casting:
                with machine.autocast():
                    out = self.call(*inputs)
            else:
                out = self.call(*inputs)
            value = out.value
            inputs.clear()
            if saving:
                root = [out]
                del out
                autograd.backward(root)
                places = {id(parameter): len(args) + n for n, parameter in enumerate(self.own)}
                sources = [places[id(parameter)] for parameter, _ in machine.gradients] + list(wanted)
                machine.gradients += [(self.own[0], node) for node in wanted.values()]
                graphs = joint(machine, [value], whole=False)
            else:
                sources, graphs = [], forward_only(machine, [value])
        assert all(node.kind == INPUT for node in nodes)
        return _Traced(graphs, nodes, sources, value)


class Region:
    def __init__(self, function: Function, parameters: Sequence[Parameter]) -> None:
        self.function, self.parameters = function, parameters

    def __call__(self, *args: Tensor) -> Tensor:
        eager = m.machine()
        found = self.function.traced(args)
        lives = self._lives(eager)
        graphs = found.graphs
        components = {node.base: node.base.component for node in (*graphs.saved, *graphs.outputs)}
        lives.half(graphs.forward, components, set(components), thread=eager.thread)
        out = lives.give(found.out)
        if not (eager.grad and graphs.backward):
            return out
        given = dict(zip(found.inputs, args, strict=True))
        kept = [
            (node, given.get(node) or lives.give(node)) for node in found.saved if node in lives.alive or node in given
        ]
        nodes, saved = [node for node, _ in kept], [tensor for _, tensor in kept]
        kept.clear()
        inputs = [*args, *self.parameters]
        layer, count = eager.t.layer, len(inputs)  # the inputs themselves are not held

        def run(saved: list[Tensor], grads: list[Tensor | None]) -> Sequence[Tensor | None]:
            return self._backward(found, layer, dict(zip(nodes, saved, strict=True)), saved, grads, count)

        autograd.record(out, run, inputs, saved, composite=True)
        return out

    def _lives(self, eager: m.Machine) -> _Lives:
        machine = self.function.make()
        machine.workspaces = eager.workspaces
        lives = _Lives(eager.t, machine, eager.t.layer)
        lives.seen = self.function.seen
        return lives

    def _backward(
        self,
        found: _Traced,
        layer: int,
        kept: dict[Node, Tensor],
        saved: list[Tensor],
        grads: list[Tensor | None],
        count: int,
    ) -> list[Tensor | None]:
        lives, graphs = self._lives(m.machine()), found.graphs
        lives.layer = layer
        lives.given_away = frozenset(found.inputs)
        lives.hold(kept)
        kept.clear()
        saved.clear()
        assert graphs.backward is not None
        held = set(found.gradients)
        lives.half(graphs.backward, dict.fromkeys(found.gradients, "temporaries"), held, thread="backward")
        lives.free(*(node for node in list(lives.alive) if node not in held))
        outs: list[Tensor | None] = [None] * count
        for place, node in zip(found.sources, graphs.gradients, strict=True):
            outs[place] = grads[0] if node.base.kind == TANGENT else lives.give(node)
        return outs


class BlocksProgram(CompiledProgram):
    """One graph for all blocks, which differ by their weights alone, and one for the loss."""

    def _shape_of(self, saving: bool) -> Any:
        return "blocks", super()._shape_of(saving)

    def _built(self) -> Any:
        if self.model is None:
            casts = self._dtypes()
            self.machine = self.ranks.machine(cuda=self.v.cuda, low=casts, attention=self._attention)
            self.model = self._of_recipe(Lettered(self.config, self.run[0], sum(self.run)))
            self.traced = LOADER.model(*family_of(self.config).model, Lettered(self.config, 0, 1))
            self._compile(casts)
            self.parameters = list(self.model.parameters())
            self.ranks.wrap(self.model, self.machine)
        return self.model

    def _compile(self, casts: m.DType | None) -> None:
        def make() -> Compiler:
            return Compiler(cuda=self.v.cuda, low=casts, attention=self._attention, functional=operations)

        seen: set[Any] = set()  # kernels that have run
        first = self.traced.layers()[0]
        block = Function(make, first.forward, list(first.parameters()), seen)
        for each in self.model.layers():
            each.forward = Region(block, list(each.parameters()))
        if self.model.chunked_loss is not None:
            self.model.chunked_loss.softmax_step_ = lambda logits, targets: m.make("sum", (), m.float32, logits)
        else:
            loss = Function(make, self.traced.whole_loss, [self.traced.lm_head.weight], seen)
            self.model.whole_loss = Region(loss, [self.model.lm_head.weight])

    def _recorded(self, saving: bool, state: State) -> Recorder:
        self._built()
        if self.traced.training != saving:
            self.traced.train(saving)
        return EagerProgram._recorded(self, saving, state)
