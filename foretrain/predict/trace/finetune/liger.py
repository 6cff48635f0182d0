"""Liger's kernels in a traced run.

Its package needs a card and Triton, so stand-ins allocate, save and overwrite the same tensors (model/hub/liger.py);
the Trainer applies them as Liger's (transformers integrations/liger.py, liger_kernel transformers/monkey_patch.py:
`_apply_liger_kernel_to_instance`).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType, ModuleType
from typing import Any

from torch import Tensor
from transformers.integrations import liger as integration
from transformers.modeling_outputs import CausalLMOutputWithPast

from foretrain.config.hub.facts import LIGER_FAMILIES, Liger
from foretrain.model.hub.liger import FusedLoss, cross_entropy, gated_product, rms_norm, rotary
from foretrain.predict.trace.card.patches import Patches

NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@contextmanager
def stood_in() -> Iterator[None]:
    with Patches() as patches:

        def apply(model: Any, **options: Any) -> None:
            own = LIGER_FAMILIES.get(model.config.model_type)
            if own is not None:
                if options.get("fused_linear_cross_entropy") is False and own.loss == "fused":
                    own = own._replace(loss="")
                _applied(patches, model, own)

        package: Any = ModuleType("liger_kernel.transformers")
        package._apply_liger_kernel_to_instance = apply
        for name, module in (("liger_kernel", ModuleType("liger_kernel")), (package.__name__, package)):
            before = sys.modules.get(name)
            sys.modules[name] = module
            patches.callback(_put_back, name, before)
        patches.set(integration, "is_liger_kernel_available", lambda: True)
        yield


def _put_back(name: str, before: ModuleType | None) -> None:
    if before is None:
        del sys.modules[name]
    else:
        sys.modules[name] = before


def _applied(patches: Patches, model: Any, own: Liger) -> None:
    code: Any = sys.modules[type(model).__module__]
    patches.set(code, "apply_rotary_pos_emb", lambda q, k, cos, sin, *args, **kwargs: rotary(q, k, cos, sin))
    base = getattr(model, model.base_model_prefix, model)
    base = getattr(base, "language_model", base)  # of a multimodal model
    _norm(base.norm, in_place=own.last_in_place)
    for layer in base.layers:
        layer.mlp.forward = MethodType(_fused_mlp if hasattr(layer.mlp, "gate_up_proj") else _mlp, layer.mlp)
        heads = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")] if own.heads else []
        for norm in (*(getattr(layer, name, None) for name in NORMS), *heads):
            if norm is not None:
                _norm(norm, in_place=own.in_place)
    if own.loss == "fused":
        model.forward = MethodType(_forward, model)
    elif own.loss:
        patches.set(sys.modules["transformers.loss.loss_utils"].nn.functional, "cross_entropy", _cross_entropy)


def _norm(module: Any, *, in_place: bool) -> None:
    module.forward = lambda x: rms_norm(x, module.weight, in_place=in_place)


def _mlp(self: Any, x: Tensor) -> Any:
    return self.down_proj(gated_product(self.gate_proj(x), self.up_proj(x)))


def _fused_mlp(self: Any, x: Tensor) -> Any:
    up = self.gate_up_proj(x)
    gate, up = up.chunk(2, dim=-1)
    return self.down_proj(gated_product(gate, up))


def _cross_entropy(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return cross_entropy(logits, labels)


def _forward(
    self: Any, input_ids: Any = None, labels: Any = None, skip_logits: bool | None = None, **options: Any
) -> CausalLMOutputWithPast:
    """`lce_forward`: no logits while it trains, or where nobody wants them."""
    items = options.pop("num_items_in_batch", None)
    outputs = self.model(input_ids=input_ids, **options)
    states, logits, loss = outputs[0], None, None
    if skip_logits is None:
        skip_logits = self.training and labels is not None
    if skip_logits:
        loss = FusedLoss()(states, self.lm_head.weight, labels)
    else:
        logits = self.lm_head(states)
        options = {"vocab_size": self.config.get_text_config().vocab_size, "num_items_in_batch": items}
        loss = None if labels is None else self.loss_function(logits, labels, **options)
    return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)
