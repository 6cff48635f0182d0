"""GPT-2's weights as others keep them: Hugging Face's names and orientation, other contexts and vocabularies.

The one form inside is nanoGPT's: names of its state dict, matrices out x in, the tied head left out. Hugging Face
keeps the four matrices of a block as Conv1D, in x out (transformers, pytorch_utils.py), and always has biases.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretrain.config.options import RunConfig
from foretrain.config.weights_file import canonical
from foretrain.model.shape import ModelShape

TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
TOKENS, POSITIONS = "transformer.wte.weight", "transformer.wpe.weight"


def read_weights(files: Sequence[str], shape: ModelShape, *, conv1d: bool) -> Iterator[tuple[str, Tensor]]:
    """(name, fp32 tensor on the CPU) of each parameter of `shape`, one at a time, cropped and padded to it.

    Raises SafetensorError and KeyError where the files are not what their headers said.
    """
    with ExitStack() as stack:
        where = {}
        for file in files:
            held: Any = stack.enter_context(safe_open(file, "pt"))
            names = list(held.keys())
            where |= {own: (held, name) for own, name in zip(canonical(dict.fromkeys(names)), names, strict=True)}
        for parameter in shape.parameters():
            held, name = where[parameter.name]
            tensor = held.get_tensor(name).float()
            if conv1d and name.endswith(TRANSPOSED):
                tensor = tensor.t()
            yield parameter.name, fit(parameter.name, tensor, parameter.shape)


def fit(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A weight in a model with a smaller context (positions cropped, as nanoGPT's) or a larger vocabulary.

    New rows of the embedding, which is the head too, are the mean row. Their logits are the mean logit, and a mean of
    exponentials is no less than the exponential of the mean, so that V rows grown to W raise the loss by ln(W/V) at
    most: 0.0009 nats from 50,257 to 50,304. Rows of zeros would have the logit 0, which may be far above all others.
    """
    if name == POSITIONS and shape[0] < len(tensor):
        return tensor[: shape[0]]
    if name == TOKENS and shape[0] > len(tensor):
        return torch.cat([tensor, tensor.mean(0, keepdim=True).expand(shape[0] - len(tensor), -1)])
    return _checked(name, tensor, shape)


def fit_moment(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A moment of AdamW for the same: cropped with its positions, zero for new rows."""
    if name == POSITIONS and shape[0] < len(tensor):
        return tensor[: shape[0]]
    if name == TOKENS and shape[0] > len(tensor):
        return torch.cat([tensor, tensor.new_zeros(shape[0] - len(tensor), shape[1])])
    return _checked(name, tensor, shape)


def _checked(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tensor.shape != shape:
        raise SafetensorError(f"{name} is {tuple(tensor.shape)} instead of {shape}")
    return tensor


def to_hugging_face(weights: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Weights as transformers' GPT2LMHeadModel names and turns them; zeros for the biases that a model has not."""
    made = {}
    biased = ModelShape(shape.n_layer, shape.n_head, shape.n_embd, shape.block_size, shape.vocab_size, bias=True)
    for parameter in biased.parameters():
        name = parameter.name
        if name in weights:
            tensor = weights[name].float()
        else:
            assert name.endswith(".bias")
            tensor = torch.zeros(parameter.shape)
        made[name] = (tensor.t() if name.endswith(TRANSPOSED) else tensor).contiguous()
    return made


def hugging_face_config(config: RunConfig, separator: int | None) -> dict[str, Any]:
    """config.json of a GPT2LMHeadModel that computes what this config's model does, exact GELU included."""
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
        "n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd, "n_inner": None,
        "n_positions": config.block_size, "vocab_size": config.vocab_size,
        "activation_function": "gelu", "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
        "attn_pdrop": config.dropout, "embd_pdrop": config.dropout, "resid_pdrop": config.dropout,
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
        "tie_word_embeddings": True, "use_cache": True, "dtype": "float32",
        "bos_token_id": separator, "eos_token_id": separator,
    }  # fmt: skip


def nanogpt_optimizer(
    weights: dict[str, Tensor], moments: dict[str, Tensor], config: RunConfig, rate: float, *, fused: bool
) -> dict[str, Any]:
    """The state dict of nanoGPT's AdamW: its two groups, in its order of parameters (model.py, configure_optimizers).

    `moments` are named kind/parameter, as in a checkpoint. Raises KeyError where one is lacking.
    """
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
