"""`Inference`: how a model is to generate text, in how many bits. Bytes by GGUF's blocks (ggml-org/llama.cpp,
ggml/src/ggml-common.h): q4_0 has 18 for 32 weights, q8_0 34 for 32, q4_K 144 for 256, q5_K 176, q6_K 210. Mixtures'
bits are those of Llama 3.1 8B's blocks."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from foretrain.base.errors import UserError
from foretrain.base.messages import listed
from foretrain.base.records import Note, Record
from foretrain.config.checks import bad_value, value_as_written
from foretrain.config.hub.facts import ModelFacts
from foretrain.config.option import COST, EVERYTHING, LINK, NETWORK, PER_NODE, option, options_of
from foretrain.config.words import NotPlanned, Typed, Vocabulary, converted
from foretrain.hardware.catalogue import Gpu

Engine = Literal["llama.cpp", "pytorch"]


class Format(NamedTuple):
    """Bits a number of the blocks' matrices, its usual engine, and of PyTorch's formats bits of what else is stored."""

    block: float
    engine: Engine
    quantized: bool = True
    embedding: float = 16
    head: float = 16
    other: float = 16


FORMATS: dict[str, Format] = {
    "f32": Format(32, "pytorch", False, 32, 32, 32), "f16": Format(16, "pytorch", False),
    "bf16": Format(16, "pytorch", False),
    **{name: Format(block, "llama.cpp") for name, block in {
        "q8_0": 8.5, "q6_k": 6.5625, "q5_k_m": 5.653, "q5_k_s": 5.5, "q5_0": 5.5, "q4_k_m": 4.798, "iq4_nl": 4.553,
        "q4_k_s": 4.536, "q4_0": 4.5, "iq4_xs": 4.316, "mxfp4_moe": 4.25, "q3_k_l": 4.191, "q3_k_m": 3.844,
        "iq3_m": 3.575, "iq3_s": 3.458, "q3_k_s": 3.4375, "iq3_xs": 3.270, "iq3_xxs": 3.071, "q2_k": 2.942,
        "q2_k_s": 2.724, "iq2_m": 2.697, "iq2_s": 2.479, "iq2_xs": 2.365, "iq2_xxs": 2.128, "tq2_0": 2.0625,
        "iq1_m": 1.856, "iq1_s": 1.693, "tq1_0": 1.6875,
    }.items()},
    # torchao's weight-only formats leave the embedding in bf16: int8 has a scale a row, int4 a scale and a zero for 64.
    "fp8": Format(8, "pytorch", head=8), "int8": Format(8, "pytorch", head=8), "int4": Format(4.5, "pytorch", head=4.5),
    # As published, with embedding and head in 16 bits: GPTQ and AWQ have a 16-bit scale and a 4-bit zero a group, NF4 a
    # scale of 32 (or 8) for 64 weights, NVFP4 8 bits for 16, MXFP4 8 bits for 32 of experts alone.
    "w8": Format(8.01, "pytorch"), "w4_g128": Format(4 + 20 / 128, "pytorch"),
    "w4_g64": Format(4 + 20 / 64, "pytorch"), "w4_g32": Format(4 + 20 / 32, "pytorch"),
    "nf4": Format(4.5, "pytorch"), "nf4_dq": Format(4.127, "pytorch"), "nvfp4": Format(4.5, "pytorch"),
    "mxfp4": Format(4.25, "pytorch"),
}  # fmt: skip
PUBLISHED = ("w8", "w4_g128", "w4_g64", "w4_g32", "nf4", "nf4_dq", "nvfp4", "mxfp4")
TRAINED_SO = ("mxfp4_moe", "tq1_0", "tq2_0")  # formats that fit models which were trained for them alone
SPELLINGS = {"float32": "f32", "fp32": "f32", "float16": "f16", "fp16": "f16", "half": "f16", "bfloat16": "bf16",
             "q8": "q8_0", "q4": "q4_k_m", "q5": "q5_k_m", "q6": "q6_k"}  # fmt: skip
STORED = {"float32": "bf16", "bfloat16": "bf16", "float16": "f16"}  # of published weights, by their dtype
CACHES: dict[str, float] = {"f32": 32, "f16": 16, "bf16": 16, "fp8": 8, "q8_0": 8.5, "q4_0": 4.5}


EXCEPTED = ("modules_to_not_convert", "llm_int8_skip_modules", "ignore", "exclude_modules")


def published_in(quantization: Mapping[str, Any]) -> str:
    """The format of a config.json's quantization_config; '' of one that is not known here."""
    method, groups = quantization.get("quant_method", "bitsandbytes"), quantization.get("config_groups")
    if method == "bitsandbytes":
        double = "_dq" * bool(quantization.get("bnb_4bit_use_double_quant"))
        return "w8" if quantization.get("load_in_8bit") else f"nf4{double}"
    if method == "mxfp4" or "NVFP4" in str(quantization.get("quant_algo")):
        return "mxfp4" if method == "mxfp4" else "nvfp4"
    weights = [quantization]
    if method in ("compressed-tensors", "modelopt") and isinstance(groups, Mapping) and groups:
        weights = [group.get("weights") if isinstance(group, Mapping) else None for group in groups.values()]
    found = {_stored_in(str(method).removeprefix("intel/"), each) for each in weights}
    return found.pop() if len(found) == 1 else ""


