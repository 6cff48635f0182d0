"""`Inference`: how a model is to generate text. Each option once, with its help."""

from typing import Literal

from pydantic import Field

from foretrain.base.records import Record
from foretrain.config.inference.formats import Engine

MOST_CONTEXT, MOST_BATCH = 2**27, 2**20
USUAL_CONTEXT = 4096  # where the model can have more: a cache of all that it can is rarely meant
USUAL_PROMPT = 512


class Inference(Record):
    """What is asked. `context` 0: the model's, at most USUAL_CONTEXT; `prompt` 0: USUAL_PROMPT, or what the context
    has; `weights` "": as published, or the most bits that fit of llama.cpp's formats; `engine` "": the one that such
    weights are usual in."""

    context: int = Field(default=0, ge=0, le=MOST_CONTEXT, description="Tokens that a text may have, prompt included.")
    batch: int = Field(default=1, ge=1, le=MOST_BATCH, description="Texts that are generated at one time.")
    weights: str = Field(default="", description="How weights are stored, such as bf16, q8_0, q4_k_m, int8.")
    kv: str = Field(default="f16", description="How the KV cache is stored: f16, bf16, f32, fp8, q8_0, q4_0.")
    prompt: int = Field(default=0, ge=0, le=MOST_CONTEXT, description="Tokens of the prompt, for the first token.")
    engine: Literal["", Engine] = Field(default="", description="Who generates: llama.cpp or pytorch.")
