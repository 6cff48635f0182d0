"""What a batch has beside the tokens of a decoder: pictures, sound, and what an encoder takes. The processor's own code
runs on blank ones, by preprocessor_config.json, else by its class's defaults and config.json."""

import contextlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
from foretrain.config.hub.source import PROCESSOR
from foretrain.predict.trace.finetune import standins
from foretrain.predict.trace.kernels.values import Known
from foretrain.predict.trace.session import tracing
from foretrain.predict.trace.traced import StandInError
from foretrain.predict.trace.tracer import Tracer

BACKENDS = ("pil", "torchvision")  # the first makes the same shapes and needs no package beside
# Types whose processor is in their published files alone, and that of which type it is.
LIKE = {"qwen3_vl_moe": "qwen3_vl", "glm4v_moe": "glm4v", "dinov2_with_registers": "dinov2"}
SPELLED: Mapping[str, str] = {
    "merge_size": "spatial_merge_size",
    "encoder_patch_size": "patch_size",
    "max_image_tiles": "max_num_tiles",
    "feature_size": "num_mel_bins",
}
TOKEN = ("image_token_id", "image_token_index")
TOWERS = ("vision_config", "audio_config", "encoder_config")
MARKS = ("mm_token_type_ids", "token_type_ids")  # 1 where a token is part of a picture
PLAIN = ("input_ids", "attention_mask")
SOUND_S = 30  # of a row; Whisper's processor makes all sounds as long


@dataclass(frozen=True)
class Inputs:
    """What a row is for a model. `text`: names of what it has for each token; `fields`: its pictures or sound; `token`:
    what stands for a part of a picture in the text; `classifies`: whether each row has one label; `target`: whether a
    decoder takes ids of its own; `label`: of each token, other than padding's."""

    kind: str
    text: tuple[str, ...]
    classifies: bool
    target: bool
    label: int = 0
    fields: Mapping[str, np.ndarray] = field(default_factory=dict)
    processor: str = ""
    marks: tuple[str, ...] = ()
    token: int = -1
    count: int = 0
    tokens: int = 0

    def facts(self) -> dict[str, Any]:
        if self.tokens:
            return {"pictures": {"count": self.count, "tokens": self.tokens, "processor": self.processor}}
        sizes = [f"{name} ({' x '.join(map(str, array.shape[1:]))})" for name, array in self.fields.items()]
        names = [*self.text, *sizes, *(["decoder_input_ids"] if self.target else [])]
        return {"rows": {"kind": self.kind, "inputs": ", ".join(names)}}

    def batch(self, tracer: Tracer, shape: tuple[int, int], *, padded: bool) -> dict[str, Tensor]:
        """Return the inputs of so many rows of so many tokens: each row begins with its pictures."""
        rows, length = shape
        each = self.tokens // max(1, self.count)
        ids, mask = np.full((1, length), int(self.token == 0)), np.ones((1, length), dtype=np.int64)
        for start in range(1, self.count * (each + 1), each + 1):
            ids[:, start : start + each] = self.token
        mask[:, length - padded :] = 0
        values: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        values |= dict.fromkeys(self.marks, (ids == self.token).astype(np.int64))
        row = {name: values.get(name, np.zeros_like(ids)) for name in (*self.text, *self.marks)}
        found = {name: filled(tracer, array, rows) for name, array in {**row, **self.fields}.items()}
        found["labels"] = torch.full(shape[: 1 if self.classifies else 2], self.label)
        if self.target:
            found["decoder_input_ids"] = torch.zeros(shape, dtype=torch.int64)
        return found


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


def inputs_of(written: dict[str, Any], tune: FineTune) -> Inputs | None:
    """Return what the rows of this model are, None where they are tokens alone. Raises StandInError where they cannot
    be made, or a row's pictures are more than it."""
    if tune.preferences:
        return None
    found = _made(json.dumps(written, sort_keys=True), tune.model_copy(update={"seq_len": 1}).model_dump_json())
    if found and found.tokens and found.tokens + found.count > tune.seq_len:
        longer = f"give --seq-len {found.tokens + found.count + 1} or more"
        raise StandInError(
            f"the pictures of a row are {found.tokens} tokens, and --seq-len is {tune.seq_len}: {longer}"
        )
    return found


@lru_cache(maxsize=8)
def _made(written: str, options: str) -> Inputs | None:
    tune, values = FineTune.model_validate_json(options), json.loads(written)
    config = standins.config_of(values)
    kind = standins.kind_of(config, values, tune)
    taken = inspect.signature(kind.forward).parameters
    needed = {kind.main_input_name, *(name for name, each in taken.items() if each.default is each.empty)}
    text, classifies = _text(config, taken, needed), kind.__name__.endswith("Classification")
    # as DataCollatorForSeq2Seq makes them; Whisper's recipe leaves them to the model
    target = config.is_encoder_decoder and bool(text) and not classifies
    label = int(kind.__name__.endswith("CTC") and not config.pad_token_id)
    found = Inputs(kind.__name__, text, classifies=classifies, target=target, label=label)
    if tune.images and "pixel_values" not in taken:
        raise StandInError(f"{found.kind} takes no pictures")
    if {"input_features", "input_values"} & needed:
        return _with_sound(found, config, values.get(PROCESSOR), taken)
    if tune.images or needed - {*found.text, "self", "kwargs"}:
        return _with_pictures(found, kind, config, values.get(PROCESSOR), tune)
    plain = {*found.text} == {*PLAIN} and (tune.scores or not classifies)
    return found if found.target or not plain else None


