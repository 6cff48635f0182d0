"""The memory of a fine-tuning run: sums and largest tensors of each phase, and what nvidia-smi shows."""

import re
from collections.abc import Sequence
from typing import Literal

from foretrain.analysis.components import Line, LineSource, Shown, Sum, reconcile, sums, tensors, with_numbers
from foretrain.base.records import Record
from foretrain.predict.abstract.autograd import Parameter
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.finetune.memory import FineTuneEstimate, estimated, formula_of, symbols_of
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.memory import PhaseMemory
from foretrain.predict.trace.record import Trace

MOST_TENSORS = 24  # kinds of tensors of a phase that are listed
TRAINED = ("gradients", "optimizer")  # what only trained weights have


class LargeTensor(Record):
    """Tensors of one kind that are alive at a phase's peak, of all layers. `where`: their weights, or the module that
    made them. `what`: a formula by an estimate, a shape and dtype by a trace."""

    component: str
    where: str
    what: str
    numbers: str
    count: int
    size_bytes: int


class ExplainedPhase(Record):
    phase: str
    moment: str
    allocated_bytes: int
    reserved_bytes: int | None
    sums: tuple[Sum, ...]
    tensors: tuple[LargeTensor, ...]  # the largest first


class FineTuneExplanation(Record):
    source: Literal["estimated", "traced"]
    phase: str
    phases: tuple[ExplainedPhase, ...]
    lines: tuple[Line, ...]
    conclusion: str  # id of a text


def explain(
    plan: FineTunePlan,
    trace: Trace | None = None,
    *,
    settings: Settings | None = None,
    observed_bytes: int | None = None,
    process_bytes: int | None = None,
) -> FineTuneExplanation:
    """Explain a plan's memory, with its trace by modules and shapes. The bytes are nvidia-smi's."""
    memory, neediest = plan.memory, plan.memory.neediest
    source: LineSource = "estimated" if trace is None else "traced"
    shown = Shown(neediest, memory.context, source, plan.used_by_others_bytes)
    lines, conclusion = reconcile(shown, observed_bytes, process_bytes)
    estimate = estimated(plan.facts, plan.tune, plan.gpu) if trace is None and plan.facts else None
    phases = []
    for phase in memory.phases:
        symbols = _symbols(plan, phase)
        found = _estimated(estimate, phase.phase, symbols) if estimate else []
        found = found if trace is None else _traced(trace, phase, plan, settings)
        phases.append(_phase(phase, sums(phase, symbols), found))
    return FineTuneExplanation(
        source="estimated" if trace is None else "traced", phase=neediest.phase, phases=tuple(phases), lines=lines,
        conclusion=conclusion,
    )  # fmt: skip


def explain_generation(
    plan: InferencePlan, observed_bytes: int | None = None, process_bytes: int | None = None
) -> FineTuneExplanation:
    phase = plan.memory.neediest
    shown = Shown(phase, plan.memory.context, "estimated", plan.used_by_others_bytes)
    lines, conclusion = reconcile(shown, observed_bytes, process_bytes) if plan.gpu.kind == "cuda" else ((), "none")
    peak = _phase(phase, tuple(Sum(**row.model_dump(), numbers="") for row in phase.components), ())
    return FineTuneExplanation(
        source="estimated", phase=phase.phase, phases=(peak,), lines=lines, conclusion=conclusion
    )


def _symbols(plan: FineTunePlan, phase: PhaseMemory) -> dict[str, int]:
    if plan.facts is None:
        return {}
    batch = plan.tune.eval_batch_size if phase.phase == "evaluate" else plan.tune.batch_size
    return symbols_of(plan.facts, plan.tune, plan.gpu, batch)


def _phase(phase: PhaseMemory, rows: tuple[Sum, ...], found: Sequence[LargeTensor]) -> ExplainedPhase:
    return ExplainedPhase(
        phase=phase.phase, moment=phase.moment, allocated_bytes=phase.allocated_bytes,
        reserved_bytes=phase.reserved_bytes, sums=rows, tensors=tuple(found[:MOST_TENSORS]),
    )  # fmt: skip


def _estimated(estimate: FineTuneEstimate, phase: str, symbols: dict[str, int]) -> list[LargeTensor]:
    found = [
        LargeTensor(
            component=kind.component,
            where=_where(estimate, kind.component, kind.size.formula),
            what=_shown(kind.size.formula),
            numbers=with_numbers(_shown(kind.size.formula), symbols),
            count=count,
            size_bytes=count * kind.size.nbytes,
        )
        for kind, count in estimate.peaks[phase].alive.items()
        if count
    ]
    return sorted(found, key=lambda tensor: -tensor.size_bytes)


def _shown(formula: str) -> str:
    return formula.removeprefix("1·")


def _letters(formula: str) -> str:
    """Return the formula without its bytes per element: 'F·C' of '2·F·C', and of 'F·C/2', in 4 bits."""
    return re.sub(r"^[\d.]+·|/2$", "", formula)


def _where(estimate: FineTuneEstimate, component: str, formula: str) -> str:
    if component not in ("weights", "adapters", *TRAINED):
        return ""
    sizes = {name: weight.shape for name, weight in estimate.weights.items() if _has(component, name, weight)}
    if component == "weights":
        sizes |= estimate.packed
    wanted = _letters(formula)
    found = (_module(name) for name, shape in sizes.items() if _letters(formula_of(1, shape)) == wanted)
    return ", ".join(dict.fromkeys(found))


def _has(component: str, name: str, weight: Parameter) -> bool:
    return weight.requires_grad if component in TRAINED else (component == "adapters") == (".lora_" in name)


def _module(name: str) -> str:
    return re.sub(r"^layers\.\d+\.|(\.base_layer)?(\.weight)?$", "", name)


def _traced(trace: Trace, phase: PhaseMemory, plan: FineTunePlan, settings: Settings | None) -> list[LargeTensor]:
    return [
        LargeTensor(
            component=group.component,
            where=_module(group.where.removeprefix("base_model.model.")),
            what=f"{group.shape} {group.dtype}",
            numbers="",
            count=group.count,
            size_bytes=group.size_bytes,
        )
        for group in tensors(trace, phase.phase, plan.facts.n_embd if plan.facts else 0, settings)
    ]
