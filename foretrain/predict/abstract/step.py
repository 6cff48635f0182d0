"""Micro-batches of the real model's code, run on tensors without values. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from foretrain.config.checks import EIGHT_BITS
from foretrain.config.families import family_of
from foretrain.config.options import OPTIONS, RunConfig, named
from foretrain.model import techniques
from foretrain.predict.abstract import autograd, modules, programs
from foretrain.predict.abstract import tensors as m
from foretrain.predict.abstract.dims import Dim, Kernel, Launch, Launches, counted
from foretrain.predict.abstract.passage import MOST, OUTSIDE, Recorder, Structure, Uneven, copies_of, unroll
from foretrain.predict.abstract.ranks import FRESH, OneCard, Remains, State
from foretrain.predict.spec import Variant
from foretrain.predict.timeline import Passage, Tensor, Timeline

MOST_KEPT = 256
Make = Callable[[Any], Any]  # a model of a config, from a file that programs.load gave
Fuse = Callable[[Sequence[Kernel], set[int]], Sequence[Kernel]]  # kernels, and what is read after them
_recorders: dict[Any, Recorder] = {}  # passes of the layers that are run, by all that decides them but sizes
_structures: dict[Any, Structure] = {}  # passes of all layers
_launches: dict[Any, Launches] = {}  # kernels of the layers that are run, by all that decides them but sizes
_alike: dict[Any, Recorder] = {}  # a pass with these kernels
SWITCHES = (*named(lambda option: option.group == "model" and option.type == "bool"), *techniques.SWITCHES)
LETTERS = {name: option.letter for name, option in OPTIONS.items() if option.letter}


def _remember(kept: dict[Any, Any], key: Any, value: Any) -> None:
    if len(kept) >= MOST_KEPT:
        kept.pop(next(iter(kept)))
    kept[key] = value


class Lettered:
    def __init__(self, config: RunConfig, checkpointed: int, n_layer: int) -> None:
        self._config, self.checkpointed, self.n_layer = config, checkpointed, n_layer
        self._letters = {**LETTERS, **family_of(config).letters}

    def __getattr__(self, name: str) -> Any:
        value, letter = getattr(self._config, name), self._letters.get(name)
        return Dim(value, 1, (letter,)) if letter and value else value


class Result:
    def __init__(self, passage: Passage, shift: int, logits: Tensor | None, given: Sequence[Tensor]) -> None:
        self.passage, self.shift, self.logits, self.given = passage, shift, logits, given


class EagerProgram(Remains):
    TAKEN = ("kept", "flash", "split", "sums1", "sums2", "sums3", "sums4")  # by kernels for themselves, on some cards
    OF_ITS_SIZES = False  # whether a pass is remembered for its own sizes alone
    KERNELS = True  # whether a pass tells all kernels that it runs; what is compiled is traced as a graph, and has none

    def __init__(
        self, timeline: Timeline, variant: Variant, config: RunConfig, low: m.DType | None,
        matmul: str = "dtype", make: Make | None = None, ranks: OneCard | None = None,
    ) -> None:  # fmt: skip
        super().__init__(timeline, ranks or OneCard())
        self.v, self.config, self.low = variant, config, low
        self.last = False  # whether the next micro-batch ends a step
        self.matmul, self.make = matmul if matmul in EIGHT_BITS else "dtype", make
        self.groups = (config.checkpointed, config.n_layer - config.checkpointed)
        self.run = tuple(min(MOST, count) for count in self.groups)
        self.model: Any = None
        self.passages: dict[Any, Passage] = {}

    def _attention(self, learns: bool) -> str:
        return self.v.attention if learns else self.v.evaluation_attention

    def forward(self, saving: bool) -> Result:
        passage = self._passage(saving)
        given = self.given(passage)
        shift = self.t.play(passage, 0, given=given)
        logits = None
        if self.v.keeps_logits:
            serial = next(s for s in passage.left if passage.kinds[s][0] == "logits")
            logits = self.t.adopt(*passage.kinds[serial], serial + shift)
        if not saving:
            self.keep(passage, shift, shift)
        return Result(passage, shift, logits, given)

    def backward(self, result: Result) -> None:
        shift = self.t.play(result.passage, 1, result.shift, result.given)
        self.keep(result.passage, result.shift, shift)

    def clear_workspaces(self) -> None:
        self.t.free(*self.workspaces)
        self.workspaces = []

    @m.one_thread_at_a_time
    def launches(self, saving: bool, fuse: Fuse | None = None) -> list[tuple[Launch, int]]:
        """Return the kernels of a pass, in letters, and how often each runs; `fuse`: as a compiler does."""
        alike = self._kernels_of(saving), self.run
        key = *alike, fuse
        found = _launches.get(key)
        if found is None:
            recorder = _alike.get(alike) or self._recorder(saving)
            kernels = fuse(recorder.kernels, {serial for _, serial, _ in recorder.taken}) if fuse else recorder.kernels
            found = counted(kernels)
            if recorder.any_size:
                _remember(_launches, key, found)
        copies = {OUTSIDE: 1, **{layer: len(each) for layer, each in enumerate(copies_of(self.groups, self.run))}}
        if any(layers[i] != layers[i + 1] for layers in found.values() for i, n in copies.items() if n > 1):
            self._uneven()
            return self.launches(saving, fuse)
        return [(launch, sum(times * copies[i] for i, times in layers.items())) for launch, layers in found.items()]

    def _passage(self, saving: bool) -> Passage:
        """Return the pass in the present sizes, without cuBLAS's existing workspaces."""
        s = self.t.symbols
        key = len(self.workspaces), saving, self._state(saving), s["B"], s["T"]
        whole = self._whole(saving)
        if key not in self.passages:
            self.passages[key] = whole.without("workspace", key[0])
        return self.passages[key]

    def _whole(self, saving: bool) -> Passage:
        s, state = self.t.symbols, self._state(saving)
        key = saving, state, s["B"], s["T"]
        if key not in self.passages:
            self.passages[key] = self.ranks.sized(self._structure(saving), state, self.t)
        return self.passages[key]

    @m.one_thread_at_a_time
    def _structure(self, saving: bool) -> Structure:
        state = self._state(saving)
        key = self._shape_of(saving), self.groups, state
        found = _structures.get(key)
        if found is None:
            found = self.ranks.structure(partial(self._unrolled, saving), state)
            if self.OF_ITS_SIZES or found.any_size:
                _remember(_structures, key, found)
        return found

    def _state(self, saving: bool) -> State:
        return self.ranks.state(self.gradients, self.left, last=self.last, saving=saving)

    def _unrolled(self, saving: bool, state: State) -> Structure:
        record = partial(self._recorder, saving)
        try:
            return unroll(self.ranks.recorder(record, state), self.groups, self.run)
        except Uneven:
            self._uneven()
            return unroll(self.ranks.recorder(record, state), self.groups, self.run)

    def _uneven(self) -> None:
        self.run, self.model = self.groups, None

    def _recorder(self, saving: bool, state: State = FRESH) -> Recorder:
        """Record the layers that are run, for a new state."""
        key = self._shape_of(saving), state, self.run
        found = _recorders.get(key)
        if found is None:
            found = self._recorded(saving, state)
            if self.OF_ITS_SIZES or found.any_size:
                _remember(_recorders, key, found)
                if self.KERNELS and self.ranks.key is None:
                    _remember(_alike, (self._kernels_of(saving), self.run), found)
        return found

    def _shape_of(self, saving: bool) -> Any:
        takes = (bool(self.t.symbols[letter]) for letter in self.TAKEN)
        return replace(self.v, checkpointed=0), self.ranks.key, *takes, *self._besides(saving)

    def _kernels_of(self, saving: bool) -> Any:
        """Return all that decides a pass's kernels but sizes: fused attention is one kernel, whatever it saves."""
        kind = self._attention(saving)
        if self.t.symbols["G"] == 1 and kind not in ("math", "written"):  # else a kernel may want copies of keys
            kind = "fused"
        v = replace(self.v, checkpointed=0, attention=kind, evaluation_attention=kind, pieces=False, auto_chunker=False)
        return v, *self._besides(saving)

    def _besides(self, saving: bool) -> Any:
        s, c = self.t.symbols, self.config
        chunks = divmod(s["B"] * s["T"], c.loss_chunk_size) if c.loss_chunk_size else ()
        ones = *(s[letter] == 1 for letter in "BTHDKG"), s["T"] == s["W"], s["D"] == s["E"], s["H"] * s["D"] == s["C"]
        switches = tuple(getattr(c, name) for name in SWITCHES)
        return (
            saving, self.low is None, c.recipe, c.attention, chunks, ones, switches,
            self.matmul, self.make,
        )  # fmt: skip

    def _dtypes(self) -> m.DType | None:
        """Return autocast's dtype of fp32. Weights made from here on have the step's dtype."""
        modules.weights.set(self.low if self.v.master and self.low is not None else m.float32)
        return self.low if self.v.casts else None

    def _built(self) -> Any:
        if self.model is None:
            casts = self._dtypes()
            self.machine = self.ranks.machine(cuda=self.v.cuda, low=casts, attention=self._attention)
            self.model = (self.make or self._of_recipe)(Lettered(self.config, self.run[0], sum(self.run)))
            if self.matmul != "dtype":
                low_precision = programs.load("foretrain.model.low_precision")
                low_precision.cpu.sums_are_exact = True
                low_precision.convert(self.model.layers(), self.matmul)
            self.parameters = list(self.model.parameters())
            modules.name_operations(self.model)
            self.ranks.wrap(self.model, self.machine)
        return self.model

    def _of_recipe(self, config: Any) -> Any:
        name, kind = family_of(self.config).model
        if self.v.keeps_logits:
            name, kind = "foretrain.model.gpt2", "NanoGPT"
        return programs.EAGER.model(name, kind, config)

    def _recorded(self, saving: bool, state: State) -> Recorder:
        model, machine, symbols = self._built(), self.machine, self.t.symbols
        t = machine.t = Recorder(symbols)
        shape = (Dim(symbols["B"], 1, ("B",)), Dim(symbols["T"], 1, ("T",)))
        machine.grad = saving
        machine.workspaces.clear()
        if model.training != saving:
            model.train(saving)
        self.ranks.begin(t, state, saving=saving)
        own = m.Storage(t, t.allocate("batch", 8, shape)) if saving and self.v.keeps_logits else None
        idx, targets = (m.Tensor(shape, m.contiguous_strides(shape), m.int64, storage) for storage in (None, own))
        del own
        with m.running(machine):
            with machine.autocast():
                found = model(idx, targets)
            logits, loss = found if self.v.keeps_logits else (None, found)
            del found, targets
            t.split = len(t.events)
            if saving:
                root = [loss]
                del loss
                autograd.backward(root)
                self.ranks.end()
            else:
                del loss
                t.split = len(t.events)
            t.ended = True
        del logits
        for parameter in self.parameters:
            parameter.grad = None
        return t