def _text(config: Any, taken: Mapping[str, Any], needed: set[str]) -> tuple[str, ...]:
    """Return what the tokenizer of the model's type makes for each token, that the model takes."""
    if "input_ids" not in taken:
        return ()
    names, tokenizer = list(PLAIN), transformers.models.auto.tokenization_auto.TOKENIZER_MAPPING_NAMES
    with contextlib.suppress(ImportError):
        names += getattr(getattr(transformers, tokenizer.get(config.model_type) or "", None), "model_input_names", [])
    names += sorted(name for name in needed if name.endswith("input_ids"))
    return tuple(dict.fromkeys(name for name in names if name in taken))


def _with_sound(row: Inputs, config: Any, given: Any, taken: Mapping[str, Any]) -> Inputs:
    auto: Any = transformers.models.auto
    names = auto.feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES
    kind = getattr(transformers, names.get(config.model_type) or "", None)
    if kind is None:
        raise StandInError(f"transformers names no processor of sound for {config.model_type}")
    processor = _built(kind, config, given)
    silence = np.zeros(SOUND_S * processor.sampling_rate, dtype=np.float32)
    more = {name: value for name, value in _asked(config, "audio_kwargs").items() if name == "return_attention_mask"}
    found = processor(silence, sampling_rate=processor.sampling_rate, **more, return_tensors="np")
    fields = {name: np.asarray(value) for name, value in found.items() if name in taken}
    return replace(row, fields=fields, processor=kind.__name__)


def _with_pictures(row: Inputs, kind: Any, config: Any, given: Any, tune: FineTune) -> Inputs:
    taken = inspect.signature(kind.forward).parameters
    token = next((value for name in TOKEN if (value := getattr(config, name, None)) is not None), None)
    counts = getattr(kind, "get_image_features", None)
    if token is not None and not counts:
        raise StandInError(f"{row.kind} puts no pictures among the tokens of a row")
    if token is None and counts and row.text and any(name in vars(config) for name in TOKEN):
        raise StandInError(f"its config.json has no {TOKEN[0]}, which stands for a picture in the text of {row.kind}")
    if token is None and tune.images > 1:
        raise StandInError(f"a row of {row.kind} has one picture")
    processor, more = _processor(config, given)
    blank, count = Image.new("RGB", (tune.image_size, tune.image_size)), max(1, tune.images)
    asked = {*taken, *(inspect.signature(counts).parameters if counts else ()), "spatial_shapes"}

    def made(count: int) -> dict[str, np.ndarray]:
        found = processor(images=[[blank] * count], **{**more, "return_tensors": "np"})
        return {name: value for name, value in found.items() if name in asked and isinstance(value, np.ndarray)}

    row = replace(row, fields=made(count), processor=type(processor).__name__)
    if token is None:
        return row
    marks = tuple(name for name in MARKS if name in taken)
    tokens = count * _counted(kind, config, made(1))
    return replace(row, marks=marks, token=token, count=count, tokens=tokens)


def _processor(config: Any, given: Any) -> tuple[Any, dict[str, Any]]:
    """Return the processor of pictures of a model, and what the model's processor of all inputs asks of it."""
    auto: Any = transformers.models.auto
    tower, own = getattr(config, "vision_config", getattr(config, "encoder", None)), str(config.model_type)
    own = "pixtral" if getattr(tower, "model_type", "") == "pixtral" else LIKE.get(own, own)
    known = auto.image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES
    names = known.get(own) or known.get(getattr(tower, "model_type", "")) or {}
    more, reason = _asked(config, "images_kwargs"), "transformers names none"
    for name in filter(None, map(names.get, BACKENDS)):
        try:
            return _built(getattr(transformers, name), config, given), more
        except ImportError as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), "")
    raise StandInError(f"the image processor of {config.model_type} cannot be made: {reason}")


def _asked(config: Any, of: str) -> dict[str, Any]:
    """Return what a model's processor of all inputs asks of the one of pictures or sound."""
    auto: Any = transformers.models.auto
    names = auto.processing_auto.PROCESSOR_MAPPING_NAMES
    with contextlib.suppress(ImportError):
        return dict(getattr(getattr(transformers, names.get(config.model_type) or "", None), of, None) or {})
    return {}


def _built(kind: Any, config: Any, given: Any) -> Any:
    """Return a processor as its published file says, else as its class and the model's config do."""
    return kind.from_dict(given) if given else kind(**_facts(kind, config))


def _facts(kind: Any, config: Any) -> dict[str, Any]:
    """Return what a config says of the processor's attributes."""
    vision = next((part for name in TOWERS if (part := getattr(config, name, None))), config)
    found: dict[str, Any] = {}
    defaults = {name: getattr(kind, name, None) for base in kind.__mro__ for name in vars(base) if name[0] != "_"}
    defaults |= {name: each.default for name, each in inspect.signature(kind).parameters.items()}
    for name, default in defaults.items():
        spelled = SPELLED.get(name, name)
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
        asked = inspect.signature(kind.get_image_features).parameters.values()
        texts = [each.name for each in asked if each.name.endswith("input_ids") and each.default is each.empty]
        inputs = {**inputs, **{name: np.zeros((1, 1), dtype=np.int64) for name in texts}}
        given = {name: filled(session.tracer, array) for name, array in inputs.items()}
        with torch.no_grad():
            found = model.get_image_features(**given)
        found = getattr(found, "pooler_output", found)
        return sum(tensor.shape[:-1].numel() for tensor in tree_leaves(found) if isinstance(tensor, Tensor))
