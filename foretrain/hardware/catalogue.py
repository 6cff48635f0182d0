"""What a run is planned for: a card of the catalogue `gpus.toml`, the card in this machine, or its CPU.

An unknown card is an error that names the nearest ones, and for the card of this machine prints the block to fill in;
it is never taken for an A100.
Such blocks may stand in a file of the user's own: `--gpu-file FILE`, or FORETRAIN_GPU_FILE.
"""

import difflib
import os
import re
import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from foretrain.base.errors import UserError
from foretrain.base.quantities import parse_bytes, read
from foretrain.base.records import Record
from foretrain.base.safe_read import parse_toml, read_text
from foretrain.base.units import GIB, MIB
from foretrain.hardware.calibration import Calibration, load
from foretrain.hardware.card import Cards

USUAL_L2_MIB = 32

Dtype = Literal["float32", "bfloat16", "float16"]
MatmulMode = Literal["dtype", "fp8", "int8", "fp16_accumulation"]
GPU_FILE_VARIABLE = "FORETRAIN_GPU_FILE"
MOST_OWN_BYTES = 1 << 20
NANOGPT_PEAK_FLOP_PER_S = 312e12  # karpathy/nanoGPT model.py estimate_mfu: an A100's bfloat16, for every card


class Gpu(Record):
    """A device to plan for. Rates are in the catalogue's vendor units; methods give base units.

    `kind` is cuda, mps or cpu. Tensor figures are dense. `source` says where the figures are from.
    """

    name: str
    kind: Literal["cuda", "mps", "cpu"] = "cuda"
    aliases: tuple[str, ...] = ()
    architecture: str = ""
    compute_capability: str = ""
    sm_count: int | None = None
    boost_clock_ghz: float | None = None
    lowest_boost_clock_ghz: float | None = None
    fp32_clock_ghz: float | None = None
    fp16_flop_per_clock_per_sm: int | None = None
    fp32_flop_per_clock_per_sm: int | None = None
    memory_gib: float | None = None
    l2_mib: float | None = None
    memory_bus_bits: int | None = None
    memory_gbps_per_pin: float | None = None
    bandwidth_gb_per_s: float | None = None
    fp16_dense_tflops: float | None = None
    fp16_acc16_dense_tflops: float | None = None
    bf16_dense_tflops: float | None = None
    tf32_dense_tflops: float | None = None
    fp8_dense_tflops: float | None = None
    fp32_tflops: float | None = None
    board_power_w: float | None = None
    lowest_board_power_w: float | None = None
    source: str = ""
    # What was measured on this very device; not written out with a plan, which holds what follows from it.
    calibration: Calibration | None = Field(default=None, exclude=True, repr=False)

    @property
    def memory_bytes(self) -> int | None:
        """Memory of the device; None where the catalogue cannot know it (unified memory)."""
        return round(self.memory_gib * GIB) if self.memory_gib else None

    @property
    def cache_bytes(self) -> int:
        """Its L2 cache; where nobody has said it, what is usual."""
        return round((self.l2_mib or USUAL_L2_MIB) * MIB)

    @property
    def capability(self) -> tuple[int, int]:
        """(8, 9) for compute capability 8.9; (0, 0) where there is none."""
        major, _, minor = self.compute_capability.partition(".")
        return (int(major), int(minor)) if major else (0, 0)

    @property
    def reserves(self) -> bool:
        """Whether PyTorch's allocator there says what it reserved, as it does on cards and Apple's GPUs."""
        return self.kind != "cpu"

    @property
    def is_laptop(self) -> bool:
        """A part that is built into a laptop: nobody can buy it as a card."""
        return "Laptop" in self.name

    @property
    def is_geforce(self) -> bool:
        """A card that NVIDIA sells for games: half the rate in half precision with fp32 sums."""
        return any("GeForce" in alias for alias in self.aliases)

    @property
    def slowest_share(self) -> float:
        """The clock of the version with the least power, as a share of the figures here; 1 where all are alike.

        Laptop makers set the power limit. Where the lowest clock is not published, it is taken to go with the root of
        the power: within 19 % of the eleven laptop rows of gpus.toml that have both.
        """
        if self.lowest_boost_clock_ghz and self.boost_clock_ghz:
            return self.lowest_boost_clock_ghz / self.boost_clock_ghz
        if self.lowest_board_power_w and self.board_power_w:
            return (self.lowest_board_power_w / self.board_power_w) ** 0.5
        return 1.0

    @property
    def supports_bf16(self) -> bool:
        """Whether matmuls run in bfloat16: on a CPU, on cards from compute capability 8.0 on, and on Apple GPUs, for
        which torch 2.8 and newer ask for macOS 14."""
        return self.kind != "cuda" or self.capability >= (8, 0)

    def peak_flop_per_s(self, dtype: Dtype) -> float | None:
        """Dense peak of matrix products in this dtype with fp32 accumulation; None where no source states one.

        float32 counts TF32 where the card has it, because nanoGPT and foretrain both allow it.
        """
        tflops = {
            "float16": self.fp16_dense_tflops,
            "bfloat16": self.bf16_dense_tflops,
            "float32": self.tf32_dense_tflops or self.fp32_tflops,
        }[dtype]
        return tflops * 1e12 if tflops else None

    def matmul_peak_flop_per_s(self, mode: MatmulMode, dtype: Dtype) -> float | None:
        """Dense peak of products in a mode of the knob `matmul`; None where no source states one or gives its ratio.

        Ratios, dense: FP8 with fp32 sums is twice fp16 with fp32 sums (NVIDIA Ada whitepaper v2.1: RTX 4090 330.3 and
        165.2; Hopper: 1979 and 989). INT8 is twice fp16 with fp16 sums (RTX 3090 284 and 142, 4090 661 and 330,
        A100 624 and 312, T4 130 and 65). A CPU has no FP8 units: oneDNN widens to fp32, 0.37 s for 0.33 s in fp32 and
        0.06 s in bf16 where that was measured (AMX; 4096 x 3072 x 768, one core); INT8 took 0.05 s.
        """
        if mode == "dtype":
            return self.peak_flop_per_s(dtype)
        if self.kind == "cpu":
            return self.peak_flop_per_s({"fp8": "float32", "int8": "bfloat16"}.get(mode, dtype))  # type: ignore[arg-type]
        fp16_sums = self.fp16_acc16_dense_tflops or self.fp16_dense_tflops
        tflops = {
            "fp8": self.fp8_dense_tflops or (self.fp16_dense_tflops and 2 * self.fp16_dense_tflops),
            "int8": fp16_sums and 2 * fp16_sums,
            "fp16_accumulation": fp16_sums,
        }[mode]
        return tflops * 1e12 if tflops else None

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """Bytes a second of its memory; None where no source states them."""
        return self.bandwidth_gb_per_s * 1e9 if self.bandwidth_gb_per_s else None


