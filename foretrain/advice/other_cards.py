"""The rule another_card: of the catalogue, the smallest card that fits; where rents are given, the cheapest run.

What a card costs to buy is not in the catalogue, so without rents memory is what is compared. What others hold is
taken to be the same there.
"""

from dataclasses import replace

from foretrain.advice.candidates import Candidate, Search
from foretrain.advice.rules.base import State
from foretrain.advice.rules.memory import LEAST_FOR_TRITON
from foretrain.hardware.catalogue import Gpu, catalogue


def usable(gpu: Gpu, state: State) -> bool:
    """Whether the card can run the config as it stands, memory aside."""
    if gpu.kind != "cuda" or gpu.memory_bytes is None or gpu.name == state.gpu.name or gpu.is_laptop:
        return False
    if state.config.dtype == "bfloat16" and not gpu.supports_bf16:
        return False
    return gpu.capability >= LEAST_FOR_TRITON or not state.config.compile


def other_cards(search: Search, state: State | None = None, rules: tuple[str, ...] = ()) -> list[Candidate]:
    """One candidate, or two where rents are given; `state` and `rules`: with other changes before it."""
    start = state or search.state
    if start.gpu.kind != "cuda":
        return []
    found: list[Candidate] = []
    for gpu in catalogue().values():
        if not usable(gpu, start) or start.used_by_others_bytes > (gpu.memory_bytes or 0):
            continue
        config = start.config
        if search.rents:
            config = config.model_copy(update={"price_per_hour": search.rents.get(gpu.name, 0.0)})
        outcome = search.planner.outcome(replace(start, gpu=gpu, config=config))
        if outcome is not None and outcome.fits:
            found.append(search.of((*rules, "another_card"), outcome))
    if not found:
        return []
    rented = [c for c in found if c.state.gpu.name in search.rents and c.outcome.money is not None]
    chosen = [min(rented, key=lambda c: c.outcome.money or 0.0)] if rented else []
    if search.goal == "fit":
        least = min(c.state.gpu.memory_bytes or 0 for c in found)
        small = [c for c in found if c.state.gpu.memory_bytes == least]
        chosen.append(min(small, key=lambda c: c.outcome.total_s or float("inf")))
    return list({c.state.gpu.name: c for c in chosen}.values())
