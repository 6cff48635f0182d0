"""Stand-ins for bitsandbytes and files on fake tensors.

bitsandbytes: Params4bit cannot wrap a fake tensor, so a class with its behaviour replaces it; gemm_4bit is written out
as the card runs it (backends/cuda/ops.py: its own kernel for few rows, else the weight is dequantized and multiplied);
paged states are in managed memory, outside PyTorch's allocator. Files: their tensors are copied to the host one by one,
and dropped.
"""

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import accelerate.accelerator
import safetensors.torch
import torch
import transformers.modeling_utils
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter
from transformers import CONFIG_MAPPING, AutoConfig, BitsAndBytesConfig, PreTrainedModel, trainer_pt_utils
from transformers.initialization import no_init_weights

from foretrain.config.finetune.arguments import four_bit_arguments
from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.source import PROCESSOR
from foretrain.config.hub.source import dtype_of as published_dtype
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.traced import StandInError
from foretrain.predict.trace.tracer import Tracer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class CheckpointTensor:
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def __getitem__(self, where: Any) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype)


def config_of(written: dict[str, Any]) -> Any:
    """Return transformers' config of a config.json. Raises StandInError for an unknown model."""
    kind = str(written.get("model_type", ""))
    values = {
        name: value for name, value in written.items() if name not in ("model_type", "quantization_config", PROCESSOR)
    }
    if kind not in CONFIG_MAPPING:
        raise StandInError(f"transformers knows no model_type {kind!r}")
    return AutoConfig.for_model(kind, **values)


# Heads that are trained with labels, and those of a class for each row.
HEADS = ("CausalLM", "ImageTextToText", "MultimodalLM", "Seq2SeqLM", "MaskedLM", "SpeechSeq2Seq", "CTC")
CLASSES = ("SequenceClassification", "ImageClassification", "AudioClassification")


def kind_of(config: Any, written: dict[str, Any], tune: FineTune) -> Any:
    """Return the class of the model that is trained: the config's, if it has a loss on labels. Raises StandInError."""
    whole = HEADS[1:3] if config.sub_configs else ()  # before its part for text
    encodes = () if getattr(config, "is_decoder", False) else ("MaskedLM",)
    whole = ("Seq2SeqLM", "SpeechSeq2Seq") if config.is_encoder_decoder else (*whole, *encodes)
    kinds = [
        kind
        for head in (CLASSES if tune.scores else (*whole, *HEADS, *CLASSES[1:]))
        for kind in _classes_of(head, config)
        if "labels" in inspect.signature(kind.forward).parameters
    ]
    if not kinds:
        what = "scores sequences" if tune.scores else "is trained on labels of text, pictures or sound"
        raise StandInError(f"transformers has no model of {written.get('model_type')!r} that {what}")
    named = written.get("architectures") or ()
    return next((kind for kind in kinds if kind.__name__ in named), kinds[0])


def _classes_of(head: str, config: Any) -> tuple[Any, ...]:
    kinds = getattr(transformers, f"AutoModelFor{head}")._model_mapping.get(type(config), ())
    return kinds if isinstance(kinds, tuple) else (kinds,)


def dtype_of(written: dict[str, Any], tune: FineTune) -> torch.dtype:
    return DTYPES[published_dtype(written) if tune.dtype == "auto" else tune.dtype]


def compute_dtype(dtype: torch.dtype, tune: FineTune) -> torch.dtype:
    """Return the dtype of matmuls with 4-bit weights: that of autocast, else of the weights."""
    return HALF.get(tune.amp, dtype)


def loaded(written: dict[str, Any], tune: FineTune, device: torch.device) -> PreTrainedModel:
    """Return the model as from_pretrained leaves it; quantized ones are on the device, others on the host."""
    config, dtype = config_of(written), dtype_of(written, tune)
    if tune.scores:
        config.num_labels, text = tune.scores, config.get_text_config()
        if getattr(text, "pad_token_id", None) is None:  # without it there is one sequence in a batch
            text.pad_token_id = 0
    kind = kind_of(config, written, tune)
    attention = tune.attn if tune.attn != "sdpa" or kind._supports_sdpa else None  # transformers' own choice
    shapes = _checkpoint_tensors(kind, config, dtype)
    quantized: dict[str, Any] = {}
    if tune.method == "qlora":
        given = {**four_bit_arguments(tune), "bnb_4bit_compute_dtype": compute_dtype(dtype, tune)}
        four_bits = BitsAndBytesConfig(**given)
        quantized = {"quantization_config": four_bits, "device_map": {"": device}}
    return kind.from_pretrained(
        None, config=config, state_dict=shapes, dtype=dtype, attn_implementation=attention, **quantized
    )


def _checkpoint_tensors(kind: Any, config: Any, dtype: torch.dtype) -> dict[str, CheckpointTensor]:
    with torch.device("meta"), no_init_weights():
        model = kind(copy.deepcopy(config))
        model.tie_weights()
    tied = set(model.all_tied_weights_keys)
    return {name: CheckpointTensor(tuple(t.shape), dtype) for name, t in model.state_dict().items() if name not in tied}