def catalogue() -> dict[str, Gpu]:
    """All cards by name, in the order of the file; those of the user's own file, where there is one, come first.

    Raises UserError 'gpu.bad_file' where that file cannot be read.
    """
    return _catalogue(os.environ.get(GPU_FILE_VARIABLE, ""))


@cache
def _catalogue(own_file: str) -> dict[str, Gpu]:
    own = _own_cards(Path(own_file)) if own_file else {}
    return own | {name: gpu for name, gpu in _built_in().items() if name not in own}


@cache
def _built_in() -> dict[str, Gpu]:
    text = (resources.files("foretrain.hardware") / "gpus.toml").read_text("utf-8")
    return {name: _card(name, block) for name, block in tomllib.loads(text).items()}


def _card(name: str, block: dict[str, Any]) -> Gpu:
    return Gpu(name=name, kind="mps" if name.startswith("Apple") else "cuda", **block)


def _own_cards(path: Path) -> dict[str, Gpu]:
    """The cards of a file like gpus.toml. Raises UserError 'gpu.bad_file'."""
    try:
        blocks = parse_toml(read_text(path, MOST_OWN_BYTES))
    except UnicodeDecodeError:
        raise UserError("gpu.bad_file", path=str(path), reason="it is not UTF-8 text") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError("gpu.bad_file", path=str(path), reason=reason) from None
    cards = {}
    for name, block in blocks.items():
        if not isinstance(block, dict):
            raise UserError("gpu.bad_file", path=str(path), reason=f"{name} is not a block such as [{name!r}]")
        try:
            cards[name] = _checked(_card(name, {"source": str(path), **block}))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise UserError("gpu.bad_file", path=str(path), reason=f"[{name!r}] {key}: {first['msg']}") from None
        except (TypeError, ValueError) as error:
            raise UserError("gpu.bad_file", path=str(path), reason=f"[{name!r}] {error}") from None
    return cards


def _checked(gpu: Gpu) -> Gpu:
    """The card as it is. Raises ValueError for figures that no card can have, or without its memory."""
    if gpu.memory_gib is None:
        raise ValueError("memory_gib is missing")
    if not re.fullmatch(r"\d{1,2}\.\d", gpu.compute_capability):
        raise ValueError('compute_capability is missing, such as "8.9"')
    for field, value in gpu:
        if isinstance(value, int | float) and not 0 < value < 1e6:
            raise ValueError(f"{field} = {value:g} must be above 0 and below 1,000,000")
    return gpu


def _key(name: str) -> str:
    """'NVIDIA GeForce RTX 4070' -> 'rtx4070': what is left when vendor, case and spacing are dropped."""
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    for word in ("nvidia", "geforce", "tesla", "graphics"):
        key = key.replace(word, "")
    return key


_VARIANT = re.compile(r"((sxm\d?|pcie)?(\d+gb)?(hbm\d)?|(\d+coregpu))")


