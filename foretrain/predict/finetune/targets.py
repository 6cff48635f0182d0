"""Which parts of a model get an adapter, by names; experts are two parameters in transformers 5, for which peft
(utils/transformers_weight_conversion.py) reads the earlier names, and all-linear as all of them. No torch."""

import difflib

from foretrain.base.errors import UserError
from foretrain.base.records import Note
from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelFacts
from foretrain.config.hub.parameters import parameters_of
from foretrain.config.words import names_in

MOST_NAMED = 8

# The modules of a block, as families name them, and which of the decoder's linear layers each is.
ROLES: dict[str, tuple[str, ...]] = {
    "q_proj": ("q",), "k_proj": ("k",), "v_proj": ("v",), "o_proj": ("out",), "out_proj": ("out",), "dense": ("out",),
    "qkv_proj": ("qkv",), "query_key_value": ("qkv",), "c_attn": ("qkv",), "W_pack": ("qkv",),
    "c_proj": ("out", "down"), "attn.c_proj": ("out",), "mlp.c_proj": ("down",),
    "gate_proj": ("gate",), "up_proj": ("up", "fc"), "gate_up_proj": ("gate_up",), "down_proj": ("down",),
    "c_fc": ("fc",), "fc1": ("fc",), "fc2": ("down",), "dense_h_to_4h": ("fc",), "dense_4h_to_h": ("down",),
    "shared_expert_gate": ("shared_gate",), "lm_head": ("head",), "embed_out": ("head",),
}  # fmt: skip
PARTS = ("self_attn", "attn", "attention", "mlp", "shared_expert")  # of a block, as they stand before such a name
ALL = {"all-linear", "all"}
ALL_LINEAR = frozenset(role for roles in ROLES.values() for role in roles) - {"head"}
# The embedding and the head, as families name them, and what the decoder's copies of them are called.
ENDS = {
    "embed_tokens": "embed", "wte": "embed", "embed_in": "embed", "word_embeddings": "embed", "lm_head": "head",
    "embed_out": "head",
}  # fmt: skip
# Names of parts that were layers once, by family: what they are now.
_QWEN = {
    "gate": "router", "gate_proj": "expert_gate_up", "up_proj": "expert_gate_up", "down_proj": "expert_down",
}  # fmt: skip
FORMER: dict[str, dict[str, str]] = {
    "mixtral": {"gate": "router", "w1": "expert_gate_up", "w3": "expert_gate_up", "w2": "expert_down"},
    "qwen3_moe": _QWEN, "olmoe": _QWEN,
}  # fmt: skip


def adapted_roles(facts: ModelFacts, tune: FineTune) -> frozenset[str]:
    """The parts of a block that get an adapter. Raises UserError for what peft cannot adapt."""
    if not tune.adapters:
        return frozenset()
    former = FORMER.get(facts.model_type, {})
    names = {*names_in(tune.lora_targets)}
    if names & ALL and len(names) > 1:
        raise UserError("usage.lora_all_alone")
    if names & ALL:
        found = ALL_LINEAR - ({"gate", "up", "down"} if former else set())
        names = set(former)
    else:
        ends = {name for name in names if name.rpartition(".")[2] in ENDS}
        _check_ends(facts, tune, ends)
        own = ends | _of_model(facts, names - set(former))
        found = frozenset(role for name in own for role in roles_of(name))
        if any(ENDS.get(name.rpartition(".")[2]) == "head" for name in names_in(tune.lora_saved)):
            found -= {"head"}  # peft adapts nothing that is trained whole
    parameters = frozenset(former[name] for name in names & set(former))
    _check(facts, tune, names, parameters)
    return found | parameters


def roles_of(name: str) -> tuple[str, ...]:
    """The decoder's layers that a module's name means, alone or behind parts of a block: `self_attn.q_proj`."""
    *parts, last = name.split(".")
    return ROLES.get(name) or (ROLES.get(last, ()) if set(parts) <= set(PARTS) else ())


def redirected(tune: FineTune) -> FineTune:
    """Return the same where unsloth trains head and embedding whole (models/llama.py, _redirect_embedding_targets)."""
    names = names_in(tune.lora_targets)
    moved = [name for name in names if name.rpartition(".")[2] in ENDS]
    if not (tune.unsloth and tune.adapters and moved):
        return tune
    saved = dict.fromkeys([*names_in(tune.lora_saved), *moved])
    kept = [name for name in names if name not in moved]
    return tune.model_copy(update={"lora_targets": ",".join(kept), "lora_saved": ",".join(saved)})