def _stored_in(method: str, weights: Any) -> str:
    if method in ("fp8", "fbgemm_fp8") or not isinstance(weights, Mapping):
        return "w8" if isinstance(weights, Mapping) else ""
    if "FP8" in str(weights.get("quant_algo")):
        return "w8"
    bits = weights.get("bits", weights.get("num_bits", weights.get("w_bit")))
    size = weights.get("group_size") or weights.get("q_group_size") or 128
    if method not in ("gptq", "awq", "auto-round", "compressed-tensors", "modelopt") or bits not in (4, 8):
        return ""
    if bits == 8:
        return "w8"
    name = "nvfp4" if weights.get("type") == "float" and size == 16 else f"w4_g{128 if size == -1 else size}"
    return name if name in FORMATS else ""


def excepted(quantization: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules that a quantization_config leaves in 16 bits: names, parts of names, or patterns."""
    named = [quantization.get(key) for key in EXCEPTED]
    entries = [entry for each in named if isinstance(each, list) for entry in each if isinstance(entry, str) and entry]
    dynamic = quantization.get("dynamic")  # GPTQModel's
    rules = [key[2:] for key in dynamic if str(key).startswith("-:")] if isinstance(dynamic, Mapping) else []
    return (*entries, *(f"re:{rule}" for rule in rules))


def named(word: str) -> str:
    """Our name of a format or a KV cache's, as somebody types it: any case, - for _."""
    key = word.strip().lower().replace("-", "_")
    return SPELLINGS.get(key, key)


MOST_CONTEXT, MOST_BATCH = 2**27, 2**20
USUAL_CONTEXT = 4096  # where the model can have more: a cache of all that it can is rarely meant
USUAL_PROMPT = 512
_option = partial(option, affects=COST, on_resume="free", texts="inference_knob", thousand=1024)


class Inference(Record):
    """What is asked. `context` 0: the model's, at most USUAL_CONTEXT; `prompt` 0: USUAL_PROMPT; `weights` "": as
    published, or the most bits that fit; `engine` "": the usual one; `split` "": layer."""

    # fmt: off
    context: int = _option(
        0, "tokens that a text may have, prompt included", group="batch", unit="tokens",
        aliases=("context_length", "ctx"), least=0, most=MOST_CONTEXT, basic=2, slider=(0, 131_072, "doubling"),
    )
    batch: int = _option(
        1, "texts that are generated at one time", group="batch", unit="sequences", least=1, most=MOST_BATCH, basic=3,
        slider=(1, 256, "doubling"),
    )
    weights: str = _option(
        "", "how weights are stored, such as bf16, q8_0, q4_k_m, int8", group="model", aliases=("dtype",),
        affects=EVERYTHING, basic=1,
    )
    kv: str = _option(
        "f16", "how the KV cache is stored: f16, bf16, f32, fp8, q8_0, q4_0", group="model", aliases=("kv_cache",),
        affects=EVERYTHING, basic=4,
    )
    prompt: int = _option(
        0, "tokens of the prompt, for the first token", group="batch", unit="tokens", least=0, most=MOST_CONTEXT,
        basic=5,
    )
    engine: Literal["", Engine] = _option("", "who generates: llama.cpp or pytorch", group="system")
    world: int = _option(
        1, "cards that hold one model together", group="system", least=1, most=16_384, unit="cards", compared=False,
    )
    split: Literal["", "layer", "tensor"] = _option(
        "", "how cards share the model: layer (whole layers a card) or tensor (every matrix divided)", group="system",
    )
    n_gpu_layers: int = _option(
        -1, "layers on the card, the head one of them; the others stay in the computer's memory. -1: all",
        group="system", aliases=("ngl", "gpu_layers"), least=-1, most=1_000, unit="layers",
    )
    n_cpu_moe: int = _option(
        0, "first layers whose experts stay in the computer's memory", group="system", aliases=("ncmoe",), least=0,
        most=1_000, unit="layers",
    )
    host_bandwidth: float = _option(
        0.0, "GB/s of the computer's memory by its data sheet; 0: unknown", group="system", least=0, most=100_000,
    )
    per_node: int = PER_NODE
    link: str = LINK
    network: str = NETWORK
    # fmt: on

    @property
    def on_host(self) -> str:
        """Return the option that leaves weights in the computer's memory; "" where none does."""
        return "--n-gpu-layers" if self.n_gpu_layers >= 0 else "--n-cpu-moe" if self.n_cpu_moe else ""


WORDS = Vocabulary(options_of(Inference))


class ParsedInference(NamedTuple):
    """What is asked, the words that ask for it, which word gave each option, the model's words, and notes."""

    asked: Inference
    typed: list[str]
    sources: dict[str, str]
    left: list[str]
    notes: tuple[Note, ...]


def parse_inference(words: Sequence[str]) -> ParsedInference:
    """Read the options of generating text among other words. Raises UserError for a value that cannot be."""
    typed = Typed()
    typed_words: list[str] = []
    left: list[str] = []
    for word in WORDS.split(words):
        option = WORDS.options.get(word.key)
        if option is None:
            left += word.typed
        elif word.value is None:
            raise UserError("config.no_value", source=word.name, key=word.key)
        else:
            typed_words += word.typed
            try:
                typed.put(word.key, converted(option, word.value, word.key, word.written), word.name)
            except NotPlanned:
                raise bad_value(option, word.value, value_as_written(word.value), word.written) from None
    notes = tuple(Note(id="typed_twice", values=each) for each in typed.twice)
    return ParsedInference(Inference.model_validate(typed.values), typed_words, typed.sources, left, notes)


def resolved(model: str, facts: ModelFacts, asked: Inference, gpu: Gpu) -> tuple[Inference, Engine]:
    """All that was left out, and who generates. Raises UserError for a format that nobody knows or the engine lacks."""
    if facts.quantization and not facts.published and not asked.weights:
        raise UserError("usage.inference_published", model=model, quantization=facts.quantization)
    weights, kv = named(asked.weights) or facts.published or STORED[facts.dtype], named(asked.kv)
    if weights == "bf16" and not asked.weights and not gpu.supports_bf16:
        weights = "f16"
    for name, value, known in (("--weights", weights, FORMATS), ("--kv", kv, CACHES)):
        if value not in known:
            raise UserError("usage.inference_format", option=name, value=value[:40], choices=listed(list(known)))
    engine: Engine = asked.engine or FORMATS[weights].engine
    own = FORMATS[weights].engine
    if engine != own and FORMATS[weights].quantized:
        raise UserError("usage.inference_engine", weights=weights, engine=engine, own=own)
    if asked.split and asked.world == 1:
        raise UserError("usage.needs_gpus", option="--split")
    if asked.on_host and (engine != "llama.cpp" or asked.world > 1):
        raise UserError("usage.inference_host", option=asked.on_host)
    if asked.n_cpu_moe and not facts.n_expert:
        raise UserError("usage.inference_no_experts", model=model)
    context = asked.context or min(facts.max_positions, USUAL_CONTEXT)
    if asked.prompt > context:
        raise UserError("usage.inference_prompt", prompt=asked.prompt, context=context)
    found: dict[str, Any] = {"prompt": asked.prompt or min(USUAL_PROMPT, context), "context": context}
    split = asked.split or ("layer" if asked.world > 1 else "")
    found |= {"weights": weights, "kv": kv, "split": split, **({"engine": engine} if split == "tensor" else {})}
    return asked.model_copy(update=found), engine
