"""`Inference`: how a model is to generate text. Each option once, with its help."""

import difflib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from foretrain.base.errors import UserError
from foretrain.base.messages import listed
from foretrain.base.records import Note, Record
from foretrain.config.checks import bad_value, value_as_written
from foretrain.config.inference.formats import Engine
from foretrain.config.option import COST, EVERYTHING, option, options_of
from foretrain.config.values import NotPlanned, converted
from foretrain.config.words import Typed, Vocabulary, as_word

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
        affects=EVERYTHING,
    )
    kv: str = _option(
        "f16", "how the KV cache is stored: f16, bf16, f32, fp8, q8_0, q4_0", group="model", aliases=("kv_cache",),
        affects=EVERYTHING,
    )
    prompt: int = _option(
        0, "tokens of the prompt, for the first token", group="batch", unit="tokens", least=0, most=MOST_CONTEXT,
    )
    engine: Literal["", Engine] = _option("", "who generates: llama.cpp or pytorch", group="system")
    # fmt: on


WORDS = Vocabulary(options_of(Inference))


class ParsedInference(NamedTuple):
    """What is asked, the words that say so, those that are the model's, and what is to be known of them."""

    asked: Inference
    typed: list[str]
    left: list[str]
    notes: tuple[Note, ...]


def parse_inference(words: Sequence[str]) -> ParsedInference:
    """Read the options of generating text among other words. Raises UserError for a value that cannot be."""
    typed = Typed()
    said: list[str] = []
    left: list[str] = []
    for word in WORDS.split(words):
        option = WORDS.options.get(word.key)
        if option is None:
            left += word.typed
        elif word.value is None:
            raise UserError("config.no_value", source=word.name, key=word.key)
        else:
            said += word.typed
            try:
                typed.put(word.key, converted(option, word.value, word.key, word.written), word.name)
            except NotPlanned:
                raise bad_value(option, word.value, value_as_written(word.value), word.written) from None
    notes = tuple(Note(id="typed_twice", values=each) for each in typed.twice)
    return ParsedInference(Inference.model_validate(typed.values), said, left, notes)


def asked_with(values: Mapping[str, Any]) -> Inference:
    """Return what is asked by options by name. Raises UserError."""
    known = Inference.model_fields
    if unknown := [name for name in values if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        raise UserError("usage.inference_unknown", name=unknown[0][:40], choices=listed(near or list(known)))
    return parse_inference([as_word(name, value) for name, value in values.items()]).asked
