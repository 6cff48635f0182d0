"""What `init_from` does to the other knobs: the model that a run starts from brings its shape."""

from collections.abc import Callable
from typing import Any

from foretrain.base.errors import UserError
from foretrain.config.families import FAMILIES
from foretrain.config.options import OPTIONS
from foretrain.config.presets import GPT2_SHAPES
from foretrain.config.weights_file import TANH_GELUS, WeightsFile, look

PUBLISHED_VOCABULARY, PUBLISHED_BLOCK = 50257, 1024


def is_path(init_from: str) -> bool:
    """Whether it names a file or folder instead of being one of nanoGPT's words."""
    return any(mark in init_from for mark in "/\\") or init_from.endswith((".pt", ".pth", ".safetensors"))


def needs_weights(init_from: str) -> bool:
    """Whether a run with it starts from somebody's weights."""
    return init_from in GPT2_SHAPES or is_path(init_from)


def apply(values: dict[str, Any], sources: dict[str, str]) -> tuple[list[UserError], list[UserError]]:
    """Put the shape of the model that init_from names into the values. Returns (notes, problems)."""
    model = values.get("init_from")
    if not isinstance(model, str):
        return [], []
    if not needs_weights(model):
        return [], []
    recipe = str(values.get("recipe", "nanogpt"))[:40]
    starts = recipe in FAMILIES and FAMILIES[recipe].hugging_face
    if not starts or (model in GPT2_SHAPES and recipe != "nanogpt"):
        return [], [UserError("config.init_from_recipe", init_from=model, recipe=recipe)]
    if model in GPT2_SHAPES:
        return _published(model, values, sources), []
    try:
        weights = look(model)
    except UserError as error:
        return [], [error]
    if weights.recipe != values.get("recipe", weights.recipe):
        return [], [UserError("config.init_from_other_recipe", init_from=model, recipe=recipe, own=weights.recipe)]
    if "recipe" not in values and weights.recipe != recipe:
        values["recipe"], sources["recipe"] = weights.recipe, f"init_from={weights.path}"
    return _from_file(weights, values, sources)


def _published(model: str, values: dict[str, Any], sources: dict[str, str]) -> list[UserError]:
    """nanoGPT's init_from='gpt2-xl' takes the shape of that model, whatever the file says (train.py).

    A smaller context crops the positions as there; a larger vocabulary pads the embedding.
    """
    notes = []
    shape = {**GPT2_SHAPES[model], "bias": True}
    block, vocabulary = values.get("block_size"), values.get("vocab_size")
    if not (isinstance(block, int) and block <= PUBLISHED_BLOCK):
        shape["block_size"] = PUBLISHED_BLOCK
    if not (isinstance(vocabulary, int) and vocabulary > PUBLISHED_VOCABULARY):
        shape["vocab_size"] = PUBLISHED_VOCABULARY
    for key, value in shape.items():
        if key in values and values[key] != value:
            source = sources[key]
            notes.append(UserError("config.init_from_wins", key=key, model=model, value=value, source=source))
        values[key] = value
        sources[key] = f"init_from={model}"
    if "vocab_size" not in shape:
        notes.append(UserError("config.init_from_pads", path=model, rows=PUBLISHED_VOCABULARY, vocab_size=vocabulary))
    return notes


def _from_file(
    weights: WeightsFile, values: dict[str, Any], sources: dict[str, str]
) -> tuple[list[UserError], list[UserError]]:
    """The shape of the file; what the config says must agree, but for a smaller context and a larger vocabulary."""
    path, notes, problems = weights.path, [], []
    fits: dict[str, Callable[[Any, Any], bool]] = {"block_size": int.__le__, "vocab_size": int.__ge__}
    said = {"block_size": "init_from_crops", "vocab_size": "init_from_pads"}
    for key, own in weights.shape.items():
        value = values.get(key, own)
        if value == own:
            values[key] = own
            sources.setdefault(key, f"init_from={path}")
        elif key in fits and type(value) is int and value > 0 and fits[key](value, own):
            notes.append(UserError(f"config.{said[key]}", path=path, rows=own, **{key: value}))
        else:
            id = "config.init_from_beyond" if key in fits else "config.init_from_contradicts"
            problems.append(UserError(id, key=key, value=str(value)[:40], own=own, path=path, source=sources[key]))
    if weights.longest is not None:
        value = values.setdefault("block_size", min(weights.longest, OPTIONS["block_size"].default))
        sources.setdefault("block_size", f"init_from={path}")
        if type(value) is int and value > weights.longest:
            given = {"key": "block_size", "value": str(value), "source": sources["block_size"]}
            problems.append(UserError("config.init_from_beyond", own=weights.longest, path=path, **given))
    if "n_head" not in weights.shape and "n_head" not in values:
        problems.append(UserError("config.init_from_heads", path=path))
    if weights.activation in TANH_GELUS:
        notes.append(UserError("config.init_from_gelu", path=path, activation=weights.activation))
    if values.get("init_optimizer") is True and not weights.moments:
        problems.append(UserError("config.init_optimizer_none", path=path))
    return notes, problems
