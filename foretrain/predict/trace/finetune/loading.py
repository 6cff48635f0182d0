"""A model as transformers loads it: from_pretrained's own code, over weights that have shapes and no values.

No file is read: what a checkpoint would hold are its shapes, one tensor at a time, as a safetensors file gives them.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from foretrain.config.finetune.options import FineTune
from foretrain.predict.trace.traced import StandInError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Published:
    """A tensor of a checkpoint that is made when it is read, as safetensors' slices are."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def __getitem__(self, where: Any) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype)


def config_of(written: dict[str, Any]) -> Any:
    """transformers' config of a config.json. Raises StandInError where it knows no such model."""
    kind = str(written.get("model_type", ""))
    values = {name: value for name, value in written.items() if name not in ("model_type", "quantization_config")}
    try:
        config: Any = AutoConfig.for_model(kind, **values)
    except ValueError:
        raise StandInError(f"transformers knows no model_type {kind!r}") from None
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise StandInError(f"transformers has no model of {kind!r} that predicts the next token")
    return config


def dtype_of(written: dict[str, Any], tune: FineTune) -> torch.dtype:
    """The dtype that the weights are loaded in."""
    text = written.get("text_config")
    places = [written, *([text] if isinstance(text, dict) else [])]
    published = [place.get(key) for place in places for key in ("dtype", "torch_dtype")]
    name = next((str(found) for found in published if found), "float32") if tune.dtype == "auto" else tune.dtype
    return DTYPES.get(name.removeprefix("torch."), torch.float32)


def compute_dtype(dtype: torch.dtype, tune: FineTune) -> torch.dtype:
    """In which 4-bit weights are multiplied: that of autocast, else of the weights."""
    return HALF.get(tune.amp, dtype)


def loaded(written: dict[str, Any], tune: FineTune, device: torch.device) -> PreTrainedModel:
    """The model as from_pretrained leaves it; quantized ones are on the device, others on the host."""
    config, dtype = config_of(written), dtype_of(written, tune)
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    shapes = _published(kind, config, dtype)
    quantized: dict[str, Any] = {}
    if tune.method == "qlora":
        quantized = {"quantization_config": in_4_bits(tune, dtype), "device_map": {"": device}}
    return kind.from_pretrained(
        None, config=config, state_dict=shapes, dtype=dtype, attn_implementation=tune.attn, **quantized
    )


def in_4_bits(tune: FineTune, dtype: torch.dtype) -> BitsAndBytesConfig:
    """How a checkpoint in this dtype is quantized when it is loaded."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=tune.double_quant,
        bnb_4bit_compute_dtype=compute_dtype(dtype, tune),
    )


def _published(kind: Any, config: Any, dtype: torch.dtype) -> dict[str, Published]:
    """What a checkpoint of this model holds: each of its tensors, tied ones once."""
    with torch.device("meta"), no_init_weights():
        model = kind(copy.deepcopy(config))
        model.tie_weights()
    tied = set(model.all_tied_weights_keys)
    return {name: Published(tuple(t.shape), dtype) for name, t in model.state_dict().items() if name not in tied}
