"""What leads an answer about a plan of any kind of run: what is planned, whether it fits, what was assumed; and the
answer in one line, to be pasted into a forum or a chat."""

from typing import TYPE_CHECKING, Any

from foretrain.advice.asked import Asked
from foretrain.base.installation import installed
from foretrain.base.messages import has, listed
from foretrain.config.sharing import StrategyName, of_one_strategy
from foretrain.hardware.links import Link
from foretrain.predict.finetune.plan import FineTunePlan
from foretrain.predict.forecast import AnyPlan
from foretrain.predict.inference.plan import InferencePlan
from foretrain.predict.memory import REFUSED, PhaseMemory
from foretrain.predict.plan import Plan
from foretrain.predict.ranks import ClusterPlan, RankPlan
from foretrain.predict.spec import StepName
from foretrain.predict.timing import Timing
from foretrain.reports.document import Cell, Message, Paragraph, Quantity, Row
from foretrain.reports.views.shared import TONES, room, verdict_id, why_not

if TYPE_CHECKING:
    from foretrain.advice.best import Best
    from foretrain.predict.largest import SmallestCard

RUNS_OUT = {"may_not_fit": "may_not_fit_exact", "does_not_fit": "does_not_fit_exact"}


def title(plan: AnyPlan, asked: Asked, timing: Timing | None = None, where: Cell = "") -> Message:
    """`timing`: of the figures, where they are not the plan's own; `where`: in the place of the plan's."""
    sources = sources_of(plan, timing)
    if asked.speed and timing is None:
        sources = Message("first.sources_typed", {"memory": plan.needs.source, "option": asked.speed})
    return Message(
        "first.title", {"name": plan.name, "gpu": where or plan.place, "what": what(plan), "sources": sources}
    )


def name_of(plan: AnyPlan) -> str:
    if isinstance(plan, InferencePlan):
        return f"{plan.name} {plan.asked.weights}"
    if isinstance(plan, FineTunePlan):
        return f"{plan.name} {plan.tune.method if plan.tune.training == 'sft' else method_of(plan).text()}"
    return plan.name


def what(plan: AnyPlan) -> Message:
    if isinstance(plan, FineTunePlan):
        return method_of(plan)
    if isinstance(plan, InferencePlan):
        return Message("inference.what", {"weights": plan.asked.weights, "engine": plan.engine})
    one = plan.one_card if isinstance(plan, ClusterPlan) else plan
    return Message("first.params", {"params": one.counts.n_params})


def method_of(plan: FineTunePlan) -> Message:
    method = Message(f"finetune.method.{plan.tune.method}", {"rank": plan.tune.lora_r})
    if plan.tune.training == "sft":
        return method
    return Message(
        "finetune.trained_for", {"training": Message(f"finetune.training.{plan.tune.training}"), "method": method}
    )


def sources_of(plan: AnyPlan, timing: Timing | None = None) -> Message:
    memory, timing = plan.needs.source, timing or plan.timing
    if timing is None or timing.source == memory:
        return Message("first.source", {"source": memory})
    return Message("first.sources", {"memory": memory, "time": timing.source})


# -- whether it fits -----------------------------------------------------------------------------------------------


def lead_of(plan: AnyPlan, asked: Asked | None = None, *, others: bool = True) -> list[Paragraph]:
    """Return the verdict first, with a nanoGPT file's other step (`asked`) and other programs' use (`others`)."""
    if isinstance(plan, ClusterPlan):
        return [Paragraph(Message("first.said", {"text": verdict_of_cards(plan)}), TONES[plan.verdict])]
    sentences = [_verdict(plan).text()]
    if others and plan.used_by_others_bytes:
        sentences.append(Message("first.others", {"others": plan.used_by_others_bytes}).text())
    lead = [Paragraph(Message("first.said", {"text": " ".join(sentences)}), TONES[plan.verdict])]
    return [*lead, *_untraced(plan), *_other_step(plan, asked)] if isinstance(plan, Plan) and asked else lead


