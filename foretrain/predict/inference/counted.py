"""The facts of a model that generates text: from its config.json, else counted in the class that transformers builds,
on the meta device (predict/trace/finetune/counted.py)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelFacts, ModelSource
from foretrain.config.hub.families import LATENT_FAMILIES
from foretrain.config.hub.source import FOUR_BITS, facts_of, quantized_facts
from foretrain.config.presets import IN_FOUR_BITS
from foretrain.hardware.catalogue import find
from foretrain.predict.finetune.traced import listened, unknown
from foretrain.predict.trace import interpreter, service
from foretrain.predict.trace.finetune.request import FineTuneRequest
from foretrain.predict.trace.record import Trace


@dataclass(frozen=True)
class CountRequest:
    """A model to count. Its code is refused as that of a training is."""

    source: ModelSource
    gpu = None

    def job(self) -> dict[str, Any]:
        config = {name: value for name, value in self.source.config.items() if name != "quantization_config"}
        return {"by": "foretrain.predict.trace.finetune.counted", "config": config, "compiled": False}

    def key(self) -> str:
        return service.key_of(self.job(), packages=interpreter.now().versions())

    def why_not(self) -> str:
        return FineTuneRequest(self.source, FineTune(method="full"), find("H100 SXM5")).why_not()

    def whole(self, trace: Trace) -> Trace:
        return trace


def facts_to_generate(source: ModelSource) -> ModelFacts:
    """Return a model's facts, also of families not trained here. Raises UserError for what cannot be counted."""
    found = _known_facts(source)
    if found and not found.quantization and IN_FOUR_BITS.search(source.where):  # a preset under its copy's name
        return found.model_copy(update={"quantization": FOUR_BITS, "published": "nf4_dq"})
    return found or _counted(_Asked(source))


def is_known(source: ModelSource) -> bool:
    return _known_facts(source) is not None


def _known_facts(source: ModelSource) -> ModelFacts | None:
    return source.facts or facts_of(source.config, source.where, LATENT_FAMILIES)


class _Asked:
    """A source by its config, which has no hash."""

    def __init__(self, source: ModelSource) -> None:
        self.source, self.text = source, source.model_dump_json()

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked) and self.text == other.text


@lru_cache(maxsize=16)
def _counted(asked: _Asked) -> ModelFacts:
    source = asked.source
    try:
        with listened() as listen:
            (found,) = service.traces([CountRequest(source)], listen)
    except service.TraceUnavailable as error:
        raise unknown(source, str(error)) from None
    return ModelFacts(**found.facts["model"], **quantized_facts(source.config, source.where))
