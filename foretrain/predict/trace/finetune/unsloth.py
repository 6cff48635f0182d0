"""unsloth's functions in a traced run.

Its package needs a card and Triton, so stand-ins allocate, save and overwrite the same tensors (model/hub/unsloth.py,
unsloth_loss.py), in transformers' and peft's modules where unsloth puts its own (unsloth/models/llama.py:
patch_peft_model and the *_fast_forward functions).
"""

import contextlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
import transformers.modeling_utils
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import LEAST_OFFLOADED_BYTES, Unsloth, table_rows
from foretrain.model.hub.unsloth import Adapted, lora_mlp, lora_out, lora_qkv, normed_rotary, rms_norm, rotary
from foretrain.model.hub.unsloth_loss import ChunkedLoss, whole_loss
from foretrain.predict.trace.card.patches import Patches

ADAPTER = "default"


def put_in(model: Any, own: Unsloth, tune: FineTune) -> None:
    base = model.get_base_model() if tune.adapters else model
    if own.blocks:
        base.enable_input_require_grads()
        base.set_attn_implementation("sdpa")  # unsloth takes the best one there is
        _Blocks(base, own, tune).put_in()
    base.forward = MethodType(_forward(ChunkedLoss(), keeps=tune.keeps_logits, masks=not own.blocks), base)


def _forward(chunked: ChunkedLoss, *, keeps: bool, masks: bool) -> Callable[..., Any]:
    """CausalLM_fast_forward. `keeps`: an evaluation wants logits; `masks`: training does, too."""

    def forward(self: Any, input_ids: Any = None, labels: Any = None, attention_mask: Any = None, **more: Any) -> Any:
        more.pop("num_items_in_batch", None)
        if self.training and not masks:
            attention_mask = None
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **more)
        states, logits = outputs[0], None
        if self.training or not keeps:
            loss = chunked(states, self.lm_head.weight, labels)
        else:
            logits = self.lm_head(states)
            loss = whole_loss(logits, labels)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)

    return forward


