"""What several views say alike: what a plan assumed, where its times come from, why a larger micro-batch needs less."""

from collections.abc import Iterable
from itertools import pairwise

from foretrain.advice.cards import Choice
from foretrain.base.messages import listed
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Gpu
from foretrain.predict import software
from foretrain.predict.energy import Prices, Spending
from foretrain.predict.memory import Component, Verdict
from foretrain.predict.plan import Plan
from foretrain.reports.document import Block, Cell, Message, Paragraph

# Components are shown in these groups, so that a bar has a handful of colours; order is from the bottom of a bar.
GROUPS = {
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "checkpoint": "weights",
    "weight_copies": "weight_copies", "activations.residual": "activations", "activations.norm": "activations",
    "activations.attention": "activations", "activations.mlp": "activations", "activations.dropout": "activations",
    "activations.head": "activations",
    "logits": "logits", "temporaries": "temporaries", "workspace": "temporaries",
    "measuring": "temporaries", "batch": "temporaries",
    "overhead": "overhead", "activations": "activations", "buffers": "weights", "rounding": "temporaries",
    "adapters": "weights", "buckets": "gradients", "gathered": "weight_copies", "exchanged": "temporaries",
}  # fmt: skip
GROUP_ORDER = (
    "weights", "gradients", "optimizer", "weight_copies", "activations", "logits", "temporaries", "overhead"
)  # fmt: skip

TONES = {"fits": "good", "tight": "warn", "does_not_fit": "bad", None: "plain"}


def verdict_word(verdict: str | None) -> Cell:
    """'fits'; a dash where nobody knows."""
    return Message(f"word.{verdict}") if verdict else "–"


def assumed(plan: Plan) -> tuple[Block, ...]:
    """A sentence for each assumption."""
    return tuple(Paragraph(Message(f"assumed.{note.id}", note.values), "warn") for note in plan.assumptions)


def uncalibrated(plan: Plan) -> Message:
    """The sentence for a time that nobody measured on this device: of a CPU, or of the catalogue and a torch."""
    if plan.gpu.kind == "cpu":
        return Message("source.cpu")
    return Message("source.catalogue", {"torch": str(software.of(plan.config.torch_version))})


def uneven(points: Iterable[tuple[int, int | None]]) -> tuple[Paragraph, ...]:
    """One sentence where a larger micro-batch needs less than a smaller one, else nothing.

    `points`: (batch_size, bytes) of settings that differ in nothing else that takes memory.
    """
    known = sorted({(size, needed) for size, needed in points if needed is not None})
    falls = any(small < large and after < before for (small, before), (large, after) in pairwise(known))
    return (Paragraph(Message("largest.uneven")),) if falls else ()


def cost_of(prices: RunConfig | Prices, spent: Spending, gpu: Gpu) -> Message:
    """What a run costs, and where that is from: rent, electricity, or why nobody can say."""
    p, money = prices, spent.money()
    values = {
        "money": (*money, p.currency) if money else (0.0, 0.0, 0.0, p.currency), "price_hour": p.price_per_hour,
        "currency": p.currency, "price_kwh": p.price_per_kwh, "energy": spent.energy_expected_j or 0.0,
    }  # fmt: skip
    if spent.rent_expected is not None:
        return Message("first.rent_and_power" if spent.cost_expected else "first.rent", values)
    if spent.energy_expected_j is None:
        return Message("first.no_cost", {"gpu": gpu.name})
    return Message("first.power" if spent.cost_expected else "first.energy", values)


def taken_bytes(needed_bytes: int, verdict: Verdict | None, available_bytes: int | None) -> int:
    """What a run takes of the card. One that fits takes at most what is free: before the allocator fails, it frees what
    it only keeps."""
    if verdict not in ("fits", "tight") or available_bytes is None:
        return needed_bytes
    return min(needed_bytes, available_bytes)


def needs_of_free(needed_bytes: int, verdict: Verdict | None, available_bytes: int | None) -> Message:
    """'7.56 of 24.00 GiB'."""
    taken = taken_bytes(needed_bytes, verdict, available_bytes)
    return Message("value.of_free", {"needed": taken, "available": available_bytes or 0})


def verdict_id(verdict: Verdict | None, needed_bytes: int, available_bytes: int | None) -> str:
    """The verdict, or that a run fits which would use more: before the allocator fails, it frees what it only keeps."""
    beyond = available_bytes is not None and needed_bytes > available_bytes
    at_limit = {"fits": "fits_at_limit", "tight": "tight_at_limit"}
    return at_limit[verdict] if beyond and verdict in at_limit else verdict or "unknown"


def best_cards(choice: Choice) -> Cell:
    """The cards that are best at something, each with what at."""
    if choice.fastest is None:
        return Message("cards.none_fits")
    parts = []
    for name in dict.fromkeys(n for n in (choice.fastest, choice.cheapest, choice.least_energy) if n):
        marks = listed(Message(f"first.is.{mark}").text() for mark in choice.marks(name))
        parts.append(Message("first.card_is", {"name": name, "marks": marks}).text())
    return Message("first.said", {"text": " ".join(parts)})


def grouped(components: tuple[Component, ...]) -> tuple[tuple[str, int], ...]:
    """(group, bytes) in the order of GROUP_ORDER."""
    sums: dict[str, int] = dict.fromkeys(GROUP_ORDER, 0)
    for component in components:
        sums[GROUPS[component.id]] += component.size_bytes
    return tuple((group, size) for group, size in sums.items() if size)
