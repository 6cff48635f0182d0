"""The parameters and the cache of a model as transformers builds it, on the meta device, so without its weights."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache
from transformers.initialization import no_init_weights

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.keys import MOST_POSITIONS, POSITIONS
from foretrain.predict.trace.finetune.drive import quiet
from foretrain.predict.trace.finetune.standins import config_of, kind_of
from foretrain.predict.trace.record import Trace
from foretrain.predict.trace.traced import StandInError

# Texts that are read: caches grow evenly between the longer two, and no window is shorter than the first.
SHORT, LONG, LONGER = 2, 258, 514
STATES = ("conv_states", "recurrent_states")  # of linear attention
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
TAKEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "num_selected_experts", "top_k_experts")
TAKEN = (*TAKEN, "moe_topk", "moe_top_k", "moe_k")
Part = tuple[str, tuple[int, ...], str]


def trace(job: dict[str, Any]) -> Trace:
    """Return a record without events. `facts`: "model" has fields of ModelFacts."""
    written = job["config"]
    with quiet(), torch.no_grad():
        model = _built(written)
        facts = _facts(model, written)
    return Trace([], [], [], [], {"model": facts, "torch": torch.__version__})


def _built(written: dict[str, Any]) -> Any:
    """Return the model; without what sees and hears where that needs packages that are not there."""
    config = config_of(written)
    kind = kind_of(config, written, FineTune())
    if config.is_encoder_decoder or not kind.can_generate():
        raise StandInError(f"{kind.__name__} is no decoder that continues a text")
    try:
        return _on_meta(kind, config)
    except ImportError:
        text = config.get_text_config(decoder=True)
        alone = transformers.AutoModelForCausalLM._model_mapping.get(type(text), None)
        if alone is None or text is config:
            raise
        return _on_meta(alone, text)


def _on_meta(kind: Any, config: Any) -> Any:
    with torch.device("meta"), no_init_weights():
        model = kind(config)
        model.tie_weights()
    return model.eval().to(torch.bfloat16)  # kernels of experts take no other


def _facts(model: Any, written: dict[str, Any]) -> dict[str, Any]:
    config = model.config.get_text_config(decoder=True)
    decoder = model.get_decoder()
    base = next(name for name, module in model.named_modules() if module is decoder)
    path, layers = _layers(decoder)
    parts: list[list[Part]] = [[] for _ in layers]
    outside: list[Part] = []
    input_table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    experts, tower = _number(config, EXPERTS), 0
    for name, parameter in model.named_parameters():
        inner = name.removeprefix(f"{base}.") if base else name
        layer, _, rest = inner.removeprefix(f"{path}.").partition(".")
        inside = inner != name or not base
        if inside and inner.startswith(f"{path}.") and layer.isdigit():
            parts[int(layer)].append((rest, tuple(parameter.shape), _role(rest, parameter, experts)))
        elif parameter is input_table or (inside and inner.endswith(("embeddings.weight", "per_layer.weight"))):
            outside.append((name, tuple(parameter.shape), "embedding"))
        elif head is not None and any(parameter is each for each in head.parameters()):
            outside.append((name, tuple(parameter.shape), "head" if parameter.dim() > 1 else "bias"))
        elif inside:
            outside.append((name, tuple(parameter.shape), "linear" if parameter.dim() > 1 else "norm"))
        else:
            tower += parameter.numel()
    kinds, numbers, sliding, window = _kinds(parts, _caches(model, len(layers)))
    rows, width = input_table.shape
    outside += [("tower", (tower,), "vision")] if tower else []
    has_experts = any(role == "expert" for layer in parts for *_, role in layer)
    taken = _number(config, TAKEN)
    if has_experts and not taken:
        raise StandInError("how many experts a token uses does not stand in its config")
    heads = _number(config, ("num_attention_heads", "n_head"), 1)
    return {
        "model_type": str(written["model_type"]), "n_layer": len(layers), "n_embd": width, "n_head": heads,
        "n_kv_head": _number(config, ("num_key_value_heads",), heads), "vocab_size": rows,
        "head_dim": _number(config, ("head_dim", "v_head_dim"), max(1, width // heads)),
        "mlp_width": _number(config, ("intermediate_size", "ffn_hidden_size", "n_inner"), 4 * width),
        "max_positions": min(_number(config, POSITIONS, MOST_POSITIONS), MOST_POSITIONS),
        "tied": head is None or head.weight is input_table, "sliding_window": window, "sliding_layers": sliding,
        "n_expert": experts if has_experts else 0, "experts_per_token": taken if has_experts else 0,
        "expert_width": _number(config, ("moe_intermediate_size", "intermediate_size"), width) if has_experts else 0,
        "counted": {"kinds": kinds, "layers": numbers, "outside": outside},
    }  # fmt: skip


def _number(config: Any, names: Iterable[str], default: int = 0) -> int:
    values = []
    for name in names:
        with suppress(Exception):  # transformers' own, of what differs between layers
            values.append(getattr(config, name, None))
    values = [max(value) if isinstance(value, list | tuple) and value else value for value in values]
    return next((value for value in values if isinstance(value, int) and value > 0), default)


def _layers(decoder: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the list of a decoder's layers: that with most parameters."""
    lists = [(name, module) for name, module in decoder.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise StandInError("its layers are in no list")
    return max(lists, key=lambda each: sum(parameter.numel() for parameter in each[1].parameters()))


def _role(name: str, parameter: Tensor, experts: int) -> str:
    """Return what a layer's parameter is: kernels of convolutions are as small as norms are."""
    if parameter.dim() < 2 or "conv1d" in name or name.endswith("A_log"):
        return "bias" if name.endswith("bias") else "norm"
    if experts > 1 and parameter.shape[0] == experts and (parameter.dim() == 3 or ".experts." in name):
        return "expert"
    return "linear"


def _caches(model: Any, count: int) -> Iterator[tuple[float, int, int]]:
    """Yield numbers for each token, bytes of any text and the window of each layer."""
    short, long, longer = (_read(model, length) for length in (SHORT, LONG, LONGER))
    for layer in range(count):
        if layer >= len(longer):
            yield 0.0, 0, 0
            continue
        window = getattr(longer[layer], "sliding_window", None) or 0
        texts = (short, long, longer)
        first, before, after = (sum(t.numel() for t in _tensors(text[layer], states=False)) for text in texts)
        if window and window < LONG and after != before:  # such as the compressed texts of DeepSeek V4
            raise StandInError("some of its layers keep more of a text than a window, which is not counted")
        each = first / SHORT if window else (after - before) / (LONGER - LONG)
        yield each, sum(t.nbytes for t in _tensors(longer[layer], states=True)), int(window)


def _read(model: Any, length: int) -> list[Any]:
    """Return the cache of each layer after a text. Raises StandInError for a model that has none such."""
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    reason = "it has no cache of transformers'"
    for given in (lambda: {"past_key_values": DynamicCache(config=model.config)}, dict):
        try:
            found = model(input_ids=ids, use_cache=True, **given())
        except Exception as error:  # of the model's own code
            reason = next(iter(str(error).splitlines()), type(error).__name__)[:160]
            continue
        for value in found.values():
            if hasattr(value, "layers"):
                return list(value.layers)
    raise StandInError(f"its cache could not be counted ({reason})")


def _tensors(layer: Any, *, states: bool) -> list[Tensor]:
    kept = [value for name, value in vars(layer).items() if (name in STATES) == states and "window" not in name]
    return [leaf for leaf in tree_leaves(kept) if isinstance(leaf, Tensor)]


def _kinds(
    parts: list[list[Part]], caches: Iterator[tuple[float, int, int]]
) -> tuple[list[dict[str, Any]], list[int], tuple[int, ...], int]:
    """Return the kinds of layers, that of each, the layers with a window, and the longest window."""
    kinds: list[dict[str, Any]] = []
    numbers: list[int] = []
    windows: list[int] = []
    for parameters, (numbers_each, state_bytes, window) in zip(parts, caches, strict=True):
        kind = {"parameters": parameters, "token_numbers": numbers_each, "state_bytes": state_bytes}
        if kind not in kinds:
            kinds.append(kind)
        numbers.append(kinds.index(kind))
        windows.append(window)
    sliding = tuple(layer for layer, window in enumerate(windows) if window)
    return kinds, numbers, sliding, max(windows)