def _verdict(plan: Plan | FineTunePlan | InferencePlan) -> Message:
    memory, verdict = plan.needs, plan.verdict
    phase, id = memory.neediest, verdict_id(verdict, plan.needed_bytes, plan.available_bytes)
    values: dict[str, Any] = {
        "peak": phase.needed_span, "room": room(plan), "short": room(plan, "short"), "where": where(phase),
        "gpu": plan.gpu.name, "why": why_not(memory, plan.gpu),
    }  # fmt: skip
    if isinstance(plan, FineTunePlan) and plan.bound != "exact":
        values |= {"sure": sure_bytes(plan), "keys": plan.bounded_by}
        return Message(f"first.bound.{plan.bound}.{verdict or 'unknown'}", values)
    exact = plan.exact_of(plan.step) if isinstance(plan, Plan) else None
    if exact is not None and verdict == "fits":
        id, values["least"] = "fits_exact", exact.smallest_limit_bytes + exact.memory.context.expected_bytes
    elif exact is not None and exact.failure is not None:
        id = RUNS_OUT.get(verdict or "", id)
        end = exact.failure
        values |= {"phase": Message(f"phase.{end.phase}"), "requested": end.requested_bytes}
        values |= {"reserved": end.reserved_bytes, "allowed": end.limit_bytes}
    if id == "does_not_fit" and isinstance(plan, InferencePlan):  # which has one phase
        id = "does_not_fit_generating"
    verdict_text = Message(f"first.verdict.{id}", values)
    first = next((where(p) for p in memory.phases if p.verdict == "does_not_fit"), None)
    if id == "does_not_fit" and first is not None and first != values["where"]:
        return Message("first.two", {"one": verdict_text, "other": Message("first.fails_first", {"where": first})})
    if id == "unknown" and isinstance(plan, Plan):
        return Message("first.two", {"one": verdict_text, "other": Message("first.memory_limit")})
    return verdict_text


def sure_bytes(plan: FineTunePlan) -> int:
    low, expected, high = plan.memory.neediest.needed_span
    return {"at_least": low, "at_most": high}.get(plan.bound, expected)


def where(phase: PhaseMemory) -> Message:
    part = {"load": "build", "prepare": "prepare", "merge": "merge", "generate": "generate"}.get(phase.phase)
    part = part or ("evaluation" if phase.phase.startswith("evaluate") else phase.moment.partition(".")[0])
    return Message(f"first.where.{part}" if has(f"first.where.{part}") else "first.where.backward")


def _untraced(plan: Plan) -> list[Paragraph]:
    why = next((note for note in plan.notes if note.id == "trace_unavailable"), None)
    return [] if why is None else [Paragraph(Message("note.trace_unavailable", why.values), "warn")]


def _other_step(plan: Plan, asked: Asked) -> list[Paragraph]:
    """Return the other step's verdict where it differs, or where a nanoGPT file can run either way."""
    step: StepName = "nanogpt" if plan.step == "foretrain" else "foretrain"
    verdict = plan.verdict_of(step)
    alike = verdict == plan.verdict
    if verdict is None or len(plan.memories) == 1 or (alike and (not asked.nanogpt_file or verdict in REFUSED)):
        return []
    id_end = "needs" if alike and verdict == "fits" else verdict
    memory = plan.memory_of(step)
    values = {"needed": memory.needed_bytes, "why": why_not(memory, plan.gpu)}
    return [Paragraph(Message(f"first.other_{step}.{id_end}", values), "plain" if verdict == "fits" else "warn")]


# -- several cards -------------------------------------------------------------------------------------------------


def strategy(rank: RankPlan) -> Message:
    return way(rank.strategy, held=not rank.syncs_each)


def way(strategy: StrategyName, *, held: bool) -> Message:
    name = Message(f"cluster.strategy.{strategy}")
    return Message("cluster.held", {"strategy": name}) if held else name


def link(found: Link) -> str:
    return found.aliases[0] if found.aliases else found.name


