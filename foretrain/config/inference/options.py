"""`Inference`: how a model is to generate text. Each option once, with its help."""

from functools import partial
from typing import Literal

from foretrain.base.records import Record
from foretrain.config.inference.formats import Engine
from foretrain.config.option import COST, Option, option

MOST_CONTEXT, MOST_BATCH = 2**27, 2**20
USUAL_CONTEXT = 4096  # where the model can have more: a cache of all that it can is rarely meant
USUAL_PROMPT = 512
_option = partial(option, affects=COST, on_resume="free", texts="inference_knob", thousand=1024)


class Inference(Record):
    """What is asked. `context` 0: the model's, at most USUAL_CONTEXT; `prompt` 0: USUAL_PROMPT, or what the context
    has; `weights` "": as published, or the most bits that fit of llama.cpp's formats; `engine` "": the one that such
    weights are usual in."""

    # fmt: off
    context: int = _option(
        0, "tokens that a text may have, prompt included", group="batch", unit="tokens",
        aliases=("context_length", "ctx"), least=0, most=MOST_CONTEXT,
    )
    batch: int = _option(
        1, "texts that are generated at one time", group="batch", unit="sequences", least=1, most=MOST_BATCH,
    )
    weights: str = _option(
        "", "how weights are stored, such as bf16, q8_0, q4_k_m, int8", group="model", aliases=("dtype",),
    )
    kv: str = _option(
        "f16", "how the KV cache is stored: f16, bf16, f32, fp8, q8_0, q4_0", group="model", aliases=("kv_cache",),
    )
    prompt: int = _option(
        0, "tokens of the prompt, for the first token", group="batch", unit="tokens", least=0, most=MOST_CONTEXT,
    )
    engine: Literal["", Engine] = _option("", "who generates: llama.cpp or pytorch", group="system")
    # fmt: on


INFERENCE_OPTIONS = Option.all_of(Inference)
