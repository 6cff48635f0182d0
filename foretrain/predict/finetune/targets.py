"""Which parts of a model get an adapter: linear layers by their names, and of a mixture of experts, what peft takes
these names for. No torch.

transformers 5 keeps the experts of a layer in two parameters. peft (utils/transformers_weight_conversion.py) reads the
names that they had before as these parameters, in the families below, and all-linear as all of them.
"""

from foretrain.base.errors import UserError
from foretrain.config.finetune.options import FineTune
from foretrain.config.finetune.read import PEFT_TARGETS
from foretrain.config.hub.facts import ModelFacts

# The modules of a block, as families name them, and which of the decoder's linear layers each is.
ROLES: dict[str, tuple[str, ...]] = {
    "q_proj": ("q",), "k_proj": ("k",), "v_proj": ("v",), "o_proj": ("out",), "out_proj": ("out",), "dense": ("out",),
    "qkv_proj": ("qkv",), "query_key_value": ("qkv",), "c_attn": ("qkv",), "W_pack": ("qkv",),
    "c_proj": ("out", "down"), "attn.c_proj": ("out",), "mlp.c_proj": ("down",),
    "gate_proj": ("gate",), "up_proj": ("up", "fc"), "gate_up_proj": ("gate_up",), "down_proj": ("down",),
    "c_fc": ("fc",), "fc1": ("fc",), "fc2": ("down",), "dense_h_to_4h": ("fc",), "dense_4h_to_h": ("down",),
    "shared_expert_gate": ("shared_gate",),
}  # fmt: skip
PARTS = ("self_attn", "attn", "attention", "mlp", "shared_expert")  # of a block, as they stand before such a name
ALL_LINEAR = frozenset(role for roles in ROLES.values() for role in roles)
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
    names = {name.strip() for name in tune.lora_targets.split(",") if name.strip()}
    if names & {"all-linear", "all"}:
        found = ALL_LINEAR - ({"gate", "up", "down"} if former else set())
        names = set(former)
    else:
        found = frozenset(role for name in names - set(former) for role in roles_of(name))
    parameters = frozenset(former[name] for name in names & set(former))
    _check(facts, tune, names, parameters)
    return found | parameters


def roles_of(name: str) -> tuple[str, ...]:
    """The decoder's layers that a module's name means, alone or behind parts of a block: `self_attn.q_proj`."""
    *parts, last = name.split(".")
    return ROLES.get(name) or (ROLES.get(last, ()) if set(parts) <= set(PARTS) else ())


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
    """The sentence for modules of which the model has none."""
    if not tune.lora_targets.strip(" ,"):
        return UserError("usage.lora_targets_none")
    values = {"targets": tune.lora_targets, "model": facts.model_type}
    if (own := PEFT_TARGETS.get(facts.model_type)) is None:
        return UserError("usage.lora_targets", **values)
    return UserError("usage.lora_targets_own", **values, own=own)
