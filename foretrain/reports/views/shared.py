"""What several views say alike: what a plan assumed, where its times come from, why a larger micro-batch needs less."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from foretrain.base.errors import UserError
from foretrain.hardware.catalogue import Gpu
from foretrain.predict import software
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.forecast import AnyPlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.memory import FAILING, Component, RunMemory, Verdict
from foretrain.predict.plan import Plan
from foretrain.predict.ranks import ClusterPlan
from foretrain.predict.within import Within
from foretrain.reports.document import Block, Cell, Document, Figures, Message, Paragraph, Picture, Screen

# Components are shown in these groups, so that a bar has a handful of colours; order is from the bottom of a bar.
GROUPS = {
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "checkpoint": "weights",
    "weight_copies": "weight_copies", "activations.residual": "activations", "activations.norm": "activations",
    "activations.attention": "activations", "activations.mlp": "activations", "activations.dropout": "activations",
    "activations.head": "activations",
    "logits": "logits", "temporaries": "temporaries", "workspace": "temporaries",
    "measuring": "temporaries", "batch": "temporaries",
    "overhead": "overhead", "activations": "activations", "buffers": "weights", "rounding": "temporaries",
    "adapters": "weights", "reference": "weights", "buckets": "gradients",
    "gathered": "weight_copies", "exchanged": "temporaries", "kv_cache": "activations", "vllm": "vllm",
}  # fmt: skip
GROUP_ORDER = (
    "weights", "gradients", "optimizer", "weight_copies", "activations", "logits", "temporaries", "vllm", "overhead"
)  # fmt: skip

TONES = {
    "fits": "good", "tight": "warn", "may_not_fit": "warn", "does_not_fit": "bad", "does_not_run": "bad", None: "plain",
}  # fmt: skip


class Page(NamedTuple):
    """What the page draws of a plan. `needs`: name, memory and verdict of each step or strategy; `said`: beside the
    title; `screen`: the first one of the terminal, where its table and lines stand on the page."""

    document: Document
    needs: Sequence[tuple[Message, RunMemory, str | None]]
    sentences: tuple[Message, ...]
    figures: Figures = Figures(())
    pictures: Sequence[Picture] = ()
    screen: Screen | None = None


def verdict_word(verdict: str | None) -> Cell:
    """'fits'; a dash where nobody knows."""
    return Message(f"word.{verdict}") if verdict else "–"


def card_memory(gpu: Gpu) -> tuple[Block, ...]:
    if gpu.memory_bytes == gpu.label_bytes or gpu.memory_bytes is None:
        return ()
    values = {"gpu": gpu.name, "given": gpu.memory_bytes, "label": gpu.label_bytes or 0}
    return (Paragraph(Message("plan.card_memory", values)),)


def why_not(memory: RunMemory, gpu: Gpu) -> Message | str:
    """What the card cannot do of a run; "" where it can."""
    values = {"gpu": gpu.name, "capability": gpu.compute_capability}
    return Message(f"does_not_run.{memory.obstacle}", values) if memory.obstacle else ""


def room(plan: Plan | FineTunePlan | InferencePlan, how: str = "room") -> Message:
    """What there is. It is free only where it is known what other programs use."""
    id = "free" if plan.used_by_others_bytes else "card"
    if isinstance(plan, Plan) and plan.available_reason == "memory_limit":
        id = "memory_limit"
    return Message(f"first.{how}.{id}", {"available": plan.available_bytes or 0})


def check_error(plan: AnyPlan) -> UserError | None:
    """Return why --check fails: it does not fit, the card cannot do it, or nobody can say; None where it fits."""
    known: dict[str, Any] = {"name": plan.name, "gpu": plan.place, "room": plan.available_bytes or 0}
    if plan.verdict is None:
        bound = plan.bound if isinstance(plan, FineTunePlan) else "exact"
        phase, keys = plan.needs.neediest, plan.bounded_by if isinstance(plan, FineTunePlan) else ()
        needed = phase.needed_low_bytes if bound == "at_least" else phase.needed_high_bytes
        return UserError(f"usage.no_verdict.{bound}", **known, needed=needed, keys=keys)
    if plan.verdict not in FAILING:
        return None
    known["needed"] = plan.needed_bytes
    if isinstance(why := why_not(plan.needs, plan.gpu), Message):
        return UserError("check.does_not_run", **known, why=why.text())
    known["verdict"] = Message(f"word.{plan.verdict}").text()
    if isinstance(plan, ClusterPlan):
        strategy = (plan.best or plan.least).strategy
        return UserError("check.failed_cluster", **known, cluster=plan.place, strategy=strategy)
    known["room"] = room(plan, "short").text()
    nanogpt = isinstance(plan, Plan) and plan.step == "nanogpt"
    return UserError("check.failed_nanogpt" if nanogpt else "check.failed", **known)


def assumed(plan: Plan) -> tuple[Block, ...]:
    return tuple(Paragraph(Message(f"assumed.{note.id}", note.values), "warn") for note in plan.assumptions)


def uncalibrated(plan: Plan) -> Message:
    if plan.gpu.kind == "cpu":
        return Message("source.cpu")
    return Message("source.catalogue", {"torch": str(software.of(plan.config.torch_version))})


def uneven(points: Iterable[tuple[int, int | None]]) -> tuple[Paragraph, ...]:
    """Return one sentence where a larger micro-batch needs less than a smaller one, of (batch_size, bytes)."""
    known = sorted({(size, needed) for size, needed in points if needed is not None})
    falls = any(small < large and after < before for (small, before), (large, after) in pairwise(known))
    return (Paragraph(Message("largest.uneven")),) if falls else ()


def taken_bytes(needed_bytes: int, verdict: Verdict | None, available_bytes: int | None) -> int:
    """Return what a run takes: a tight one what is free, as the allocator frees its cache before it fails."""
    if verdict != "tight" or available_bytes is None:
        return needed_bytes
    return min(needed_bytes, available_bytes)


def needs_of_free(needed_bytes: int, verdict: Verdict | None, available_bytes: int | None) -> Message:
    taken = taken_bytes(needed_bytes, verdict, available_bytes)
    return Message("value.of_free", {"needed": taken, "available": available_bytes or 0})


def verdict_id(verdict: Verdict | None, needed_bytes: int, available_bytes: int | None) -> str:
    """Return the verdict, or that a run may live that would use more, as the allocator frees what it only keeps."""
    beyond = available_bytes is not None and needed_bytes > available_bytes
    return "tight_at_limit" if beyond and verdict == "tight" else verdict or "unknown"


def grouped(components: tuple[Component, ...]) -> tuple[tuple[str, int], ...]:
    sums: dict[str, int] = dict.fromkeys(GROUP_ORDER, 0)
    for component in components:
        sums[GROUPS[component.id]] += component.size_bytes
    return tuple((group, size) for group, size in sums.items() if size)


def within_answer(found: Within) -> Message:
    values = {
        "text": found.limit.text,
        "steps": found.steps,
        "tokens": found.tokens,
        "cautious": found.steps_cautious,
        "optimistic": found.steps_optimistic,
    }
    exact = found.steps_cautious == found.steps == found.steps_optimistic
    of_tokens = "within_tokens" if found.limit.kind == "tokens" else "within_exact"
    return Message(f"first.{of_tokens if exact else 'within' if found.steps_cautious else 'within_not_sure'}", values)
