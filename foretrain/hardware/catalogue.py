"""Devices to plan for: a card of the catalogue `gpus.toml`, or of a user's own file (`--gpu-file FILE`,
FORETRAIN_GPU_FILE), the card in this machine, or its CPU."""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from foretrain.base.errors import UserError
from foretrain.base.files import parse_toml, read_text
from foretrain.base.installation import GPU_FILE_VARIABLE
from foretrain.base.quantities import parse_bytes, read
from foretrain.base.records import Note, Record
from foretrain.base.units import GIB, MIB
from foretrain.hardware.calibration import Calibration, load
from foretrain.hardware.card import Cards
from foretrain.hardware.links import NVLINK, link_of

USUAL_L2_MIB = 32
LEAST_CAPABILITY = (5, 0)  # no wheel of PyTorch 2 has kernels for Kepler
# Of the fp32 peak where a card has no bfloat16 units: RTX 2080 Ti 6.95 and 7.28 of 13.4 TFLOP/s, GTX 1660 Ti 2.84 of
# 5.4, 1080 Ti 5.38 of 11.3, 1070 Ti 4.05 of 8.2 (zzc0721/torch-performance-test-data issues 181, 115, 89, 60, 192).
EMULATED_BF16_SHARE = 0.5
LEAST_FOR_TRITON = (7, 0)  # triton-lang/triton: Volta and later; torch.compile refuses what is older
HBM_BUS_BITS, HBM_LOSS, ECC_SHARE = 1024, 0.02, 1 / 16

Dtype = Literal["float32", "bfloat16", "float16"]
MatmulMode = Literal["dtype", "fp8", "int8", "fp16_accumulation"]
MOST_OWN_BYTES = 1 << 20
NANOGPT_PEAK_FLOP_PER_S = 312e12  # karpathy/nanoGPT model.py estimate_mfu: an A100's bfloat16, for every card


