"""`InferencePlan`: what it takes to generate text on a card; `RunnableModels`: which models run there. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import NonNegativeInt

from foretrain.base.records import Note, Record
from foretrain.config.hub.facts import ModelFacts, ModelSource
from foretrain.config.hub.parameters import counts_of, parameter_count
from foretrain.config.inference import (
    FORMATS,
    MOST_BATCH,
    MOST_CONTEXT,
    PUBLISHED,
    TRAINED_SO,
    USUAL_CONTEXT,
    USUAL_PROMPT,
    Engine,
    Inference,
    resolved,
)
from foretrain.hardware.catalogue import Gpu, catalogue
from foretrain.hardware.devices import Context
from foretrain.predict.inference.counted import facts_to_generate, is_known
from foretrain.predict.inference.shares import card_and_host, cards_of, check_shares, context_of, waits_s
from foretrain.predict.inference.speed import (
    GenerationTiming,
    cache_bytes,
    host_bytes_per_s,
    memory_of,
    neediest_card,
    speed_of,
    weights_bytes,
)
from foretrain.predict.memory import FAILING, RunMemory
from foretrain.predict.plan import PlanRecord
from foretrain.predict.search import bisect
from foretrain.predict.timing import PRICES, Prices


class Smallest(Record):
    """Where no change fits: weights of fewest bits, their need, the smallest card with room (`card` "": none has)."""

    weights: str
    needed_bytes: int
    card: str = ""
    card_bytes: int = 0


class FormatFit(Record):
    """What a format of llama.cpp's comes to: bytes on the card, tokens of context that fit, 0 where it does not."""

    weights: str
    needed_bytes: int
    longest_context: int
    tokens_per_s: float | None


