"""Modules that are trained whole beside adapters (`modules_to_save`), by the names of transformers' own code. No torch.

peft (utils/other.py, ModulesToSaveWrapper) keeps such a module and trains a copy of it, so that a head and an embedding
that were one weight are no longer. It takes each module whose path ends with a name, and passes over names that no
module has.
"""

from foretrain.base.records import Note
from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelFacts
from foretrain.predict.finetune.targets import ENDS, names_in

GPT2 = {
    "model": "transformer", "layers": "h", "self_attn": "attn", "embed_tokens": "wte", "embed_positions": "wpe",
    "norm": "ln_f", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
}  # fmt: skip
OWN_WORDS = {  # of paths, where they are others than the decoder's
    "gpt2": GPT2, "gpt_bigcode": GPT2,
    "gpt_neox": {
        "model": "gpt_neox", "self_attn": "attention", "embed_tokens": "embed_in", "norm": "final_layer_norm",
    },
    "phi": {"norm": "final_layernorm"},
}  # fmt: skip
OUTER = ("embed_tokens", "lm_head")  # outside the blocks, as the decoder names them


def own_words(model_type: str, name: str) -> list[str]:
    """The words of a name in the decoder, as they are in transformers' code."""
    own = OWN_WORDS.get(model_type, {})
    path = name if name.startswith("lm_head") else f"model.{name}"
    return [own.get(word, word) for word in path.split(".")]


def _asked(tune: FineTune) -> tuple[str, ...]:
    return tuple(names_in(tune.lora_saved)) if tune.adapters else ()


def is_saved(facts: ModelFacts, tune: FineTune, parameter: str) -> bool:
    """Whether a parameter of the decoder is one of a module that is trained whole."""
    if ".lora_" in parameter or not (names := _asked(tune)):
        return False
    *words, _ = own_words(facts.model_type, parameter)
    return any(".".join(words[:end]).endswith(names) for end in range(1, len(words) + 1))


def is_untied(facts: ModelFacts, tune: FineTune) -> bool:
    """Whether head and embedding, one weight in the model, are two in training."""
    return facts.tied and any(is_saved(facts, tune, f"{end}.weight") for end in OUTER)


def saved_notes(facts: ModelFacts, tune: FineTune) -> list[Note]:
    """That names of an embedding or a head are another family's, so that nothing is trained for them."""
    own = [own_words(facts.model_type, end)[-1] for end in OUTER]
    names = [name for name in _asked(tune) if name in ENDS and name not in own]
    values = {"names": ", ".join(names), "model": facts.model_type, "own": ", ".join(own)}
    return [Note(id="saved_unknown", values=values)] if names else []