class Gpu(Record):
    """A device to plan for, in vendor units; tensor figures are dense. `kind`: rocm is AMD, xpu Intel."""

    name: str
    kind: Literal["cuda", "mps", "cpu", "rocm", "xpu"] = "cuda"
    aliases: tuple[str, ...] = ()
    architecture: str = ""
    compute_capability: str = ""
    sm_count: int | None = None
    boost_clock_ghz: float | None = None
    lowest_boost_clock_ghz: float | None = None
    fp32_clock_ghz: float | None = None
    fp16_flop_per_clock_per_sm: int | None = None
    fp32_flop_per_clock_per_sm: int | None = None
    memory_gib: float | None = None  # the label on the box
    cuda_memory_gib: float | None = None  # given by CUDA; the driver keeps the rest, and ECC its part
    cuda_memory_source: str = ""
    unified_memory_gib: tuple[float, ...] = ()  # sizes of a chip with unified memory
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
    measured_bf16_matmul_tflops: float | None = None
    measured_fp16_matmul_tflops: float | None = None
    measured_source: str = ""
    sustained_like: str = ""  # the measured card whose rate tells what this one's power allows
    board_power_w: float | None = None
    lowest_board_power_w: float | None = None
    source: str = ""
    # All cards of a short name, where one of them was taken.
    choices: tuple[str, ...] = Field(default=(), exclude=True, repr=False)
    # Measured on this very device; not written with a plan, which holds its consequences.
    calibration: Calibration | None = Field(default=None, exclude=True, repr=False)

    @property
    def label_bytes(self) -> int | None:
        return round(self.memory_gib * GIB) if self.memory_gib else None

    @property
    def memory_bytes(self) -> int | None:
        """Return the memory that CUDA gives, which decides; None where the catalogue cannot know it."""
        gib = self.cuda_memory_gib or (self.memory_gib and self._derived_gib)
        return round(gib * GIB) if gib else None

    @property
    def _derived_gib(self) -> float:
        """Derive CUDA's memory from the label: HBM loses at most 1.6%, ECC of other data-centre cards a byte of 16."""
        label = self.memory_gib or 0.0
        if self.kind != "cuda":  # HIP's messages: 7.98 of 8, 15.98 of 16, 19.98 of 20 GiB; of Intel's 11.93 of 12
            return {"rocm": label - 0.02, "xpu": 0.99 * label}.get(self.kind, label)
        if (self.memory_bus_bits or 0) >= HBM_BUS_BITS:
            return label * (1 - HBM_LOSS)
        without_ecc = re.search(r"RTX|GTX|TITAN|Quadro", self.name) or self.is_geforce
        return given_gib(label if without_ecc else label * (1 - ECC_SHARE))

    @property
    def cache_bytes(self) -> int:
        return round((self.l2_mib or USUAL_L2_MIB) * MIB)

    @property
    def capability(self) -> tuple[int, int]:
        major, _, minor = self.compute_capability.partition(".")
        return (int(major), int(minor)) if major else (0, 0)

    @property
    def reserves(self) -> bool:
        return self.kind != "cpu"

    @property
    def is_trained_on(self) -> bool:
        return self.kind in ("cpu", "mps") or self.capability >= LEAST_CAPABILITY

    @property
    def is_laptop(self) -> bool:
        return "Laptop" in self.name

    @property
    def is_geforce(self) -> bool:
        """Return whether it is a gaming card: half the rate in half precision with fp32 sums."""
        return any("GeForce" in alias for alias in self.aliases)

    @property
    def slowest_share(self) -> float:
        """Return the clock of the version with least power, as a share of the figures here; unpublished ones go with
        the root of the power: within 19% of the eleven laptop rows that have both."""
        if self.lowest_boost_clock_ghz and self.boost_clock_ghz:
            return self.lowest_boost_clock_ghz / self.boost_clock_ghz
        if self.lowest_board_power_w and self.board_power_w:
            return (self.lowest_board_power_w / self.board_power_w) ** 0.5
        return 1.0

    @property
    def supports_bf16(self) -> bool:
        """Return whether matmuls run in bfloat16; on Apple GPUs torch 2.8 and newer need macOS 14."""
        return self.kind != "cuda" or self.capability >= (8, 0)

    @property
    def has_triton(self) -> bool:
        return self.kind != "cuda" or self.capability == (0, 0) or self.capability >= LEAST_FOR_TRITON

    def peak_flop_per_s(self, dtype: Dtype) -> float | None:
        """Return the dense peak of matmuls in a dtype (float32: TF32) with fp32 sums; None without a source."""
        emulated = self.fp32_tflops and EMULATED_BF16_SHARE * self.fp32_tflops
        tflops = {
            "float16": self.fp16_dense_tflops,
            "bfloat16": self.bf16_dense_tflops or (None if self.supports_bf16 else emulated),
            "float32": self.tf32_dense_tflops or self.fp32_tflops,
        }[dtype]
        return tflops * 1e12 if tflops else None

    def sustained_share(self, dtype: Dtype) -> float | None:
        """Return the share of the peak that large matmuls hold within the board's power; None where unknown. An
        unmeasured card's follows from its architecture: the rate grows with the root of power times SMs."""
        rates = {
            "bfloat16": (self.measured_bf16_matmul_tflops, self.bf16_dense_tflops),
            "float16": (self.measured_fp16_matmul_tflops, self.fp16_dense_tflops),
        }
        for each in ("float16", "bfloat16") if dtype == "float16" else ("bfloat16", "float16"):
            measured, peak = rates[each]
            if measured and peak:
                return measured / peak
        like = _built_in(self.sustained_like) if self.sustained_like in _blocks() else None
        share = like and like.sustained_share(dtype)
        if not like or not share or not self.fp16_dense_tflops:
            return None
        watts, more = (like.board_power_w or 0) * (like.sm_count or 0), (self.board_power_w or 0) * (self.sm_count or 0)
        return share * (like.fp16_dense_tflops or 0) * (more / watts) ** 0.5 / self.fp16_dense_tflops

    def matmul_peak_flop_per_s(self, mode: MatmulMode, dtype: Dtype) -> float | None:
        """Return the dense peak in a mode of the option `matmul`; None where no source states one or gives its ratio.

        Ratios, dense: FP8 with fp32 sums is twice fp16 with fp32 sums (NVIDIA Ada whitepaper v2.1: RTX 4090 330.3 and
        165.2; Hopper: 1979 and 989). INT8 is twice fp16 with fp16 sums (RTX 3090 284 and 142, 4090 661 and 330, A100
        624 and 312, T4 130 and 65). A CPU has no FP8 units: oneDNN widens to fp32, 0.37 s for 0.33 s in fp32 and 0.06 s
        in bf16 where that was measured (AMX; 4096 x 3072 x 768, one core); INT8 took 0.05 s.
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
    def sized_name(self) -> str:
        return f"{self.name} {self.unified_memory_gib[-1]:g}GB" if self.unified_memory_gib else self.name

    @property
    def notes(self) -> list[Note]:
        others = [name for name in self.choices if name != self.name]
        return [Note(id="card_of_several", values={"gpu": self.name, "others": others})] if others else []

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        return self.bandwidth_gb_per_s * 1e9 if self.bandwidth_gb_per_s else None


def given_gib(total_gib: float) -> float:
    """Return what CUDA gives of nvidia-smi's total, or of a label without ECC; never more than was seen on Linux: 3.63
    of 4, 7.60 of 8, 11.49 of 12, 15.48 of 16, 23.52 of 24, 31.36 of 32, 47.27 of 48, 94.96 of 96 GiB.
    """
    return 0.9935 * total_gib - min(0.45, 0.1 * total_gib)


def catalogue() -> dict[str, Gpu]:
    """Return all cards by name, those of the user's own file first. Raises UserError 'gpu.bad_file'."""
    return {name: _card_of(name) for name in _names()}