LARGEST_CUSTOM_ROWS = 1536  # bitsandbytes 0.50, _gemm_4bit_custom_max_m


class Params4bit(FakeTensor):
    """bitsandbytes.nn.Params4bit over a fake tensor: 4-bit values once it is sent to a device."""

    OWN: ClassVar[dict[str, Any]] = {
        "quant_state": None, "blocksize": 64, "compress_statistics": True, "quant_type": "fp4",
        "quant_storage": torch.uint8, "module": None, "bnb_quantized": False,
    }  # fmt: skip

    def __new__(cls, data: Tensor | None = None, requires_grad: bool = False, **given: Any) -> "Params4bit":
        self: Any = (torch.empty(0) if data is None else data).detach()
        self.__class__ = cls
        self._is_param = True
        self.requires_grad_(requires_grad)
        for name, usual in cls.OWN.items():
            found = given.get(name)
            setattr(self, name, usual if found is None else found)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def _as(self: Any, data: Tensor, quant_state: Any, *, quantized: bool) -> "Params4bit":
        own = {name: getattr(self, name) for name in self.OWN}
        return Params4bit(data, self.requires_grad, **{**own, "quant_state": quant_state, "bnb_quantized": quantized})

    def to(self: Any, *args: Any, **kwargs: Any) -> "Params4bit":
        """Quantize, unless it goes to meta or is so already; then move."""
        parsed: Any = vars(torch._C)["_nn"]._parse_to
        device, dtype, non_blocking, _ = parsed(*args, **kwargs)
        functional = importlib.import_module("bitsandbytes.functional")
        if device is None or device.type == "meta" or self.bnb_quantized:
            if self.quant_state is not None:
                self.quant_state.to(device)
            moved = self.detach().to(device=device, dtype=dtype, non_blocking=non_blocking)
            return self._as(moved, self.quant_state, quantized=self.bnb_quantized)
        data, state = functional.quantize_4bit(
            self.detach().contiguous().to(device), blocksize=self.blocksize, quant_storage=self.quant_storage,
            compress_statistics=self.compress_statistics, quant_type=self.quant_type,
        )  # fmt: skip
        if self.module is not None:
            self.module.quant_state = state
        return self._as(data, state, quantized=True)

    def cuda(self, device: Any = None, non_blocking: bool = False) -> "Params4bit":  # type: ignore[override]
        return self.to(device="cuda" if device is None else device, non_blocking=non_blocking)

    def cpu(self) -> "Params4bit":  # type: ignore[override]
        return self.to(device="cpu")


@contextmanager
def written_to_host() -> Iterator[None]:
    """Leave files empty: their tensors are copied to the host, one after the other, and dropped."""

    def write(tensors: Any, *args: Any, **kwargs: Any) -> None:
        for tensor in tree_iter(tensors):
            if isinstance(tensor, Tensor) and tensor.device.type != "cpu":
                tensor.detach().cpu()

    peft_model: Any = sys.modules.get("peft.peft_model")
    with Patches() as patches:
        patches.set(torch, "save", write)
        patches.set(safetensors.torch, "save_file", write)
        places = (transformers.modeling_utils, *([peft_model] if peft_model else []))
        patches.set_everywhere(places, "safe_save_file", write)
        yield


@contextmanager
def stood_in(tracer: Tracer, *, card: bool) -> Iterator[None]:
    """Let bitsandbytes work on fake tensors, and keep no logits on the host. `card`: its kernels, else the CPU's."""
    with Patches() as patches:
        _patch_shared_memory(patches)
        patches.set(torch, "tensor", _fake_on_meta(torch.tensor))
        # it asks for the lengths in all processes, which are values: of one process it pads nothing
        patches.set(accelerate.accelerator, "pad_across_processes", lambda tensors, *args, **kwargs: tensors)
        # numbers on the host would fill this machine's memory: the first batch stands for all
        patches.set(trainer_pt_utils, "numpy_pad_and_concatenate", lambda first, second, padding_index=-100: first)
        if "bitsandbytes" in sys.modules:
            _bitsandbytes(patches, tracer, card=card)
        yield