class _Blocks:
    """The blocks of a model. `place`: the buffer of unpacked 4-bit weights; `held`: who has which part of it."""

    def __init__(self, base: Any, own: Unsloth, tune: FineTune) -> None:
        self.base, self.own, self.tune = base, own, tune
        self.tables: tuple[Tensor, Tensor] | None = None
        self.place: Tensor | None = None
        self.held: dict[Any, Tensor] = {}

    def put_in(self) -> None:
        model = self.base.model
        model.rotary_emb.forward = self._tables
        self._norm(model.norm)
        for layer in model.layers:
            self._norm(layer.input_layernorm)
            self._norm(layer.post_attention_layernorm)
            self._attention(layer.self_attn)
            mlp = [self._adapted(getattr(layer.mlp, f"{name}_proj")) for name in ("gate", "up", "down")]
            if "mlp" in self.own.lora and all(mlp):
                layer.mlp.forward = self._mlp(mlp)

    def _norm(self, module: Any) -> None:
        module.forward = lambda x: rms_norm(x, module.weight, in_place=self.own.in_place)

    def _tables(self, x: Tensor, position_ids: Any = None, **_: Any) -> tuple[Tensor, Tensor]:
        config = self.base.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if self.tables is None:
            shape = table_rows(config.max_position_embeddings, self.tune.seq_len), width
            self.tables = (
                torch.empty(shape, dtype=x.dtype, device=x.device),
                torch.empty(shape, dtype=x.dtype, device=x.device),
            )
        return self.tables[0][: x.shape[1]], self.tables[1][: x.shape[1]]

    def _adapted(self, layer: Any) -> Callable[[], Adapted] | None:
        """Return the layer as the functions take it, once they ask; None where they do not take it."""
        adapters = getattr(layer, "lora_A", None)
        plain = adapters is not None and ADAPTER in adapters and layer.base_layer.bias is None
        if not plain or len(layer.lora_magnitude_vector):
            return None
        dropout = layer.lora_dropout[ADAPTER]

        def found() -> Adapted:
            p = dropout.p if isinstance(dropout, torch.nn.Dropout) and dropout.training else 0.0
            return Adapted(self._dense(layer), layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight, p)

        return found

    def _dense(self, layer: Any) -> Callable[[bool], Tensor]:
        base = layer.base_layer
        state = getattr(base, "quant_state", None) or getattr(base.weight, "quant_state", None)
        if state is None:
            return lambda shared: base.weight

        def dense(shared: bool) -> Tensor:
            device = base.weight.device
            if not shared:
                return torch.empty(tuple(state.shape), dtype=state.dtype, device=device)
            elements = state.shape[0] * state.shape[1]
            if self.place is None or self.place.numel() < elements:
                self.place = torch.empty(elements, dtype=state.dtype, device=device)
            self.held[base] = self.place[:elements].view(tuple(state.shape))
            return self.held[base]

        return dense

    def _mlp(self, layers: list[Any]) -> Callable[[Tensor], Tensor]:
        gate, up, down = layers
        return lambda x: lora_mlp(x, gate(), up(), down())

    def _attention(self, attention: Any) -> None:
        own = self.own.lora
        three = [self._adapted(getattr(attention, f"{name}_proj")) for name in "qkv"]
        out = self._adapted(attention.o_proj)
        together = "qkv" in own and all(three)

        def forward(
            hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **more: Any
        ) -> tuple[Tensor, Any]:
            if together:
                q, k, v = lora_qkv(hidden_states, *[layer() for layer in three if layer])
            else:
                q, k, v = (getattr(attention, f"{name}_proj")(hidden_states) for name in "qkv")
            shape = (*hidden_states.shape[:-1], -1, attention.head_dim)
            q, k = self._turned(attention, q.view(shape), k.view(shape), *position_embeddings)
            y, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
                attention, q, k, v.view(shape).transpose(1, 2), attention_mask, dropout=0.0, scaling=attention.scaling
            )
            y = y.reshape(*hidden_states.shape[:-1], -1)
            return (lora_out(y, out()) if out and "out" in own else attention.o_proj(y)), None

        attention.forward = forward

    def _turned(self, attention: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        norms = [getattr(attention, f"{name}_norm", None) for name in "qk"]
        if norms[0] is None or norms[1] is None:
            return rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        of_q, of_k = norms[0].weight, norms[1].weight
        if q.is_cuda and not of_q.requires_grad and not of_k.requires_grad:
            return normed_rotary(q, k, of_q, of_k, cos, sin)
        turned = [rms_norm(x, w, in_place=self.own.in_place).transpose(1, 2) for x, w in ((q, of_q), (k, of_k))]
        return rotary(turned[0], turned[1], cos, sin)


@contextlib.contextmanager
def stood_in(tune: FineTune) -> Iterator[None]:
    """Let transformers checkpoint as unsloth does, where the run asks for that."""
    with Patches() as patches:
        if tune.offloads:
            host = _Host()

            def checkpoint(function: Any, *args: Any, **_: Any) -> Any:
                return _Offloaded.apply(function, host, *args)

            patches.set(transformers.modeling_utils, "checkpoint", checkpoint)
        yield


class _Host:
    def __init__(self) -> None:
        self.first, self.index, self.last = True, 0, 0
        self.both = False  # whether they alternate between two places
        self.places: list[Tensor] = []

    def takes(self, x: Tensor) -> bool:
        """Return whether this one goes; all do in the first pass, later the last one stays."""
        self.index += 1
        if self.first:
            self.last = self.index
        if x.nbytes <= LEAST_OFFLOADED_BYTES or (not self.first and self.index == self.last):
            return False
        if not self.places:
            self.places = [torch.empty(LEAST_OFFLOADED_BYTES, dtype=torch.uint8, device=x.device) for _ in range(2)]
        self.both = not self.first
        for i in range(1 + self.both):
            if self.places[i].nbytes < x.nbytes:
                self.places[i] = torch.empty(x.nbytes, dtype=torch.uint8, device=x.device)
        return True

    def back(self, like: tuple[Any, torch.dtype], index: int) -> Tensor:
        shape, dtype = like
        nbytes = shape.numel() * dtype.itemsize
        return self.places[index % 2 if self.both else 0][:nbytes].view(dtype).view(shape)


class _Offloaded(torch.autograd.Function):
    """UnslothCheckpointFunction."""

    @staticmethod
    def forward(ctx: Any, function: Any, host: _Host, x: Tensor, *others: Any) -> Any:
        ctx.goes = host.takes(x)
        ctx.function, ctx.host, ctx.others, ctx.index = function, host, others, host.index
        ctx.like = x.shape, x.dtype
        device = x.device.type
        ctx.autocast = {
            "device_type": device, "dtype": torch.get_autocast_dtype(device),
            "enabled": torch.is_autocast_enabled(device),
        }  # fmt: skip
        ctx.save_for_backward(*([] if ctx.goes else [x]))
        with torch.no_grad():
            return function(x, *others)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        host = ctx.host
        x = host.back(ctx.like, ctx.index) if ctx.goes else ctx.saved_tensors[0]
        host.first, host.index = False, 0
        x = x.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            out = ctx.function(x, *ctx.others)
        torch.autograd.backward(out, grads[0])
        return None, None, x.grad, *[None for _ in ctx.others]
