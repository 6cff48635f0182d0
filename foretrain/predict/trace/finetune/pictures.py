"""The pictures in a batch: what the processor of the model's type makes of blank ones, and how many tokens they are.

The processor's own code runs, with the defaults of its class and what config.json says of them. The model's own code
counts the tokens, on tensors without values.
"""

import contextlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves
from transformers.initialization import no_init_weights

from foretrain.config.finetune.options import FineTune
from foretrain.predict.trace.finetune import standins
from foretrain.predict.trace.kernels.values import Known
from foretrain.predict.trace.session import tracing
from foretrain.predict.trace.traced import StandInError
from foretrain.predict.trace.tracer import Tracer

BACKENDS = ("pil", "torchvision")  # the first makes the same shapes and needs no package beside
# Types whose processor is in their published files alone, and that of which type it is.
LIKE = {"qwen3_vl_moe": "qwen3_vl", "glm4v_moe": "glm4v"}
SPELLED: Mapping[str, str] = {
    "merge_size": "spatial_merge_size",
    "encoder_patch_size": "patch_size",
    "max_image_tiles": "max_num_tiles",
}
TOKEN = ("image_token_id", "image_token_index")
MARKS = ("mm_token_type_ids", "token_type_ids")  # 1 where a token is part of a picture


@dataclass(frozen=True)
class Pictures:
    """The pictures of one row. `inputs`: what they are for the model; `token`: what stands for a part of one."""

    inputs: Mapping[str, np.ndarray]
    marks: tuple[str, ...]
    token: int
    count: int
    tokens: int
    processor: str

    def facts(self) -> dict[str, Any]:
        return {"pictures": {"count": self.count, "tokens": self.tokens, "processor": self.processor}}

    def batch(self, tracer: Tracer, shape: tuple[int, int], *, padded: bool) -> dict[str, Tensor]:
        """Return the inputs of so many rows of so many tokens: each row begins with its pictures."""
        rows, length = shape
        each = self.tokens // self.count
        ids, mask = np.full((1, length), int(self.token == 0)), np.ones((1, length), dtype=np.int64)
        for start in range(1, self.count * (each + 1), each + 1):
            ids[:, start : start + each] = self.token
        mask[:, length - padded :] = 0
        marks = dict.fromkeys(self.marks, (ids == self.token).astype(np.int64))
        row = {"input_ids": ids, "attention_mask": mask, **marks, **self.inputs}
        return {name: filled(tracer, array, rows) for name, array in row.items()}


def filled(tracer: Tracer, array: np.ndarray, rows: int = 1) -> Tensor:
    """Return the tensor of so many equal rows. A trace knows its values, of pixels that none is 0 as padding is."""
    shape = (rows * array.shape[0], *array.shape[1:])
    with no_dispatch():
        values = torch.from_numpy(array)
    found = torch.empty(shape, dtype=values.dtype)
    if not isinstance(found, FakeTensor):
        return found.view(rows, *array.shape).copy_(values).view(shape)
    reals = tracer.know_values()
    if values.dtype.is_floating_point:
        tracer.values.learn(found, Known(1.0, certain=True))
    else:
        with no_dispatch():
            values = values.expand(rows, *array.shape).reshape(shape)
        reals.hold(found, values)
    return found


def pictures_of(written: dict[str, Any], tune: FineTune) -> Pictures:
    """Return the pictures of a row. Raises StandInError where they cannot be made, or are more than a row."""
    found = _made(json.dumps(written, sort_keys=True), tune.model_copy(update={"seq_len": 1}).model_dump_json())
    if found.tokens + found.count > tune.seq_len:
        raise StandInError(f"the pictures of a row are {found.tokens} tokens, and --seq-len is {tune.seq_len}")
    return found