def _own() -> dict[str, Gpu]:
    return _own_cards(os.environ.get(GPU_FILE_VARIABLE, ""))


@cache
def _blocks() -> dict[str, str]:
    """Return the text below each name of gpus.toml. A plan reads the one of its card: all of them take 0.06 s."""
    text = (resources.files("foretrain.hardware") / "gpus.toml").read_text("utf-8")
    return dict(block.split('"]\n', 1) for block in text.split('\n["')[1:])


@cache
def _built_in(name: str) -> Gpu:
    return _card(name, tomllib.loads(_blocks()[name]))


def _card_of(name: str) -> Gpu:
    return _own().get(name) or _built_in(name)


def _names() -> dict[str, Iterable[str]]:
    own = {name: gpu.aliases for name, gpu in _own().items()}
    return own | {name: aliases for name, aliases in _aliases().items() if name not in own}


@cache
def _aliases() -> dict[str, Iterable[str]]:
    found = {name: _ALIASES.search(block) for name, block in _blocks().items()}
    return {name: json.loads(line[1]) if line else () for name, line in found.items()}


def _card(name: str, block: dict[str, Any]) -> Gpu:
    figures: dict[str, Any] = {"kind": "mps" if name.startswith("Apple") else "cuda"} | block
    gpu = Gpu(name=name, **figures)
    if gpu.cuda_memory_gib or gpu.memory_bytes in (None, gpu.label_bytes):
        return gpu
    derived = {"cuda_memory_gib": round(gpu._derived_gib, 2), "cuda_memory_source": "derived from the label"}
    return gpu.model_copy(update=derived)


@cache
def _own_cards(file: str) -> dict[str, Gpu]:
    if not file:
        return {}
    path = Path(file)
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
    if gpu.memory_gib is None:
        raise ValueError("memory_gib is missing")
    if not re.fullmatch(r"\d{1,2}\.\d", gpu.compute_capability):
        raise ValueError('compute_capability is missing, such as "8.9"')
    for field, value in gpu:
        if isinstance(value, int | float) and not 0 < value < 1e6:
            raise ValueError(f"{field} = {value:g} must be above 0 and below 1,000,000")
    return gpu


