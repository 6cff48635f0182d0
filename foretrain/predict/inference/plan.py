"""`InferencePlan`: what it takes to generate text with a model on a card, as one record. Instant, without torch."""

from foretrain.base.errors import UserError
from foretrain.base.messages import listed
from foretrain.base.records import Note, Record
from foretrain.base.units import format_bytes
from foretrain.config.inference.formats import CACHES, FORMATS, Engine, named
from foretrain.config.inference.options import MOST_BATCH, USUAL_CONTEXT, USUAL_PROMPT, Inference
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.inference.fitting import Fitting, FormatFit, Search, Smallest, largest
from foretrain.predict.inference.memory import InferenceMemory, memory_of, verdict_of
from foretrain.predict.inference.model import InferenceModel
from foretrain.predict.inference.speed import InferenceSpeed, speed_of
from foretrain.predict.memory import FAILING, Verdict

SCHEMA = "foretrain.inference/1"


class InferencePlan(Record):
    """The forecast of one model, one way to run it, one card. `asked` has all its values.

    `longest_context`: tokens of a text that fit with this batch, at most what the model can have; `largest_batch`:
    texts that fit with this context; both with room to spare. 0 where not even one does, None where the memory to fit
    in is not known. `formats`: what each way to store the weights comes to, where none was asked for.
    """

    name: str
    where: str
    model: InferenceModel
    asked: Inference
    engine: Engine
    gpu: Gpu
    available_bytes: int | None
    used_by_others_bytes: int
    memory: InferenceMemory
    verdict: Verdict | None
    longest_context: int | None
    largest_batch: int | None
    speed: InferenceSpeed | None
    fitting: Fitting | None = None
    smallest: Smallest | None = None
    formats: tuple[FormatFit, ...] = ()
    notes: tuple[Note, ...] = ()

    def __repr__(self) -> str:
        rate = f", {self.speed.tokens_per_s:.0f} tokens/s" if self.speed else ""
        needed = format_bytes(self.needed_bytes)
        return f"<inference plan of {self.name} on {self.gpu.name}: {self.verdict}, {needed}{rate}>"

    @property
    def needed_bytes(self) -> int:
        """What is expected to be taken on the card, its CUDA context included."""
        return self.memory.needed_expected_bytes


def plan(model: InferenceModel, asked: Inference, gpu: Gpu, *, used_by_others_bytes: int = 0) -> InferencePlan:
    """The forecast. Where nobody says how weights are stored, they are as published if that fits, else in the most bits
    that do. Raises UserError for what cannot be asked."""
    found = _plan(model, asked, gpu, used_by_others_bytes)
    if asked.weights or model.published or found.available_bytes is None:
        return found
    search = Search(model, found.asked, asked.prompt, gpu, found.available_bytes)
    formats = search.formats()
    best = next((each.weights for each in formats if each.longest_context >= found.asked.context), "")
    if best and best != found.asked.weights:
        found = _plan(model, asked.model_copy(update={"weights": best}), gpu, used_by_others_bytes)
    return found.model_copy(update={"formats": formats})


def _plan(model: InferenceModel, asked: Inference, gpu: Gpu, used_by_others_bytes: int) -> InferencePlan:
    prompt, as_published = asked.prompt, not asked.weights
    asked, engine = resolved(model, asked, gpu)
    room = None if gpu.memory_bytes is None else max(0, gpu.memory_bytes - used_by_others_bytes)
    memory = memory_of(model, asked, engine, gpu)
    verdict = verdict_of(memory, room)
    search = Search(model, asked, prompt, gpu, room)
    fitting = search.fitting() if verdict in FAILING else None
    smallest = search.smallest() if verdict in FAILING and fitting is None else None
    return InferencePlan(
        name=model.name, where=model.where, model=model, asked=asked, engine=engine, gpu=gpu, available_bytes=room,
        used_by_others_bytes=used_by_others_bytes, memory=memory, verdict=verdict,
        longest_context=None if room is None else search.longest_context(),
        largest_batch=None if room is None else largest(lambda size: search.fits(batch=size), MOST_BATCH),
        speed=speed_of(model, asked, engine, gpu),
        fitting=fitting, smallest=smallest,
        notes=_notes(model, asked, engine, gpu, as_published=as_published),
    )  # fmt: skip


def resolved(model: InferenceModel, asked: Inference, gpu: Gpu) -> tuple[Inference, Engine]:
    """All that was left out, and who generates. Raises UserError for a format that nobody knows or the engine lacks."""
    if model.quantization and not model.published and not asked.weights:
        raise UserError("usage.inference_published", model=model.name, quantization=model.quantization)
    weights, kv = named(asked.weights) or model.published or model.dtype, named(asked.kv)
    if weights == "bf16" and not asked.weights and not gpu.supports_bf16:
        weights = "f16"
    for option, value, known in (("--weights", weights, FORMATS), ("--kv", kv, CACHES)):
        if value not in known:
            raise UserError("usage.inference_format", option=option, value=value[:40], choices=listed(list(known)))
    engine: Engine = asked.engine or FORMATS[weights].engine
    own = FORMATS[weights].engine
    if engine != own and FORMATS[weights].quantized:
        raise UserError("usage.inference_engine", weights=weights, engine=engine, own=own)
    context = asked.context or min(model.max_positions, USUAL_CONTEXT)
    if asked.prompt > context:
        raise UserError("usage.inference_prompt", prompt=asked.prompt, context=context)
    if asked.prompt == 0:
        asked = asked.model_copy(update={"prompt": min(USUAL_PROMPT, context)})
    return asked.model_copy(update={"weights": weights, "kv": kv, "context": context}), engine


def _notes(
    model: InferenceModel, asked: Inference, engine: Engine, gpu: Gpu, *, as_published: bool
) -> tuple[Note, ...]:
    found = gpu.notes
    if gpu.kind not in ("cuda", "cpu"):
        found.append(Note(id="inference_unchecked", values={"gpu": gpu.name}))
    if gpu.memory_bytes is None:
        found.append(Note(id="inference_no_size", values={"gpu": gpu.name, "example": gpu.sized_name}))
    if as_published and model.quantization:
        values = {"quantization": model.quantization, "weights": asked.weights}
        found.append(Note(id="inference_quantized", values=values))
    if asked.context > model.max_positions:
        found.append(Note(id="inference_beyond", values={"context": asked.context, "most": model.max_positions}))
    if model.latent:
        found.append(Note(id="inference_latent", values={"numbers": model.kv_numbers}))
    if model.sliding_layers:
        values = {"layers": model.sliding_layers, "of": model.n_layer, "window": model.sliding_window}
        found.append(Note(id="inference_window", values=values))
    if engine == "llama.cpp" and gpu.kind == "cuda" and not gpu.is_geforce:
        found.append(Note(id="inference_datacentre", values={"gpu": gpu.name}))
    return tuple(found)
