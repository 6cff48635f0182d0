"""FSDP2 in the passes of one rank: weights gathered for a block and freed after it, sharded gradients. No torch.

torch/distributed/fsdp/_fully_shard: _fsdp_param_group.py (order of gathering, copying and freeing; prefetching),
_fsdp_collectives.py (buffers, their dtypes and streams), _fsdp_param.py (unreduced gradients). Blocks are wrapped as in
model/ranks/parallel.py; the rest of the model is a group.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from foretrain.config.sharing import Sharing
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.autograd import Parameter, record
from foretrain.predict.abstract.passage import OUTSIDE, Recorder
from foretrain.predict.abstract.ranks import Buckets, BucketViews, OneCard, State
from foretrain.predict.abstract.tensors import Storage, Tensor
from foretrain.predict.timeline import Tensor as Kept

GATHERED, EXCHANGED = "gathered", "exchanged"
GATHERING_STREAM, REDUCING_STREAM = 1, 2
REDUCED_BYTES = 4  # gradients are summed over ranks in fp32


class ShardingMachine(m.Machine):
    """A gradient has the dtype of the gathered weight, and waits for the others of its block."""

    wide_gradients = False

    def accumulate(self, parameter: Parameter, gradient: Tensor) -> None:
        assert gradient.storage is not None
        serial = gradient.storage.serial
        self.t.allocated[serial] = self.t.allocated[serial]._replace(component="gradients")
        parameter.grad = gradient


class Group:
    """Weights that are gathered together. `letter` stands for their elements, all pieces of all ranks; `piece` for
    those of one rank; `sizes`: the same of each weight.
    """

    def __init__(self, letters: tuple[str, str], parameters: Sequence[Parameter], sharing: Sharing, layer: int) -> None:
        self.letter, self.piece = letters
        self.parameters, self.layer = list(parameters), layer
        self.sizes = [sharing.share(p.shape) * sharing.shards for p in self.parameters]
        self.clear()

    def clear(self) -> None:
        self.whole: list[Storage | None] = []  # the gathered weights; unchanged ones are not written
        self.arriving: Storage | None = None  # what was gathered, before it is cut into weights
        self.held: list[Storage] = []  # unreduced gradients
        self.reduced: Storage | None = None  # HSDP's, until the sum over all nodes is done
        for parameter in self.parameters:
            parameter.grad = None


class FullyShard(OneCard):
    machine = ShardingMachine
    leaves = (GATHERED, EXCHANGED)

    def __init__(self, sharing: Sharing, shapes: Sequence[Sequence[int]], *, half: bool) -> None:
        self.sharing, self.half = sharing, half
        padded = tuple(sharing.share(shape) * sharing.shards for shape in shapes)
        # Weights that cannot be cut evenly have sizes that no letter stands for.
        uneven = any(shape[0] % sharing.shards for shape in shapes)
        self.key = sharing.way, sharing.shards > 1, sharing.syncs_each, half, padded if uneven else ()

    def state(self, gradients: list[Kept], left: list[Kept], *, last: bool, saving: bool) -> State:
        return State(bool(gradients), last, len(left)) if saving else State(left=len(left))

    def recorder(self, recorded: Callable[[State], Recorder], state: State) -> Recorder:
        return recorded(state)

    def given(self, gradients: list[Kept], left: list[Kept], count: int) -> list[Kept]:
        return [*left, *gradients][:count]

    def wrap(self, model: Any, machine: m.Machine) -> None:
        self.on = machine
        blocks = list(model.layers())
        self.groups = [Group(("Pb", "Sb"), block.parameters(), self.sharing, i) for i, block in enumerate(blocks)]
        inside = {id(p) for group in self.groups for p in group.parameters}
        outside = [p for p in model.parameters() if id(p) not in inside]
        self.root = Group(("Pr", "Sr"), outside, self.sharing, OUTSIDE)
        for group, module in zip([*self.groups, self.root], [*blocks, model], strict=True):
            module.forward = partial(self._forward, group, module.forward)

    def begin(self, t: Recorder, state: State, *, saving: bool) -> None:
        self.now, self.kept = state, []
        self.behind: Storage | None = None  # the last gathered buffer, freed when the next weights are there
        self.sent: Storage | None = None  # the last gradients on their way, until the next ones are ready
        for group in [self.root, *self.groups]:
            group.clear()
        if not saving:
            for group in [self.root, *self.groups] if state.left else ():
                group.whole = [None]
            return
        if state.gradients:
            self._resume(t, state)
        elif state.left:  # gathered for an evaluation
            for group in [self.root, *self.groups]:
                t.layer = group.layer
                group.whole = [self._born(GATHERED, self._width, *each) for each in self._each(group)]
        t.layer, t.given = OUTSIDE, len(t.events)

    @property
    def _holds(self) -> bool:
        return not self.sharing.syncs_each

    def _resume(self, t: Recorder, state: State) -> None:
        for group in [*reversed(self.groups), self.root]:
            t.layer = group.layer
            if self._holds and state.last:
                group.held = [self._gradient(parameter) for parameter in group.parameters]
            if group is self.root and state.left:
                self.sent = self._buffer(EXCHANGED, REDUCED_BYTES, group.letter)
            if state.left > 1:
                group.reduced = self._buffer(EXCHANGED, REDUCED_BYTES, group.piece, REDUCING_STREAM)

    def end(self) -> None:
        """Finish the root last, as nothing comes before it."""
        self._post_backward(self.root)
        if self.now.last:
            self.sent = None
            for group in self.groups:
                group.reduced = None
            self.root.reduced = None

    def _forward(self, group: Group, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self.on.again:  # a checkpoint recomputes what has been gathered for its backward pass
            return forward(*args, **named)
        self._gather(group)
        self._arrive(group, ahead=True)
        out = forward(*self._entered(group, args), **named)
        if self.sharing.way.reshards:
            group.whole = []
        elif not self.on.grad:
            self.kept += group.whole
        if group is self.root:
            self.behind = None
        return self._left(group, out)

    def _entered(self, group: Group, args: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments; when their gradients are there, those of the weights are, too."""
        inputs = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        if not self.on.grad or not inputs:
            return args
        outs = {id(x): x.detach() for x in inputs}

        def run(saved: list[Any], *grads: Tensor | None) -> Sequence[Tensor | None]:
            self._post_backward(group)
            return grads

        record(list(outs.values()), run, list({id(x): x for x in inputs}.values()))
        return [outs.get(id(x), x) for x in args]

    def _left(self, group: Group, out: Tensor) -> Tensor:
        """Return the result; when its gradient is there, the weights are gathered once more."""
        if not self.on.grad or not out.requires_grad:
            return out
        found = out.detach()

        def run(saved: list[Any], grad: Tensor) -> Sequence[Tensor]:
            self._pre_backward(group)
            return (grad,)

        record(found, run, (out,))
        return found

    def _pre_backward(self, group: Group) -> None:
        self._gather(group)
        self._arrive(group, ahead=False)
        number = len(self.groups) if group is self.root else group.layer
        if number:
            self._gather(self.groups[number - 1])

    def _post_backward(self, group: Group) -> None:
        gradients = [p.grad.storage for p in group.parameters if p.grad is not None]
        if self._holds and not self.now.last:
            self._hold(group)
            return
        for parameter in group.parameters:
            parameter.grad = None
        if group.held:  # the new ones are added to them
            gradients, group.held = list(group.held), []
        group.whole = []
        self.sent = group.reduced = None
        self.sent = self._buffer(EXCHANGED, REDUCED_BYTES, group.letter)
        gradients.clear()
        summed = self.now.gradients and not self._holds
        out = self._buffer(EXCHANGED if summed else "gradients", REDUCED_BYTES, group.piece, REDUCING_STREAM)
        if not summed:
            self.kept.append(out)
        elif self.sharing.way.replicates:
            group.reduced = out

    def _hold(self, group: Group) -> None:
        group.whole = []
        for parameter in group.parameters:
            if parameter.grad is None:
                continue
            if not self.half:  # it stays as it is; written once more so that these come in the order of the weights
                parameter.grad = None
            if not self.now.gradients:
                self.kept.append(self._gradient(parameter))
            parameter.grad = None

    def _gather(self, group: Group) -> None:
        if group.whole or group.arriving is not None or self.sharing.shards == 1:
            return
        cast = self._buffer(GATHERED, self._width, group.piece, GATHERING_STREAM) if self.half else None
        group.arriving = self._buffer(GATHERED, self._width, group.letter, GATHERING_STREAM)
        del cast

    def _arrive(self, group: Group, *, ahead: bool) -> None:
        """Split what was gathered into weights. `ahead`: in a forward pass its buffer lives until the next one's."""
        if group.whole:
            return
        if ahead:
            self.behind = None
        cast = None
        for parameter, size in self._each(group):
            if self.sharing.shards == 1 and self.half:
                cast = self._born(GATHERED, self._width, parameter, size)
            group.whole.append(self._born(GATHERED, self._width, parameter, size))
        del cast
        if ahead and self.sharing.shards > 1:
            self.behind = group.arriving
        group.arriving = None

    @property
    def _width(self) -> int:
        return 2 if self.half else 4

    def _each(self, group: Group) -> list[tuple[Parameter, int]]:
        return list(zip(group.parameters, group.sizes, strict=True))

    def _gradient(self, parameter: Parameter) -> Storage:
        return Storage(self.on.t, self.on.t.allocate("gradients", REDUCED_BYTES, parameter.shape))

    def _born(self, component: str, item_bytes: int, parameter: Parameter, size: int) -> Storage:
        """Allocate a weight with its padding."""
        t = self.on.t
        if size == parameter.numel():
            return Storage(t, t.allocate(component, item_bytes, parameter.shape))
        return Storage(t, t.allocate(component, item_bytes, (), (item_bytes * size,)))

    def _buffer(self, component: str, item_bytes: int, letter: str, stream: int = 0) -> Storage:
        t = self.on.t
        serial = t.allocate(component, item_bytes, (), (item_bytes, letter))
        if stream and self.on.cuda:
            t.streams[serial] = stream
        return Storage(t, serial)


def passes_of(sharing: Sharing | None, shapes: Sequence[Sequence[int]], *, half: bool) -> OneCard:
    if sharing is None:
        return OneCard()
    if sharing.way.shards_weights:
        return FullyShard(sharing, shapes, half=half)
    return BucketViews() if sharing.bucket_view else Buckets()