def unknown_names(facts: ModelFacts, tune: FineTune) -> list[str]:
    """Names of modules to adapt or to train whole that no module of such models has; peft leaves them out."""
    if not tune.adapters:
        return []
    known = {*FORMER.get(facts.model_type, {}), *ALL}
    names = [*names_in(tune.lora_targets), *names_in(tune.lora_saved)]
    known |= {"score"} if tune.scores else set()
    names = [name for name in names if name not in known and name.rpartition(".")[2] not in ENDS]
    return [name for name in names if name not in _of_model(facts, set(names))]


def _of_model(facts: ModelFacts, names: set[str]) -> set[str]:
    """Those of these names that modules of such a model have, as a whole path or its end."""
    paths = {f".{each.module}" for each in parameters_of(facts) if each.role != "vision"}
    return {name for name in names if any(path.endswith(f".{name}") for path in paths)}


def check_saved(facts: ModelFacts, tune: FineTune) -> None:
    names = _of_model(facts, {*names_in(tune.lora_saved)}) if tune.adapters and tune.lora_saved else set()
    for name in sorted(names):
        if adapted_roles(facts, tune).intersection(roles_of(name)):
            raise UserError("usage.lora_saved_layer", name=name)


def _check_ends(facts: ModelFacts, tune: FineTune, names: set[str]) -> None:
    """Raises UserError for an adapter on the embedding, which is not planned, and for one on the head that a loss
    would not see, as it multiplies by the head's weight (trl sft_trainer.py refuses it)."""
    if not names:
        return
    shown = ", ".join(sorted(names))
    if any(ENDS[name.rpartition(".")[2]] == "embed" for name in names):
        raise UserError("usage.lora_embedding", names=shown)
    kernels = facts.liger_kernels(tune.loop) if tune.liger else None
    if tune.loop == "trl" or tune.cut_cross_entropy or (kernels is not None and kernels.loss == "fused"):
        loss = "TRL" if tune.loop == "trl" else "cut cross-entropy" if tune.cut_cross_entropy else "Liger"
        raise UserError("usage.lora_head", names=shown, loss=loss)


def _check(facts: ModelFacts, tune: FineTune, names: set[str], parameters: frozenset[str]) -> None:
    """What peft refuses of parameters that are no layers."""
    if not parameters:
        return
    if tune.lora_dropout or tune.method == "dora":
        option = "dora" if tune.method == "dora" else "lora_dropout"
        raise UserError("usage.experts_adapter", model=facts.model_type, option=option)
    both = sorted(name for name, part in FORMER[facts.model_type].items() if part == "expert_gate_up")
    if 0 < len(set(both) & names) < len(both):
        raise UserError("usage.experts_together", model=facts.model_type, names=", ".join(both))


def no_such_layers(facts: ModelFacts, tune: FineTune) -> UserError:
    if not tune.lora_targets.strip(" ,"):
        return UserError("usage.lora_targets_none")
    names = names_in(tune.lora_targets)
    shown = ", ".join([*names[:MOST_NAMED], *(["…"] if len(names) > MOST_NAMED else [])])
    layers = dict.fromkeys(each.module.rpartition(".")[2] for each in parameters_of(facts) if each.role == "linear")
    near = difflib.get_close_matches(names[0], layers, n=1)
    own = ",".join(near or [*layers][:MOST_NAMED])
    return UserError("usage.lora_targets_own", targets=shown, model=facts.model_type, own=own)


# Modules that are trained whole beside adapters (`modules_to_save`): peft (utils/other.py, ModulesToSaveWrapper) trains
# a copy of each whose path ends with a name, so a tied head and embedding no longer are one weight.

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
    score = ["lm_head"] if tune.scores else []  # as the decoder names it; peft always trains it (SEQ_CLS)
    return (*names_in(tune.lora_saved), *score) if tune.adapters else ()


def is_saved(facts: ModelFacts, tune: FineTune, parameter: str) -> bool:
    if ".lora_" in parameter or not (names := _asked(tune)):
        return False
    *words, _ = own_words(facts.model_type, parameter)
    return any(".".join(words[:end]).endswith(names) for end in range(1, len(words) + 1))


def is_untied(facts: ModelFacts, tune: FineTune) -> bool:
    return facts.tied and any(is_saved(facts, tune, f"{end}.weight") for end in OUTER)


def saved_notes(facts: ModelFacts, tune: FineTune) -> list[Note]:
    """That names of an embedding or a head are another family's, so that nothing is trained for them."""
    own = [own_words(facts.model_type, end)[-1] for end in OUTER]
    names = [name for name in _asked(tune) if name in ENDS and name not in own]
    values = {"names": ", ".join(names), "model": facts.model_type, "own": ", ".join(own)}
    return [Note(id="saved_unknown", values=values)] if names else []