def verdict_of_cards(plan: ClusterPlan) -> Message:
    best = plan.best
    rank = best or plan.least
    phase, available = rank.memory.neediest, plan.available_bytes
    values = {
        "strategy": strategy(rank), "peak": phase.needed_span, "where": where(phase),
        "available": available or 0, "count": len(plan.ranks), "others": "",
    }  # fmt: skip
    if best is None:
        return Message("cluster.verdict.none", values)
    verdict_text = Message(f"cluster.verdict.{verdict_id(best.verdict, rank.memory.needed_bytes, available)}", values)
    return Message("first.two", {"one": verdict_text, "other": _why(plan, best)})


def _why(plan: ClusterPlan, best: RankPlan) -> Message:
    if of_one_strategy(plan.ways):
        return Message("cluster.why.asked")
    fitting = [rank for rank in plan.ranks if rank.verdict == best.verdict and rank.time]
    if len({rank.strategy for rank in fitting}) < 2:
        others = any(rank.verdict != best.verdict for rank in plan.ranks)
        return Message("cluster.why.only" if others else "cluster.why.one")
    fastest = min(fitting, key=lambda rank: rank.time.step_s.expected_s if rank.time else 0.0)
    if fastest.id == best.id:
        return Message("cluster.why.fastest")
    return Message("cluster.why.plainest", {"other": strategy(fastest)})


def assumptions(plan: ClusterPlan) -> list[Message]:
    """What was taken of the cards and of what joins them."""
    cluster = plan.cluster
    others = [name for name in cluster.choices if name != cluster.gpu.name]
    values = {
        "link": link(cluster.link), "network": link(cluster.network) if cluster.network else "",
        "meant": cluster.meant, "gpu": cluster.gpu.name, "choices": others, "nodes": cluster.nodes,
        "per_node": cluster.per_node,
    }  # fmt: skip
    found = [Message(f"cluster.assumed.{id}", values) for id in cluster.assumed]
    nccl = (plan.best or plan.least).nccl
    found.append(Message("cluster.assumed.nccl", {"sizes": (nccl.low_bytes, nccl.high_bytes)}))
    return found


# -- what was assumed ----------------------------------------------------------------------------------------------


def assumed_rows(plan: AnyPlan, *more: str) -> list[Row]:
    """List what was taken without knowing it; what can change the verdict always stands there. `more`: further ids."""
    one = plan.one_card if isinstance(plan, ClusterPlan) else plan
    notes = [*(one.assumptions if isinstance(one, Plan) else ()), *one.notes]
    assumed_notes = [(note.id, note.values) for note in notes if is_assumed(note.id)]
    cards = [each.text() for each in assumptions(plan)] if isinstance(plan, ClusterPlan) else []
    optional = 0 if assumed_notes or cards else 1
    if not isinstance(plan, InferencePlan) and plan.timing is not None and plan.timing.source == "estimated":
        known = isinstance(one, Plan) and one.gpu.sustained_share(one.dtype)
        card = "speed_measured" if known else "speed"
        assumed_notes.append(({"cpu": "speed_cpu", "mps": "speed_apple"}.get(plan.gpu.kind, card), {}))
    assumed_notes += [(id, {}) for id in more]
    if not assumed_notes and not cards:
        return []
    full, brief = ([*cards, *(_assumed(*each, kinds) for each in assumed_notes)] for kinds in (KINDS, KINDS[::-1]))
    return [Row(Message("first.label.assumed"), listed(full), optional=optional, short=listed(brief))]


KINDS = ("assumed", "assumed_short")


def is_assumed(id: str) -> bool:
    return any(has(f"first.{kind}.{id}") for kind in KINDS)


def _assumed(id: str, values: dict[str, Any], kinds: tuple[str, ...]) -> str:
    return next(Message(f"first.{kind}.{id}", values).text() for kind in kinds if has(f"first.{kind}.{id}"))