_WORDS = re.compile(
    r"\(r\)|\(tm\)|nvidia|geforce|tesla|amd|radeon|instinct|intel|graphics|generation|\bgpu\b|[^a-z0-9]"
)
_ALIASES = re.compile(r"^aliases = (\[.*\])", re.MULTILINE)
_VARIANT = re.compile(r"(sxm\d?|pcie|nvl)?(\d+gb)?(hbm\d)?|\d+core")
_SIZED = re.compile(r"(?P<name>.*\S)[\s_-]+(?P<gib>\d{1,3})\s*gi?b?", re.IGNORECASE)
_LINE = re.compile(r"(quadrortx|rtxpro|rtxa|titan|[a-z]*)(\d*)(.*)")
_WORKSTATION = ("quadrortx", "rtxpro", "rtxa")
SAME_KIND = 0.3  # a card is near another one without a generation where its number is not below this share of it


@cache
def _key(name: str) -> str:
    """Reduce 'NVIDIA GeForce RTX 4070 Mobile' to 'rtx4070laptop': no vendor, case and spacing."""
    return _WORDS.sub("", name.lower()).replace("mobile", "laptop")


def _matches(key: str) -> list[Gpu]:
    """Return cards whose name or alias is this key, or is it but for the memory size, form factor or line."""
    names = _names()
    cards = [(name, _key(name)) for name in names]
    found = (
        [name for name, short in cards if key in (short, *map(_key, names[name]))]
        or [name for name, short in cards if short.startswith(key) and _VARIANT.fullmatch(short[len(key) :])]
        or [name for name, short in cards if key == re.sub("quadro|pro|ada$|maxq|server", "", short)]
    )
    return [_card_of(name) for name in found]


def _named(name: str) -> list[Gpu]:
    key = _key(name)
    for line in ("", "rtx", "gtx", "rx") if key else ():
        if found := _matches(line + key):
            return found
    sized = _SIZED.fullmatch(name.strip())
    found = _named(sized["name"]) if sized else []
    gib = float(sized["gib"]) if sized else 0.0
    return [each for gpu in found if (each := _with_memory(gpu, gib))]


def _with_memory(gpu: Gpu, gib: float) -> Gpu | None:
    """Return the card where it has so much memory, or where the GPU may use so much of a computer's: Metal recommends
    10,922 of 16 GB and 73,728 of 96 (ggml-org/llama.cpp#2011, #3213); AMD lets 96 of 128 be set.
    """
    if gib not in (gpu.unified_memory_gib or (gpu.memory_gib,)):
        return None
    if not gpu.unified_memory_gib:
        return gpu
    usable = gib * (2 / 3 if gpu.kind == "mps" and gib <= 32 else 3 / 4)
    return gpu.model_copy(update={"name": f"{gpu.name} {gib:g}GB", "memory_gib": gib, "cuda_memory_gib": usable})


def find(name: str) -> Gpu:
    """Return the card of a name: 'RTX 4070', '4070', 'M4 Max 64GB'. A short name of several means the one that NVLink
    connects, with the least memory; `choices` are all. Raises UserError 'gpu.unknown_name…', 'gpu.ambiguous'."""
    found = _named(name)
    if len(found) == 1:
        return found[0]
    linked = [gpu for gpu in found if link_of(gpu.name).link.kind == NVLINK]
    if linked:
        least = min(linked, key=lambda gpu: gpu.memory_bytes or 0)
        return least.model_copy(update={"choices": tuple(gpu.name for gpu in found)})
    if found:
        raise UserError("gpu.ambiguous", name=name, choices=[gpu.name for gpu in found], example=found[0].name)
    near = nearest(name)
    id = "gpu.unknown_name_near" if near else "gpu.unknown_name"
    raise UserError(id, name=name[:80], near=near, count=len(catalogue()))