@lru_cache(maxsize=8)
def _made(written: str, options: str) -> Pictures:
    tune, values = FineTune.model_validate_json(options), json.loads(written)
    config = standins.config_of(values)
    kind = standins.kind_of(config, values, tune)
    token = next((value for name in TOKEN if (value := getattr(config, name, None)) is not None), None)
    taken = inspect.signature(kind.forward).parameters
    if token is None or "pixel_values" not in taken or not hasattr(kind, "get_image_features"):
        raise StandInError(f"{kind.__name__} puts no pictures among the tokens of a row")
    processor, more = _processor(config)
    blank = Image.new("RGB", (tune.image_size, tune.image_size))
    asked = {*taken, *inspect.signature(kind.get_image_features).parameters, "spatial_shapes"}

    def made(count: int) -> dict[str, np.ndarray]:
        found = processor(images=[[blank] * count], **{**more, "return_tensors": "np"})
        return {name: value for name, value in found.items() if name in asked and isinstance(value, np.ndarray)}

    tokens = tune.images * _counted(kind, config, made(1))
    marks = tuple(name for name in MARKS if name in taken)
    return Pictures(made(tune.images), marks, token, tune.images, tokens, type(processor).__name__)


def _processor(config: Any) -> tuple[Any, dict[str, Any]]:
    """Return the processor of pictures of a model, and what the model's processor of all inputs asks of it."""
    auto: Any = transformers.models.auto
    tower, own = getattr(config, "vision_config", None), str(config.model_type)
    own = "pixtral" if getattr(tower, "model_type", "") == "pixtral" else LIKE.get(own, own)
    names = auto.image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES.get(own) or {}
    more, reason = {}, "transformers names none"
    with contextlib.suppress(ImportError):
        whole = getattr(transformers, auto.processing_auto.PROCESSOR_MAPPING_NAMES.get(config.model_type) or "", None)
        more = dict(getattr(whole, "images_kwargs", None) or {})
    for name in filter(None, map(names.get, BACKENDS)):
        kind: Any = getattr(transformers, name)
        try:
            return kind(**_facts(kind, config)), more
        except ImportError as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), "")
    raise StandInError(f"the image processor of {config.model_type} cannot be made: {reason}")


def _facts(kind: Any, config: Any) -> dict[str, Any]:
    """Return what a config says of the processor's attributes."""
    vision = getattr(config, "vision_config", None) or config
    found: dict[str, Any] = {}
    names: set[str] = {name for base in kind.__mro__ for name in vars(base) if name[0] != "_"}
    for name in names:
        default, spelled = getattr(kind, name, None), SPELLED.get(name, name)
        value = getattr(config, spelled, getattr(vision, spelled, None))
        if name == "patch_size" and kind.__name__.startswith("Pixtral"):  # as its processor of all inputs asks
            value = getattr(vision, name, 16) * getattr(config, "spatial_merge_size", 1)
        if type(value) is int and isinstance(default, dict):
            value = dict.fromkeys(default, value)
        if value is not None and type(value) is type(default) and not callable(default):
            found[name] = value
    side = getattr(vision, "image_size", None)
    side = side[0] if isinstance(side, list | tuple) else side
    size = getattr(kind, "size", None)
    if side and isinstance(size, dict) and {*size} != {"shortest_edge", "longest_edge"}:
        most = getattr(kind, "max_image_size", None)  # of the parts that a picture is split into
        found["size"] = dict.fromkeys(size, side if most is None else side * max(size.values()) // max(most.values()))
        found |= {} if most is None else {"max_image_size": dict.fromkeys(most, side)}
        if isinstance(crop := getattr(kind, "crop_size", None), dict):
            found["crop_size"] = dict.fromkeys(crop, side)
    return found


def _counted(kind: Any, config: Any, inputs: Mapping[str, np.ndarray]) -> int:
    """Return how many tokens of a row the model makes of pictures."""
    with tracing(None, compiled=False) as session, no_init_weights():
        model = kind(config).eval()
        given = {name: filled(session.tracer, array) for name, array in inputs.items()}
        with torch.no_grad():
            found = model.get_image_features(**given)
        found = getattr(found, "pooler_output", found)
        return sum(tensor.shape[:-1].numel() for tensor in tree_leaves(found) if isinstance(tensor, Tensor))