def more_rows(plan: AnyPlan, asked: Asked) -> list[Row]:
    """What else can be seen, and how many notes are not on the screen."""
    if asked.quiet:
        return []
    notes = (plan.one_card if isinstance(plan, ClusterPlan) else plan).notes
    hidden = [n for n in notes if not n.id.startswith("auto_") and has(f"note.{n.id}") and not is_assumed(n.id)]
    more = Message("first.more_notes" if hidden else "first.more", {"count": len(hidden)})
    return [Row(Message("first.label.more"), more, optional=3)]


def written(asked: Asked, world: int = 1) -> Row:
    """Return the next step after a config was found: train it, or write it first."""
    if asked.wrote:
        cards = ("--gpus", str(world)) if world > 1 else ()
        return Row(Message("first.label.next"), command=("foretrain", "train", asked.wrote, *cards))
    return Row(Message("first.label.next"), Message("first.write"))


# -- in one line ---------------------------------------------------------------------------------------------------


def smallest(plan: AnyPlan, found: "SmallestCard") -> Message:
    small = {f"small_{name}": value for name, value in found.too_small.model_dump().items()} if found.too_small else {}
    if not found.fitting:
        return Message("smallest.none", {"name": plan.name, **small})
    cards = listed([each.place for each in found.fitting])
    values = {"name": plan.name, **found.fitting[0].model_dump(), "cards": cards, **small}
    return Message("smallest.fits" if small else "smallest.any", values)


def line(plan: AnyPlan, steps: int | None = None) -> Message:
    """Return the whole answer. `steps`: as many as fit in a limit."""
    timing, parts = plan.timing, [_memory(plan).text()]
    if isinstance(plan, ClusterPlan):
        parts.insert(0, strategy(plan.best or plan.least).text())
    if isinstance(plan, InferencePlan):
        size = {"batch": plan.asked.batch, "context": plan.asked.context}
        parts.insert(0, Message("inference.line_size", size).text())
    if steps is not None:
        parts.append(Message("first.line_steps", {"steps": steps}).text())
    if timing is not None and isinstance(plan, FineTunePlan | InferencePlan):
        parts.append(Message("finetune.line_speed", {"tokens": timing.tokens_per_s}).text())
    if timing is not None and timing.total_s is not None and plan.verdict not in REFUSED:
        total, money = timing.total_s, timing.money()
        parts.append(Quantity((total.low_s, total.expected_s, total.high_s), "rough_duration_span").text())
        if money is not None and money[1]:
            paid = {"amount": money[1], "currency": timing.prices.currency}
            parts.append(Message("value.amount_rough", paid).text())
    if isinstance(plan, ClusterPlan) and plan.best is not None and plan.best.speed_up is not None:
        parts.append(Message("cluster.line_times", {"expected": plan.best.speed_up.expected}).text())
    values = {"name": name_of(plan), "gpu": plan.place, "parts": listed(parts), "version": installed("foretrain")}
    return Message("first.line", {**values, "source": plan.needs.source})


def _memory(plan: AnyPlan) -> Message:
    if isinstance(plan, FineTunePlan) and plan.bound != "exact":
        room = {"needed": sure_bytes(plan), "available": plan.available_bytes or 0}
        return Message(f"first.line_bound.{plan.bound}.{plan.verdict or 'unknown'}", room)
    id = verdict_id(plan.verdict, plan.needed_bytes, plan.available_bytes)
    room = {"needed": plan.needed_bytes, "available": plan.available_bytes or 0}
    return Message(f"first.line_memory.{id}", room)


def best_line(plan: Plan, found: "Best") -> Message:
    """Return the shape of lowest estimated loss."""
    winner = found.candidates[0]
    c = winner.config
    values = {
        "n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "params": winner.n_params,
        "tokens": winner.tokens, "loss": winner.loss, "gpu": plan.place, "text": found.limit.text,
        "needed": winner.needed_bytes, "available": plan.available_bytes or 0, "version": installed("foretrain"),
    }  # fmt: skip
    return Message("first.best_line", values)