def _fake_on_meta(tensor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        found = tensor(_numbers(data), *args, **kwargs)
        if found.device.type != "meta" or isinstance(found, FakeTensor):
            return found
        return torch.empty(found.shape, dtype=found.dtype, device="meta")

    return made


def _numbers(data: Any) -> Any:
    """Return lists with the numbers of fake tensors in their place, whose memory torch.tensor would read."""
    if isinstance(data, list | tuple):
        return [each.tolist() if isinstance(each, FakeTensor) else _numbers(each) for each in data]
    return data


def _patch_shared_memory(patches: Patches) -> None:
    """Compare tensors by their storages: the address of a fake one is always 0."""

    def storage(tensor: Tensor) -> tuple[torch.device, int, int]:
        return tensor.device, tensor.untyped_storage()._cdata, tensor.nbytes

    for name in ("transformers.modeling_utils", "peft.peft_model"):
        patches.set_everywhere((sys.modules.get(name),), "id_tensor_storage", storage)
    hub: Any = sys.modules.get("huggingface_hub.serialization._torch")
    patches.set_everywhere((hub,), "storage_ptr", lambda tensor: tensor.untyped_storage()._cdata)


def _bitsandbytes(patches: Patches, tracer: Tracer, *, card: bool) -> None:
    names = ("nn", "nn.modules", "functional", "optim.optimizer", "backends.default.ops")
    nn, modules, functional, _, default = (importlib.import_module(f"bitsandbytes.{name}") for name in names)
    patches.set_everywhere((nn, modules), "Params4bit", Params4bit)
    patches.set(functional, "name2qmap", {})  # tensors of this trace
    run = getattr(default, "_gemm_4bit_default_impl", None)
    if run is not None:
        own = _own_kernel() if card else lambda *shape: False
        ops = torch.ops.bitsandbytes
        composed = {
            ops.dequantize_4bit.default: _dequantized, ops.dequantize_blockwise.default: _bytes_dequantized
        }  # fmt: skip
        if card:
            composed |= {ops.quantize_4bit.default: _quantized, ops.quantize_blockwise.default: _bytes_quantized}
            if hasattr(importlib.import_module("bitsandbytes.backends.cuda.ops"), "_dequant_linear_fallback"):
                run = _dequantized_and_multiplied
        composed[ops.gemm_4bit.default] = _gemm(run, own)
        patches.set(tracer, "composed", {**tracer.composed, **composed})

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        paged: Any = torch.empty(shape, dtype=dtype, device="cpu")
        paged.is_paged, paged.page_deviceid = True, 0
        tracer.paged_bytes += paged.nbytes
        return paged

    patches.set(functional, "get_paged", get_paged)
    for name in ("prefetch_tensor", "elementwise_func"):  # of paged tensors, by kernels of the card
        patches.set(functional, name, lambda *args, **kwargs: None)


def _quantized(a: Tensor, blocksize: int, kind: str, storage: torch.dtype) -> tuple[Tensor, Tensor]:
    """Make what the card's kernel allocates (backends/cuda/ops.py): scales come first."""
    absmax = torch.empty(-(-a.numel() // blocksize), dtype=torch.float32, device=a.device)
    return torch.empty(((a.numel() + 1) // (2 * storage.itemsize), 1), dtype=storage, device=a.device), absmax


def _bytes_quantized(a: Tensor, code: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    absmax = torch.empty(-(-a.numel() // blocksize), dtype=torch.float32, device=a.device)
    return torch.empty_like(a, dtype=torch.uint8), absmax


def _dequantized(a: Tensor, absmax: Tensor, blocksize: int, kind: str, shape: Any, dtype: torch.dtype) -> Tensor:
    """Make all that the kernel allocates. Written out, since torch caches no results of others' fake kernels."""
    return torch.empty(tuple(shape), dtype=dtype, device=a.device)


def _bytes_dequantized(a: Tensor, absmax: Tensor, code: Tensor, blocksize: int, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(a, dtype=dtype)


def _dequantized_and_multiplied(
    a: Tensor,
    b: Tensor,
    shape: Any,
    absmax: Tensor,
    blocksize: int,
    kind: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """_dequant_linear_fallback of backends/cuda/ops.py: unpacked scales live until the result is made."""
    if absmax_8bit is not None and absmax_offset is not None:
        scales = torch.empty_like(absmax_8bit, dtype=torch.float32)
        absmax = scales + absmax_offset  # noqa: F841  # it is held, too
    weight = torch.empty(tuple(shape), dtype=a.dtype, device=a.device)
    return torch.nn.functional.linear(a, weight, bias)


def _own_kernel() -> Callable[[torch.dtype, int, int, int], bool]:
    """Return whether bitsandbytes has a kernel for (dtype, rows, N, K) on this card without a dequantized weight."""
    cuda: Any = importlib.import_module("bitsandbytes.backends.cuda.ops")
    decide: Any = getattr(cuda, "_gemm_4bit_use_custom_fn", None)
    properties: Any = getattr(cuda, "_gpu_dispatch_props", None)
    most = getattr(cuda, "_gemm_4bit_custom_max_m", LARGEST_CUSTOM_ROWS)
    for cached in (decide, properties):  # of another card
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    return lambda dtype, rows, n, k: rows <= most and decide is not None and decide(0, dtype, rows, n, k)


def _gemm(run: Callable[..., Tensor], own: Callable[[torch.dtype, int, int, int], bool]) -> Callable[..., Tensor]:
    def gemm_4bit(a: Tensor, b: Tensor, shape: Any, absmax: Tensor, blocksize: int, *rest: Any, **more: Any) -> Tensor:
        n, k = shape
        if k % blocksize == 0 and own(a.dtype, a.numel() // k, n, k):
            a = a.contiguous()
            return torch.empty((*a.shape[:-1], n), dtype=a.dtype, device=a.device)
        return run(a, b, shape, absmax, blocksize, *rest, **more)

    return gemm_4bit
