"""The memory of any run explained: sums and largest tensors of its phases, what nvidia-smi shows, and why so much."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from foretrain.analysis.components import (
    Line,
    Point,
    Shown,
    Sum,
    TensorGroup,
    reconcile,
    sums,
    tensors,
    timeline,
    with_numbers,
)
from foretrain.base.records import Note, Record
from foretrain.predict.abstract.autograd import Parameter
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.estimate.simulated_run import symbols_of
from foretrain.predict.finetune.memory import FineTuneEstimate, estimated, formula_of
from foretrain.predict.finetune.memory import symbols_of as finetune_symbols
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.forecast import AnyPlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.memory import PhaseMemory, RunMemory, predict
from foretrain.predict.plan import Plan
from foretrain.predict.ranks import ClusterPlan, rank_of
from foretrain.predict.spec import StepName
from foretrain.predict.trace.record import Trace

MOST_TENSORS = 24  # kinds of tensors of a phase of fine-tuning that are listed
TRAINED = ("gradients", "optimizer")  # what only trained weights have
BECAUSE = {"logits", "activations", "optimizer"}  # components with a sentence of explanation


class ExplainedPhase(Record):
    memory: PhaseMemory
    sums: tuple[Sum, ...]
    tensors: tuple[TensorGroup, ...] = ()  # the largest first


class Explanation(Record):
    """Phases: of pretraining and of generating text the worst alone. `step` and what follows it: of pretraining."""

    source: Literal["estimated", "traced"]
    phase: str  # the worst
    phases: tuple[ExplainedPhase, ...]
    lines: tuple[Line, ...]
    conclusion: str  # id of a text
    step: StepName | None = None
    compiled: bool | None = None
    other_mode_bytes: int | None = None  # what the other mode (eager or compiled) would allocate, by the estimate
    timeline: tuple[Point, ...] = ()
    because: Note | None = None  # why the largest component is so large; a text `explain.because.ID`

    @property
    def worst(self) -> ExplainedPhase:
        return next(each for each in self.phases if each.memory.phase == self.phase)


def explain(
    plan: AnyPlan,
    trace: Trace | None = None,
    *,
    step: StepName | None = None,
    settings: Settings | None = None,
    observed_bytes: int | None = None,
    process_bytes: int | None = None,
) -> Explanation:
    """Explain a plan's memory, of pretraining a step's, with its trace by tensors' names. Bytes are nvidia-smi's."""
    plan = rank_of(plan) if isinstance(plan, ClusterPlan) else plan
    known: dict[str, Any] = {}
    if isinstance(plan, Plan):
        memory, context = plan.memory_of(step or plan.step), plan.memory[0].context
        phases, known = _of_pretraining(plan, memory, trace, settings)
    else:
        memory, context = plan.memory, plan.memory.context
        phases = _of_generation(plan) if isinstance(plan, InferencePlan) else _of_fine_tuning(plan, trace, settings)
    source = "traced" if memory.source == "traced" else "estimated"
    shown = Shown(memory.neediest, context, source, plan.used_by_others_bytes)
    seen = plan.gpu.kind == "cuda" or (isinstance(plan, Plan) and plan.gpu.kind != "cpu")
    lines, conclusion = reconcile(shown, observed_bytes, process_bytes) if seen else ((), "none")
    phase = memory.neediest.phase
    return Explanation(source=source, phase=phase, phases=phases, lines=lines, conclusion=conclusion, **known)


Phases = tuple[ExplainedPhase, ...]


def _of_pretraining(
    plan: Plan, memory: RunMemory, trace: Trace | None, settings: Settings | None
) -> tuple[Phases, dict[str, Any]]:
    """Return the worst phase, and what is known of pretraining alone."""
    phase, c = memory.neediest, plan.config
    evaluation = phase.phase.startswith("evaluate")
    sizes = (c.eval_batch, c.eval_block) if evaluation else (c.batch_size, c.block_size)
    found = tensors(trace, phase.phase, c.n_embd, settings) if trace else ()
    other = predict(replace(plan.spec(memory.step), compiled=not plan.compiled))
    known = {
        "step": memory.step, "compiled": memory.compiled, "other_mode_bytes": other.worst.allocated_bytes,
        "timeline": timeline(trace, settings) if trace else (), "because": _because(plan, phase, math.prod(sizes)),
    }  # fmt: skip
    return (ExplainedPhase(memory=phase, sums=sums(phase, symbols_of(plan.spec(), *sizes)), tensors=found),), known


def _because(plan: Plan, phase: PhaseMemory, tokens: int) -> Note | None:
    sizes: Counter[str] = Counter()
    for component in phase.components:
        sizes[component.id.partition(".")[0]] += component.size_bytes
    if not sizes:
        return None
    (largest, size), c = sizes.most_common(1)[0], plan.config
    values = {
        "size": size, "tokens": tokens, "vocab_size": c.vocab_size, "n_layer": c.n_layer,
        "each": size / tokens, "params": plan.counts.n_params,
    }  # fmt: skip
    return Note(id=largest, values=values) if largest in BECAUSE else None


def _of_generation(plan: InferencePlan) -> Phases:
    phase = plan.memory.neediest
    return (ExplainedPhase(memory=phase, sums=tuple(Sum(**row.model_dump(), numbers="") for row in phase.components)),)


def _of_fine_tuning(plan: FineTunePlan, trace: Trace | None, settings: Settings | None) -> Phases:
    facts, tune = plan.facts, plan.tune
    estimate = estimated(facts, tune, plan.gpu) if trace is None and facts else None
    phases = []
    for phase in plan.memory.phases:
        batch = tune.eval_batch_size if phase.phase == "evaluate" else tune.batch_size
        symbols = finetune_symbols(facts, tune, plan.gpu, batch) if facts else {}
        found: Sequence[TensorGroup] = _largest(estimate, phase.phase, symbols) if estimate else ()
        if trace is not None:
            groups = tensors(trace, phase.phase, facts.n_embd if facts else 0, settings)
            names = (_module(each.where.removeprefix("base_model.model.")) for each in groups)
            found = [each.model_copy(update={"where": name}) for each, name in zip(groups, names, strict=True)]
        phases.append(ExplainedPhase(memory=phase, sums=sums(phase, symbols), tensors=tuple(found[:MOST_TENSORS])))
    return tuple(phases)


def _largest(estimate: FineTuneEstimate, phase: str, symbols: dict[str, int]) -> list[TensorGroup]:
    found = [
        TensorGroup(
            component=kind.component,
            where=_where(estimate, kind.component, kind.size.formula),
            what=_readable(kind.size.formula),
            numbers=with_numbers(_readable(kind.size.formula), symbols),
            count=count,
            size_bytes=count * kind.size.nbytes,
        )
        for kind, count in estimate.peaks[phase].alive.items()
        if count
    ]
    return sorted(found, key=lambda tensor: -tensor.size_bytes)


def _readable(formula: str) -> str:
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