class InferencePlan(PlanRecord):
    """The forecast of one model, one way to run it, one card. `longest_context` and `largest_batch`: what fits, with
    room to spare; 0 where nothing does, None where the memory is not known. `formats`: of each way to store weights."""

    kind: Literal["generation"] = "generation"
    name: str
    where: str
    facts: ModelFacts
    asked: Inference
    engine: Engine
    gpu: Gpu
    available_bytes: NonNegativeInt | None
    used_by_others_bytes: int
    memory: RunMemory
    longest_context: int | None
    largest_batch: int | None
    timing: GenerationTiming | None
    smallest: Smallest | None = None
    formats: tuple[FormatFit, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def needs(self) -> RunMemory:
        return self.memory

    @property
    def place(self) -> str:
        cards = cards_of(self.asked, self.gpu)
        return cards.text if cards else self.gpu.name


def plan(
    source: ModelSource, asked: Inference, gpu: Gpu, *, used_by_others_bytes: int = 0, prices: Prices = PRICES
) -> InferencePlan:
    """Forecast; weights by default as published if that fits, else in the most bits that do. Raises UserError."""
    facts = facts_to_generate(source)
    found = _plan(source, facts, asked, gpu, used_by_others_bytes, prices)
    if asked.weights or facts.published or found.available_bytes is None:
        return found
    search = Search(facts, found.asked, asked.prompt, gpu, found.available_bytes)
    formats = search.formats()
    best = next((each.weights for each in formats if each.longest_context >= found.asked.context), "")
    if best and best != found.asked.weights:
        found = _plan(source, facts, asked.model_copy(update={"weights": best}), gpu, used_by_others_bytes, prices)
    return found.model_copy(update={"formats": formats})


def _plan(
    source: ModelSource, facts: ModelFacts, asked: Inference, gpu: Gpu, used_by_others_bytes: int, prices: Prices
) -> InferencePlan:
    prompt, as_published = asked.prompt, not asked.weights
    asked, engine = resolved(source.name, facts, asked, gpu)
    check_shares(facts, asked, engine)
    room = None if gpu.memory_bytes is None else max(0, gpu.memory_bytes - used_by_others_bytes)
    memory = memory_of(facts, asked, engine, gpu, room)
    search = Search(facts, asked, prompt, gpu, room)
    smallest = search.smallest() if memory.verdict in FAILING and search.fitting() is None else None
    return InferencePlan(
        name=source.name, where=source.where, facts=facts, asked=asked, engine=engine, gpu=gpu, available_bytes=room,
        used_by_others_bytes=used_by_others_bytes, memory=memory,
        longest_context=None if room is None else search.longest_context(),
        largest_batch=None if room is None else bisect(lambda size: search.fits(batch=size), 0, MOST_BATCH + 1),
        timing=speed_of(facts, asked, engine, gpu, prices),
        smallest=smallest,
        notes=_notes(facts, asked, engine, gpu, as_published=as_published),
    )  # fmt: skip


def replanned(plan: InferencePlan, **changes: Any) -> InferencePlan:
    """Return the memory and time of a plan with other values of options. Raises UserError for what cannot be."""
    facts, asked, engine = plan.facts, *_changed(plan.asked, plan.asked.prompt, changes)
    check_shares(facts, asked, engine)
    timing = speed_of(facts, asked, engine, plan.gpu, plan.timing.prices if plan.timing else PRICES)
    memory = memory_of(facts, asked, engine, plan.gpu, plan.available_bytes)
    return plan.model_copy(update={"asked": asked, "engine": engine, "memory": memory, "timing": timing})


def _changed(asked: Inference, prompt: int, changes: Mapping[str, Any]) -> tuple[Inference, Engine]:
    asked = asked.model_copy(update=changes)
    split = asked.split or ("layer" if asked.world > 1 else "")
    asked = asked.model_copy(update={"prompt": min(prompt, asked.context), "split": split})
    return asked, asked.engine or FORMATS[asked.weights].engine


def _notes(facts: ModelFacts, asked: Inference, engine: Engine, gpu: Gpu, *, as_published: bool) -> tuple[Note, ...]:
    found = [*_card_notes(facts, asked, engine, gpu), *gpu.notes]
    if gpu.kind not in ("cuda", "cpu"):
        found.append(Note(id="inference_unchecked", values={"gpu": gpu.name}))
    if gpu.memory_bytes is None:
        found.append(Note(id="inference_no_size", values={"gpu": gpu.name, "example": gpu.sized_name}))
    if as_published and facts.quantization:
        values = {"quantization": facts.quantization, "weights": asked.weights}
        found.append(Note(id="inference_quantized", values=values))
    if asked.context > facts.max_positions:
        found.append(Note(id="inference_beyond", values={"context": asked.context, "most": facts.max_positions}))
    if facts.latent:
        found.append(Note(id="inference_latent", values={"numbers": facts.kv_numbers}))
    if unseen := parameter_count(facts) - counts_of(facts).total:
        found.append(Note(id="inference_text_alone", values={"params": unseen}))
    if facts.sliding_layers:
        values = {"layers": len(facts.sliding_layers), "of": facts.n_layer, "window": facts.sliding_window}
        found.append(Note(id="inference_window", values=values))
    if shares := card_and_host(facts, asked):
        host = shares[1]
        low, _, high = (round(rate / 1e9) for rate in host_bytes_per_s(asked))
        values = {"layers": len(host.layers), "of": facts.n_layer, "experts": asked.n_cpu_moe, "low": low, "high": high}
        values |= {"bytes": weights_bytes(facts, host, asked.weights), "kv": cache_bytes(facts, asked, host)}
        found.append(Note(id="inference_host" if asked.n_cpu_moe else "inference_host_layers", values=values))
    if engine == "llama.cpp" and gpu.kind == "cuda" and not gpu.is_geforce:
        found.append(Note(id="inference_datacentre", values={"gpu": gpu.name}))
    return tuple(found)


def _card_notes(facts: ModelFacts, asked: Inference, engine: Engine, gpu: Gpu) -> list[Note]:
    """Return how several cards share the model, and what they wait for each other."""
    cards = cards_of(asked, gpu)
    if cards is None:
        return []
    card, share, _ = neediest_card(facts, asked, engine)
    low, wait, high = waits_s(facts, asked, gpu, asked.batch)
    link = f"{cards.link.name}, {cards.network.name}" if cards.network else cards.link.name
    values = {"world": cards.world, "link": link, "low": low, "wait": wait, "high": high}
    if asked.split == "layer":
        layers = {"card": card, "layers": len(share.layers), "of": facts.n_layer}
        return [Note(id="inference_layer", values={**values, **layers})]
    nccl = context_of(asked, gpu).expected_bytes - Context.of(gpu).expected_bytes
    return [Note(id="inference_tensor", values={**values, "sums": 2 * facts.n_layer + 1, "nccl": nccl})]


_STEP = 256  # tokens; a proposed context is a multiple of it where that leaves enough


class Search:
    """One model, a way to run it, a card: what fits. `prompt`: 0 for the usual one; `fewer`: formats of fewer bits."""

    def __init__(self, facts: ModelFacts, asked: Inference, prompt: int, gpu: Gpu, available_bytes: int | None) -> None:
        self._facts, self._asked, self._prompt, self._gpu = facts, asked, prompt, gpu
        self._available_bytes = available_bytes
        own = FORMATS[asked.weights]
        bits = [
            (each.block, name)
            for name, each in FORMATS.items()
            if each.block < own.block
            and name not in (*PUBLISHED, *TRAINED_SO)
            and (not asked.engine or not each.quantized or each.engine == asked.engine)
        ]
        self.fewer = [name for _, name in sorted(bits, reverse=True)]

    @classmethod
    def of(cls, plan: InferencePlan) -> "Search":
        return cls(plan.facts, plan.asked, plan.asked.prompt, plan.gpu, plan.available_bytes)

    def longest_context(self, **changes: int | str) -> int:
        """Tokens of a text that fit with these changes, at most what the model can have or was asked for."""
        most = min(max(self._facts.max_positions, self._asked.context), MOST_CONTEXT)
        return bisect(lambda size: self.fits(context=size, **changes), 0, most + 1)

    def formats(self) -> tuple[FormatFit, ...]:
        """The weights as they were asked for, and llama.cpp's formats of fewer bits, the most bits first."""
        found: list[FormatFit] = []
        for name in (self._asked.weights, *self.fewer):
            if name != self._asked.weights and FORMATS[name].engine != "llama.cpp":
                continue
            found.append(self.fit_of(name))
        return tuple(found)

    def fit_of(self, weights: str) -> FormatFit:
        asked = self._asked.model_copy(update={"weights": weights})
        speed = speed_of(self._facts, asked, asked.engine or FORMATS[weights].engine, self._gpu)
        needed, longest = self.memory({"weights": weights}).needed_bytes, self.longest_context(weights=weights)
        rate = speed.tokens_per_s if speed else None
        return FormatFit(weights=weights, needed_bytes=needed, longest_context=longest, tokens_per_s=rate)

    def fitting(self) -> dict[str, int | str] | None:
        """Weights in fewer bits, the most that fit; else fewer texts or a shorter context. None where nothing fits."""
        for name in self.fewer:
            if self.fits(weights=name):
                return {"weights": name}
        for least in (USUAL_CONTEXT, USUAL_PROMPT):
            for name in (self._asked.weights, *self.fewer):
                if found := self._smaller(name, least):
                    return found
        return None

    def smallest(self) -> Smallest:
        """What would be needed in any case, and the card that has it."""
        name = (self._asked.weights, *self.fewer)[-1]
        memory = self.memory({"weights": name})
        needed, others = memory.needed_bytes, (self._gpu.memory_bytes or 0) - (self._available_bytes or 0)
        if self._gpu.kind != "cuda":
            return Smallest(weights=name, needed_bytes=needed)
        cards = [card for card in catalogue().values() if card.kind == "cuda" and card.fp16_dense_tflops]
        for card in sorted(cards, key=lambda each: each.memory_bytes or 0):
            size = card.memory_bytes or 0
            if self.memory({"weights": name, "link": "", "network": ""}, card, size - others).verdict == "fits":
                return Smallest(weights=name, needed_bytes=needed, card=card.name, card_bytes=size)
        return Smallest(weights=name, needed_bytes=needed)

    def _smaller(self, weights: str, least_context: int) -> dict[str, int | str] | None:
        """Fewer texts of this context; else one text of a shorter one."""
        own: dict[str, int | str] = {} if weights == self._asked.weights else {"weights": weights}
        if batch := bisect(lambda size: self.fits(weights=weights, batch=size), 0, self._asked.batch):
            return {**own, "batch": batch}
        shorter = self.shorter(least_context, weights=weights, batch=1)
        return None if shorter is None else {**own, **({"batch": 1} if self._asked.batch > 1 else {}), **shorter}

    def shorter(self, least_context: int = USUAL_PROMPT, **changes: int | str) -> dict[str, int | str] | None:
        """Return the longest context that fits with these changes, below the one that was asked for."""
        least_context = max(self._prompt, min(self._asked.context, least_context))
        context = bisect(lambda size: self.fits(context=size, **changes), 0, self._asked.context)
        return None if context < least_context else {"context": max(least_context, context - context % _STEP)}

    def fits(self, **changes: int | str) -> bool:
        return self.memory(changes).verdict == "fits"

    def memory(
        self, changes: Mapping[str, int | str], gpu: Gpu | None = None, available_bytes: int | None = None
    ) -> RunMemory:
        room = available_bytes if gpu else self._available_bytes
        asked, engine = _changed(self._asked, self._prompt or USUAL_PROMPT, changes)
        return memory_of(self._facts, asked, engine, gpu or self._gpu, room)


USUAL = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")  # formats that most models are published in


class RunnableModel(FormatFit):
    model: str
    parameters: int


class RunnableModels(Record):
    """The largest model first. `left_out`: how many fit in no format, or have no such context; `uncounted`: those that
    only transformers' code can count, which takes seconds for each."""

    gpu: Gpu
    available_bytes: int | None
    asked: Inference
    models: tuple[RunnableModel, ...]
    left_out: int
    uncounted: tuple[str, ...] = ()


def runnable(sources: list[ModelSource], asked: Inference, gpu: Gpu, used_by_others_bytes: int) -> RunnableModels:
    """Return what runs there with a context and a batch. Raises UserError for what cannot be asked."""
    room = None if gpu.memory_bytes is None else max(0, gpu.memory_bytes - used_by_others_bytes)
    known = [source for source in sources if is_known(source)]
    found = [next(_fits(source, asked, gpu, room), None) for source in known]
    models = sorted(filter(None, found), key=lambda each: -each.parameters)
    left, others = len(known) - len(models), tuple(source.name for source in sources if source not in known)
    return RunnableModels(
        gpu=gpu, available_bytes=room, asked=asked, models=tuple(models), left_out=left, uncounted=others
    )


def _fits(source: ModelSource, asked: Inference, gpu: Gpu, room: int | None) -> Iterator[RunnableModel]:
    """Yield the formats that fit, the most bits first."""
    facts = facts_to_generate(source)
    for weights in (asked.weights,) if asked.weights else USUAL:
        own, _ = resolved(source.name, facts, asked.model_copy(update={"weights": weights}), gpu)
        search = Search(facts, own, asked.prompt, gpu, room)
        if room is not None and own.context <= facts.max_positions and search.fits():
            yield RunnableModel(
                model=source.name, parameters=counts_of(facts).total, **dict(search.fit_of(own.weights))
            )
