"""Rules of generating text. With fewer bits or shorter texts the answers are others."""

from foretrain.advice.rules.base import rule_of_options as rule
from foretrain.config.inference import CACHES, FORMATS
from foretrain.predict.inference.plan import InferencePlan, Search

MOST_CARDS = 8  # of one machine: advice goes no further
Values = dict[str, int | str]


def _fewer_bits(plan: InferencePlan) -> Values:
    """Return the format with the most bits that fits, else that with the fewest."""
    search = Search.of(plan)
    fitting = [name for name in search.fewer if search.fits(weights=name)]
    return {"weights": name} if (name := (*fitting[:1], *search.fewer[-1:], "")[0]) else {}


def _eight_bits(plan: InferencePlan, most: float = 8.5) -> Values:
    usual = [name for name in ("q8_0", "q4_k_m", "int8", "int4") if FORMATS[name].block <= most]
    found = [name for name in Search.of(plan).fewer if name in usual]
    return {"weights": found[0]} if found else {}


def _four_bits(plan: InferencePlan) -> Values:
    return _eight_bits(plan, 5.0)


def _cache(plan: InferencePlan) -> Values:
    """llama.cpp's eight bits where they fit, else its four; PyTorch has fp8."""
    now, search = CACHES[plan.asked.kv], Search.of(plan)
    names = [name for name in (("q8_0", "q4_0") if plan.engine == "llama.cpp" else ("fp8",)) if CACHES[name] < now]
    fitting = [name for name in names if search.fits(kv=name)]
    return {"kv": (*fitting, *names[::-1])[0]} if names else {}


def _fewer_texts(plan: InferencePlan) -> Values:
    return {"batch": plan.largest_batch or 1} if plan.asked.batch > (plan.largest_batch or 1) else {}


def _shorter_texts(plan: InferencePlan) -> Values:
    return Search.of(plan).shorter() or {}


def _texts_together(plan: InferencePlan) -> Values:
    """Several of these where none is enough."""
    found = Search.of(plan).fitting() or {}
    return found if len(found) > 1 else {}


def _more_texts(plan: InferencePlan) -> Values:
    """As many as fit, as a power of two: each reads the same weights."""
    most = 2 ** ((plan.largest_batch or 1).bit_length() - 1)
    return {"batch": most} if most > plan.asked.batch else {}


def _more_cards(plan: InferencePlan) -> Values:
    """Return the fewest cards that fit, else the most that are looked at."""
    search, counts = Search.of(plan), [world for world in (2, 4, MOST_CARDS) if world > plan.asked.world]
    counts = counts if plan.gpu.kind == "cuda" else []
    fitting = [world for world in counts if search.fits(world=world, split=plan.asked.split or "layer")]
    return {"world": (*fitting, *counts[::-1])[0]} if counts else {}


def _on_host(plan: InferencePlan) -> Values:
    """The fewest experts, else layers, in the computer's memory with which it fits."""
    search, layers = Search.of(plan), plan.facts.n_layer
    if plan.engine != "llama.cpp" or plan.asked.world > 1 or plan.asked.on_host or plan.gpu.kind != "cuda":
        return {}
    if plan.facts.n_expert and search.fits(n_cpu_moe=layers):
        return {"n_cpu_moe": next(count for count in range(1, layers + 1) if search.fits(n_cpu_moe=count))}
    count = next((count for count in range(layers, 0, -1) if search.fits(n_gpu_layers=count)), 0)
    return {"n_gpu_layers": count} if count else {}


def _divided(plan: InferencePlan) -> Values:
    """Every matrix among the cards, or among two, where the format allows it."""
    if plan.engine == "llama.cpp" or plan.asked.split == "tensor" or plan.gpu.kind != "cuda":
        return {}
    return {"world": max(2, plan.asked.world), "split": "tensor"}


# In the order in which they are looked at where a run does not fit.
GENERATING = {
    each.id: each
    for each in (
        rule("fewer_texts", "memory", "exact", _fewer_texts),
        rule("fewer_bits", "memory", "other model", _fewer_bits),
        rule("cache", "both", "other model", _cache),
        rule("shorter_texts", "memory", "other model", _shorter_texts),
        rule("texts_together", "memory", "other model", _texts_together),
        rule("more_cards", "memory", "exact", _more_cards),
        rule("on_host", "memory", "exact", _on_host),
        rule("divided", "both", "exact", _divided),
        rule("eight_bits", "speed", "other model", _eight_bits),
        rule("four_bits", "speed", "other model", _four_bits),
        rule("more_texts", "speed", "exact", _more_texts),
    )
}