find_gpu = find  # as Python programs know it


def nearest(name: str, count: int = 3) -> list[str]:
    line, number, is_laptop = _line(name)
    kin = [(gpu.name, *_line(gpu.name)) for gpu in catalogue().values() if _line(gpu.name)[0] == line]
    kin = [card for card in kin if card[2] // 1000 == number // 1000] or kin
    near = [card for card in kin if min(card[2], number) >= SAME_KIND * max(card[2], number)]
    key = _key(name)

    def distance(card: tuple[str, str, int, bool]) -> tuple[bool, int, float]:
        alike = difflib.SequenceMatcher(None, key, _key(card[0])).ratio()
        return card[3] != is_laptop, abs(card[2] - number), -alike

    return [card[0] for card in sorted(near, key=distance)[:count]]


def _line(name: str) -> tuple[str, int, bool]:
    """Return ('rtx', 4070, False) of RTX 4070: line, number, whether it is a laptop's."""
    sized = _SIZED.fullmatch(name.strip())
    match = _LINE.match(_key(sized["name"] if sized else name).removeprefix("apple"))
    assert match
    line, digits, rest = match[1], match[2], match[3]
    if not line:
        line = "rx" if re.match("xtx?|gre", rest) else "gtx" if digits[:2] in ("10", "16") else "rtx"
    if line in _WORKSTATION or (line == "rtx" and "ada" in rest):
        line = "workstation"
    if line == "m" and len(digits) == 1:
        line = "apple"
    return line, int(digits or 0), "laptop" in rest


def stated_bytes(text: str, option: str) -> int:
    """Parse a size typed for an option, such as 2GB. Raises UserError 'gpu.bad_memory'."""
    return read(parse_bytes, text, UserError("gpu.bad_memory", option=option, value=text))


def block_to_add(name: str, memory_gib: float | None = None, sm_count: int | None = None) -> str:
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
    gpu: Gpu
    index: int
    used_bytes: int
    driver: str


def match(name: str, memory_gib: float, sm_count: int | None) -> Gpu:
    """Return the card of a driver's name, memory and SM count. Raises UserError 'gpu.unknown' with the block to add."""
    key = _key(name)
    for gpu in [*_matches(key), *(gpu for gpu in catalogue().values() if _key(gpu.name).startswith(key))]:
        sizes = (gpu.memory_gib, gpu.cuda_memory_gib)  # NVML counts the one nearly, PyTorch the other
        same_memory = any(size and abs(memory_gib / size - 1) < 0.08 for size in sizes)
        if same_memory and (sm_count is None or gpu.sm_count == sm_count):
            return gpu
    raise _unknown(name, round(memory_gib), sm_count)


def detect(index: int = 0, nvml: Any = None, **more: str) -> DetectedGpu | None:
    """Return CUDA's NVIDIA card `index`; None without card or driver. Raises UserError 'gpu.unknown'."""
    cards = Cards(nvml)
    try:
        sample = cards.one(cards.index_of(index, **more), ())
        if sample is None or sample.used_bytes is None:
            return None
        facts = cards.facts[sample.index]
        if facts.total_bytes is None:
            return None
        gpu = match(facts.name, facts.total_bytes / GIB, cards.sm_count(sample.index))
        kept, source = facts.reserved_bytes, "this card: NVML's total less what the driver reserves"
        if kept is None:
            kept = facts.total_bytes - round(given_gib(facts.total_bytes / GIB) * GIB)
            source = "this card: derived from NVML's total"
        given = (facts.total_bytes - kept) / GIB
        here = {"cuda_memory_gib": given, "cuda_memory_source": source, "calibration": load(gpu.name, facts.driver)}
        return DetectedGpu(
            gpu=gpu.model_copy(update=here),
            index=index,
            used_bytes=max(0, sample.used_bytes - kept),  # NVML counts what the driver keeps as used
            driver=facts.driver,
        )
    finally:
        cards.close()