def _matches(key: str) -> list[Gpu]:
    """Cards whose name or alias is this key, or else is it but for the memory size or form factor."""
    exact = [gpu for gpu in catalogue().values() if key in {_key(name) for name in (gpu.name, *gpu.aliases)}]
    if exact:
        return exact
    found = []
    for gpu in catalogue().values():
        name = _key(gpu.name)
        if name.startswith(key) and _VARIANT.fullmatch(name[len(key) :]):
            found.append(gpu)
    return found


def find(name: str) -> Gpu:
    """The card of this name: 'RTX 4070', 'rtx4070', '4070', 'NVIDIA GeForce RTX 4070'.

    Raises UserError 'gpu.unknown_name…' or 'gpu.ambiguous' (one name, two cards).
    """
    key = _key(name)
    for candidate in (key, f"rtx{key}") if key else ():
        found = _matches(candidate)
        if len(found) == 1:
            return found[0]
        if found:
            raise UserError("gpu.ambiguous", name=name, choices=[gpu.name for gpu in found])
    near = nearest(name)
    id = "gpu.unknown_name_near" if near else "gpu.unknown_name"
    raise UserError(id, name=name[:80], near=near, count=len(catalogue()))


find_gpu = find  # as Python programs know it


def nearest(name: str, count: int = 3) -> list[str]:
    """Names of the cards that look most like this one, of its generation: an RTX 5080 is not near a GTX 1080."""
    generation = _generation(name)
    keys = {_key(gpu.name): gpu.name for gpu in catalogue().values() if _generation(gpu.name) == generation}
    return [keys[key] for key in difflib.get_close_matches(_key(name), keys, n=count, cutoff=0.5)]


def _generation(name: str) -> str:
    """'40' of RTX 4070: the first two digits."""
    number = re.search(r"\d+", name)
    return number[0][:2] if number else ""


def stated_bytes(text: str, option: str) -> int:
    """A size that somebody typed for an option, such as 2GB. Raises UserError 'gpu.bad_memory'."""
    return read(parse_bytes, text, UserError("gpu.bad_memory", option=option, value=text))


def block_to_add(name: str, memory_gib: float | None = None, sm_count: int | None = None) -> str:
    """The TOML block to fill in for a card that the catalogue lacks."""
    return "\n".join(
        [
            f'["{name}"]',
            'architecture = "?"',
            'compute_capability = "?.?"',
            f"sm_count = {sm_count or '?'}",
            "boost_clock_ghz = ?",
            f"memory_gib = {memory_gib or '?'}",
            "bandwidth_gb_per_s = ?",
            "fp16_dense_tflops = ?  # dense, fp32 accumulation",
            "bf16_dense_tflops = ?",
            "fp32_tflops = ?",
            "board_power_w = ?",
            'source = "?"',
        ]
    )


def _unknown(name: str, memory_gib: float | None = None, sm_count: int | None = None) -> UserError:
    block = block_to_add(name, memory_gib, sm_count)
    return UserError("gpu.unknown", name=name[:80], near=nearest(name) or list(catalogue())[:3], block=block)


class DetectedGpu(Record):
    """The card in this machine: what its driver says, and its catalogue entry with the true memory size."""

    gpu: Gpu
    index: int
    memory_bytes: int
    used_bytes: int
    driver: str


def match(name: str, memory_gib: float, sm_count: int | None) -> Gpu:
    """The catalogue's card for a driver's name, memory and SM count, since one name can be two cards.

    Raises UserError 'gpu.unknown' with the block to add.
    """
    key = _key(name)
    candidates = _matches(key) + [
        gpu for gpu in catalogue().values() if _key(gpu.name).startswith(key) and gpu not in _matches(key)
    ]
    for gpu in candidates:
        same_memory = gpu.memory_gib and abs(memory_gib / gpu.memory_gib - 1) < 0.08
        if same_memory and (sm_count is None or gpu.sm_count == sm_count):
            return gpu
    raise _unknown(name, round(memory_gib), sm_count)


def detect(index: int = 0, nvml: Any = None, **more: str) -> DetectedGpu | None:
    """The NVIDIA card of this machine that CUDA counts as `index`, through NVML, or None when there is no such card or
    no driver.

    Raises UserError 'gpu.unknown' for a card that the catalogue lacks. `nvml` is a stand-in for tests; `more`: what
    torch knows of the card (hardware/visible.py).
    """
    cards = Cards(nvml)
    try:
        sample = cards.one(cards.index_of(index, **more), ())
        if sample is None or sample.used_bytes is None:
            return None
        facts = cards.facts[sample.index]
        if facts.total_bytes is None:
            return None
        memory_gib = facts.total_bytes / GIB
        gpu = match(facts.name, memory_gib, cards.sm_count(sample.index))
        here = {"memory_gib": memory_gib, "calibration": load(gpu.name, facts.driver)}
        return DetectedGpu(
            gpu=gpu.model_copy(update=here),
            index=index,
            memory_bytes=facts.total_bytes,
            used_bytes=sample.used_bytes,
            driver=facts.driver,
        )
    finally:
        cards.close()
