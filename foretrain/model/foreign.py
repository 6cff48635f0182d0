"""Weights in other formats. Hugging Face keeps a GPT-2 block's matrices as Conv1D, in x out (transformers,
pytorch_utils.py), and always has biases."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape, Parameter
from foretrain.config.weights_file import canonical
from foretrain.model.parts import opened


def read_weights(files: Sequence[str], shape: ModelShape, *, conv1d: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, fp32 tensor) of each parameter, fitted to `shape`. Raises SafetensorError, KeyError, ValueError."""
    with opened(files) as held:
        where = dict(zip(canonical(dict.fromkeys(held)), held.values(), strict=True))
        for parameter in shape.parameters():
            split = where[parameter.name]
            tensor = split.whole().float()
            if conv1d and split.name.endswith(shape.family.transposed):
                tensor = tensor.t()
            yield parameter.name, fit(parameter, tensor, shape)


def read_moments(files: Sequence[str | Path], shape: ModelShape) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (name, AdamW's step count and moments) of each parameter, fitted as its weights are."""
    with opened(files) as held:
        for parameter in shape.parameters():
            own = {kind: held[f"{kind}/{parameter.name}"].whole() for kind in ("step", "exp_avg", "exp_avg_sq")}
            yield parameter.name, {k: t if k == "step" else fit_moment(parameter, t, shape) for k, t in own.items()}


def fit(parameter: Parameter, tensor: Tensor, model: ModelShape) -> Tensor:
    """Fit a weight to a smaller context (cropped, as nanoGPT's) or a larger vocabulary: new rows are the mean row, so V
    rows grown to W raise the loss by at most ln(W/V) (Jensen); a row of zeros could have a logit far above all
    others."""
    return _fitted(parameter, tensor, model, lambda: tensor.mean(0, keepdim=True))


def fit_moment(parameter: Parameter, tensor: Tensor, model: ModelShape) -> Tensor:
    return _fitted(parameter, tensor, model, lambda: tensor.new_zeros(1, parameter.shape[1]))


def _fitted(parameter: Parameter, tensor: Tensor, model: ModelShape, new_row: Callable[[], Tensor]) -> Tensor:
    name, rows = parameter.name, parameter.shape[0]
    if name == model.family.positions and rows < len(tensor):
        return tensor[:rows]
    if name in model.family.tokens and rows > len(tensor):
        return torch.cat([tensor, new_row().expand(rows - len(tensor), -1)])
    return _checked(name, tensor, parameter.shape)


def _checked(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tensor.shape != shape:
        raise SafetensorError(f"{name} is {tuple(tensor.shape)} instead of {shape}")
    return tensor


def with_biases(weights: dict[str, Tensor], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, fp32 tensor) of each parameter in the model's order, with zeros for missing biases."""
    biased = ModelShape.of(shape.config.model_copy(update={"bias": True}))
    for parameter in biased.parameters():
        if parameter.name in weights:
            yield parameter.name, weights[parameter.name].float()
        else:
            assert parameter.name.endswith(".bias")
            yield parameter.name, torch.zeros(parameter.shape)


def to_hugging_face(weights: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    turned = shape.family.transposed
    return {
        name: (tensor.t() if name.endswith(turned) else tensor).contiguous()
        for name, tensor in with_biases(weights, shape)
    }


def nanogpt_optimizer(
    weights: dict[str, Tensor], moments: dict[str, Tensor], config: RunConfig, rate: float, *, fused: bool
) -> dict[str, Any]:
    """Return the state dict of nanoGPT's AdamW: its two groups, in its order. Raises KeyError for a missing moment."""
    names = [parameter.name for parameter in ModelShape.of(config).parameters()]
    named = {name: torch.nn.Parameter(weights[name]) for name in names}
    groups = [
        {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(config.beta1, config.beta2), fused=fused)
    for name, parameter in named.items() if moments else ():
        for kind in ("step", "exp_avg", "exp_avg_sq"):
            optimizer.state[parameter][kind] = moments[f"{kind}/{name}"]
    return optimizer.state_dict()
