"""What is alive at each moment of a steady step, in order: from the estimate, or from a trace."""

from collections import Counter
from collections.abc import Iterable, Sequence

from foretrain.base.records import Record
from foretrain.base.statistics import extremes
from foretrain.predict.estimate.simulated_run import SimulatedRun
from foretrain.predict.spec import StepName, StepSpec
from foretrain.predict.timeline import Passage, Size, Tensor, Timeline
from foretrain.predict.trace.memory import component_id
from foretrain.predict.trace.record import Trace, moment_id

PHASE = "steady_step"
MICRO_BATCHES = 2  # that are shown; later ones are like the second
MOST = 300  # moments that are kept; the highest and lowest of their neighbours


class MomentMemory(Record):
    """One moment: where in the step it is, and the bytes of each component that are alive after what happened there."""

    moment: str
    components_bytes: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.components_bytes.values())


class StepMoments(Record):
    """A steady step in order. `events`: its allocations and frees; `micro_batches`: those that are shown."""

    step: StepName
    source: str
    events: int
    micro_batches: int
    moments: tuple[MomentMemory, ...]

    @property
    def peak(self) -> MomentMemory:
        return max(self.moments, key=lambda moment: moment.total_bytes)


class _Recorder(Timeline):
    def __init__(self, symbols: dict[str, int], granule: int) -> None:
        super().__init__(symbols, granule)
        self.sums: Counter[str] = Counter()
        self.seen: list[tuple[str, dict[str, int]]] = []
        self.inside = False
        self.played: dict[int, tuple[str, int]] = {}  # (component, bytes) of what passages made, by serial number

    def phase(self, name: str) -> None:
        super().phase(name)
        self.inside = name == PHASE
        if self.inside:
            self.at("forward.embedding")  # the batch comes before the estimate names a moment

    def alloc(self, component: str, size: Size) -> Tensor:
        tensor = super().alloc(component, size)
        self.sums[component] += size.nbytes
        self._see()
        return tensor

    def alloc_all(self, component: str, size: Size, parts: Iterable[int]) -> None:
        super().alloc_all(component, size, parts)
        self.sums[component] += size.nbytes
        self._see()

    def free(self, *tensors: Tensor | None) -> None:
        super().free(*tensors)
        for tensor in tensors:
            if tensor is not None:
                self.sums[tensor.component] -= tensor.size.nbytes
        self._see()

    def play(self, passage: Passage, number: int, before: int = 0, given: Sequence[Tensor] = ()) -> int:
        self.played.update({tensor.serial: (tensor.component, tensor.size.nbytes) for tensor in given})
        shift = super().play(passage, number, before, given)
        start = passage.split if number else 0
        moments = passage.moments[start:]
        first = len(self.events) - len(passage.parts[number].events)
        for moment, event in zip(moments, self.events[first:], strict=False):
            if event >= 0:
                component, size = passage.kinds[event - shift]
                self.played[event] = component, size.nbytes
                self.sums[component] += size.nbytes
            else:
                component, nbytes = self.played.pop(~event)
                self.sums[component] -= nbytes
            if self.inside:
                self.at(moment)
                self._see()
        return shift

    def adopt(self, component: str, size: Size, serial: int) -> Tensor:
        self.played.pop(serial)
        return super().adopt(component, size, serial)

    def repeat(self, since: tuple[int, int]) -> dict[int, Tensor] | None:
        """Never: each event is looked at."""
        return None

    def _see(self) -> None:
        if self.inside:
            self.seen.append((self.moment, {key: size for key, size in self.sums.items() if size}))


def step_moments(spec: StepSpec) -> StepMoments:
    """By the estimate, in milliseconds."""
    run = SimulatedRun(spec, make=_Recorder)
    assert isinstance(run.t, _Recorder)
    run.micro_steps, run.steady_steps = MICRO_BATCHES, 1
    run.peaks()
    seen = run.t.seen
    shown = min(MICRO_BATCHES, spec.config.gradient_accumulation_steps)
    return StepMoments(
        step=spec.step, source="estimated", events=len(seen), micro_batches=shown, moments=_thinned(seen)
    )


def traced_moments(trace: Trace, step: StepName, micro_batches: int) -> StepMoments:
    """The same from the real step's trace. `micro_batches`: how many were traced."""
    start, end = next((first, last) for name, first, last in trace.spans() if name == PHASE)
    sums: Counter[str] = Counter()
    for allocation in trace.alive_at(start - 1):
        sums[component_id(allocation)] += allocation.nbytes
    seen: list[tuple[str, dict[str, int]]] = []
    for position in range(start, end):
        event = trace.events[position]
        allocation = trace.allocations[event if event >= 0 else ~event]
        sums[component_id(allocation)] += allocation.nbytes if event >= 0 else -allocation.nbytes
        seen.append((moment_id(trace, position), {key: size for key, size in sums.items() if size}))
    return StepMoments(
        step=step, source="traced", events=len(seen), micro_batches=micro_batches, moments=_thinned(seen)
    )


def _thinned(seen: Sequence[tuple[str, dict[str, int]]]) -> tuple[MomentMemory, ...]:
    totals = [float(sum(parts.values())) for _, parts in seen]
    return tuple(MomentMemory(moment=seen[i][0], components_bytes=seen[i][1]) for i in extremes(totals, MOST))
