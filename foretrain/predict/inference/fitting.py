"""What makes generation fit that does not: fewer bits, fewer texts, a shorter context; else the card that would do."""

from collections.abc import Callable

from foretrain.base.records import Record
from foretrain.config.inference.formats import FORMATS, PUBLISHED, Engine
from foretrain.config.inference.options import MOST_CONTEXT, USUAL_CONTEXT, USUAL_PROMPT, Inference
from foretrain.hardware.catalogue import Gpu, catalogue
from foretrain.predict.inference.memory import InferenceMemory, memory_of, verdict_of
from foretrain.predict.inference.model import InferenceModel
from foretrain.predict.inference.speed import speed_of

_STEP = 256  # tokens; a proposed context is a multiple of it where that leaves enough


class Fitting(Record):
    """The smallest change with which it fits: words to add to the command, and what is needed then."""

    words: str
    needed_bytes: int


class Smallest(Record):
    """Where no change fits: the weights of fewest bits, what they need with this context and batch, and the smallest
    card of the catalogue that has room for them. `card` "": none has, or the device is not a card."""

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


class Search:
    """One model, one way to run it and a device: what fits there. `prompt`: as given, 0 for the usual one."""

    def __init__(
        self, model: InferenceModel, asked: Inference, prompt: int, gpu: Gpu, available_bytes: int | None
    ) -> None:
        self._model, self._asked, self._prompt, self._gpu = model, asked, prompt, gpu
        self._available_bytes = available_bytes
        own = FORMATS[asked.weights]
        bits = [
            (each.block, name)
            for name, each in FORMATS.items()
            if each.block < own.block
            and name not in PUBLISHED
            and (not asked.engine or not each.quantized or each.engine == asked.engine)
        ]
        self._fewer = [name for _, name in sorted(bits, reverse=True)]

    def longest_context(self, **changes: int | str) -> int:
        """Tokens of a text that fit with these changes, at most what the model can have or was asked for."""
        most = min(max(self._model.max_positions, self._asked.context), MOST_CONTEXT)
        return largest(lambda size: self.fits(context=size, **changes), most)

    def formats(self) -> tuple[FormatFit, ...]:
        """The weights as they were asked for, and llama.cpp's formats of fewer bits, the most bits first."""
        found: list[FormatFit] = []
        for name in (self._asked.weights, *self._fewer):
            if name != self._asked.weights and FORMATS[name].engine != "llama.cpp":
                continue
            longest = self.longest_context(weights=name)
            asked = self._asked.model_copy(update={"weights": name})
            speed = speed_of(self._model, asked, asked.engine or FORMATS[name].engine, self._gpu)
            needed = self._memory({"weights": name}, self._gpu).needed_expected_bytes
            rate = speed.tokens_per_s if speed else None
            found.append(FormatFit(weights=name, needed_bytes=needed, longest_context=longest, tokens_per_s=rate))
        return tuple(found)

    def fitting(self) -> Fitting | None:
        """Weights in fewer bits, the most bits that fit; else fewer texts or a shorter context, in the weights that
        were asked for if that is enough. None where nothing fits."""
        for name in self._fewer:
            if self.fits(weights=name):
                return self._found(weights=name)
        for least in (USUAL_CONTEXT, USUAL_PROMPT):
            for name in (self._asked.weights, *self._fewer):
                if found := self._smaller(name, max(self._prompt, min(self._asked.context, least))):
                    return found
        return None

    def smallest(self) -> Smallest:
        """What would be needed in any case, and the card that has it."""
        name = (self._asked.weights, *self._fewer)[-1]
        memory = self._memory({"weights": name}, self._gpu)
        needed, others = memory.needed_expected_bytes, (self._gpu.memory_bytes or 0) - (self._available_bytes or 0)
        if self._gpu.kind != "cuda":
            return Smallest(weights=name, needed_bytes=needed)
        cards = [card for card in catalogue().values() if card.kind == "cuda" and card.fp16_dense_tflops]
        for card in sorted(cards, key=lambda each: each.memory_bytes or 0):
            size = card.memory_bytes or 0
            if verdict_of(self._memory({"weights": name}, card), size - others) == "fits":
                return Smallest(weights=name, needed_bytes=needed, card=card.name, card_bytes=size)
        return Smallest(weights=name, needed_bytes=needed)

    def _smaller(self, weights: str, least_context: int) -> Fitting | None:
        """Fewer texts of this context; else one text of a shorter one."""
        asked = self._asked
        batch = largest(lambda size: self.fits(weights=weights, batch=size), asked.batch - 1)
        if batch:
            return self._found(weights=weights, batch=batch)
        context = largest(lambda size: self.fits(weights=weights, batch=1, context=size), asked.context - 1)
        if context < least_context:
            return None
        return self._found(weights=weights, batch=1, context=max(least_context, context - context % _STEP))

    def _found(self, **changes: int | str) -> Fitting:
        words = [f"--{name} {value}" for name, value in changes.items() if value != getattr(self._asked, name)]
        return Fitting(words=" ".join(words), needed_bytes=self._memory(changes, self._gpu).needed_expected_bytes)

    def fits(self, **changes: int | str) -> bool:
        """Whether it fits with these changes."""
        return verdict_of(self._memory(changes, self._gpu), self._available_bytes) == "fits"

    def _memory(self, changes: dict[str, int | str], gpu: Gpu) -> InferenceMemory:
        asked = self._asked.model_copy(update=changes)
        asked = asked.model_copy(update={"prompt": min(self._prompt or USUAL_PROMPT, asked.context)})
        engine: Engine = asked.engine or FORMATS[asked.weights].engine
        return memory_of(self._model, asked, engine, gpu)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits; 0: none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
