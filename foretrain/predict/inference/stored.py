"""Bits that a model's weights take as files store them, by llama_tensor_get_type of ggml-org/llama.cpp,
src/llama-quant.cpp (commit 007dbbf, 2026) and ggml/src/ggml-common.h. Formats with an i below four bits are planned
with an importance matrix; published weights leave what their config.json excepts in 16 bits."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from functools import lru_cache
from typing import NamedTuple

from foretrain.config.hub.facts import ModelFacts
from foretrain.config.hub.parameters import Parameter, text_parameters
from foretrain.config.inference import FORMATS, PUBLISHED

Rules = Mapping[str, tuple[tuple[str, str], ...]]


class BlockType(NamedTuple):
    """Bits a number, numbers in a block, and the type of matrices whose rows no blocks of this one fill."""

    bits: float
    numbers: int
    instead: str


# fmt: off
TYPES = {
    name: BlockType(float(bits), int(numbers), instead)
    for name, bits, numbers, instead in map(str.split, """\
q2_k    2.625  256 q4_0
q3_k    3.4375 256 q4_0
q4_k    4.5    256 q5_0
q5_k    5.5    256 q5_1
q6_k    6.5625 256 q8_0
q4_0    4.5     32 f16
q5_0    5.5     32 f16
q5_1    6       32 f16
q8_0    8.5     32 f16
iq1_s   1.5625 256 iq4_nl
iq1_m   1.75   256 iq4_nl
iq2_xxs 2.0625 256 iq4_nl
iq2_xs  2.3125 256 iq4_nl
iq2_s   2.5625 256 iq4_nl
iq3_xxs 3.0625 256 iq4_nl
iq3_s   3.4375 256 iq4_nl
iq4_xs  4.25   256 iq4_nl
iq4_nl  4.5     32 f16
tq1_0   1.6875 256 q4_0
tq2_0   2.0625 256 q4_0
mxfp4   4.25    32 f16
f16    16        1 f16""".splitlines())
}
# A mixture's own type, then parts that get others, each where its condition holds, the first that does.
_TABLE = """\
q5_k_m  q5_k    v:more=q6_k down:more=q6_k
q5_k_s  q5_k
q4_k_m  q4_k    v:more=q6_k down:more=q6_k
q4_k_s  q4_k    v:first_four=q5_k down:eighth=q5_k
iq4_nl  iq4_nl  v:shared=q5_k down:eighth=q5_k
iq4_xs  iq4_xs  v:shared=q5_k down:eighth=q5_k
q3_k_l  q3_k    v:=q5_k down:=q5_k out:=q5_k
q3_k_m  q3_k    v:first_two=q5_k v:=q4_k down:sixteenth=q5_k down:=q4_k out:=q4_k
q3_k_s  q3_k
iq3_m   iq3_s   v:=q4_k down:eighth=q4_k down:mixtral_more=q4_k out:=q4_k
iq3_s   iq3_s   v:shared=q4_k
iq3_xs  iq3_s   v:shared=q4_k k:=iq3_xxs q:=iq3_xxs up:middle=iq3_xxs
iq3_xxs iq3_xxs v:shared=q4_k k:=iq2_s q:=iq2_s out:=iq3_s
q2_k    q2_k    v:shared=q4_k v:=q3_k down:=q3_k out:=q3_k
q2_k_s  q2_k    v:shared=q4_k down:eighth=q4_k
iq2_m   iq2_s   v:several=q4_k v:=iq3_s k:mixtral=q4_k down:eighth=iq3_s out:mixtral=q5_k out:=iq3_s
iq2_s   iq2_xs  v:several=q4_k v:=iq3_s k:mixtral=q4_k down:eighth=iq3_s out:mixtral=q5_k out:=iq3_s
iq2_xs  iq2_xs  v:several=q4_k v:=q2_k k:mixtral=q4_k down:eighth=q2_k out:mixtral=q5_k
iq2_xxs iq2_xxs v:several=q4_k v:=q2_k k:mixtral=q4_k down:eighth=q2_k out:mixtral=q5_k
iq1_m   iq1_m   v:several=q4_k v:=q2_k k:mixtral=q4_k down:eighth=q2_k out:mixtral=q5_k out:=iq2_xxs
iq1_s   iq1_s   v:several=q4_k v:=q2_k k:mixtral=q4_k down:eighth=q2_k out:mixtral=q5_k out:=iq2_xxs
tq2_0   tq2_0
tq1_0   tq1_0"""
# fmt: on


def _mixture(line: str) -> tuple[str, tuple[str, Rules]]:
    name, base, *rules = line.split()
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for part, condition, kind in (re.split("[:=]", rule) for rule in rules):
        found[part] = (*found.get(part, ()), (condition, kind))
    return name, (base, found)


MIXTURES = dict(map(_mixture, _TABLE.splitlines()))
LOW = ("iq3_xxs", "iq2_m", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s")  # whose head is smaller
EMBEDDING = {
    **dict.fromkeys(LOW[:3], "iq3_s"),
    **dict.fromkeys(LOW[3:], "q2_k"),
    **dict.fromkeys(("tq1_0", "tq2_0"), "q4_k"),
}
# Formats that give what follows Mixtral's attention no five bits, as the others do.
NO_MIXTRAL_OUT = ("q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_0", "q4_0", "q3_k_l", "q2_k_s", "tq2_0", "tq1_0")
PARTS = {
    name: part
    for part, names in {
        "v": "v_proj qkv_proj c_attn query_key_value kv_b_proj",
        "k": "k_proj",
        "q": "q_proj",
        "out": "o_proj dense out_proj",
        "down": "down_proj dense_4h_to_h fc2 w2 output_linear",
        "up": "gate_proj up_proj gate_up_proj c_fc fc1 dense_h_to_4h input_linear",
    }.items()
    for name in names.split()
}


class Bits(NamedTuple):
    """Bits a number of what is stored, in the mean."""

    block: float
    expert: float
    embedding: float
    head: float
    other: float


def bits_of(facts: ModelFacts, weights: str) -> Bits:
    return _bits(facts, weights)  # type: ignore[arg-type] # a frozen record is hashable


@lru_cache(maxsize=256)
def _bits(facts: ModelFacts, weights: str) -> Bits:
    own, kinds = FORMATS[weights], ("linear", "expert", "embedding", "head", "norm")
    numbers, stored = Counter[str](), defaultdict[str, float](float)
    bits = _of_llama(facts, weights) if own.engine == "llama.cpp" else _as_published(facts, weights)
    for each in text_parameters(facts):
        other = each.name.endswith(".bias") or each.role in ("bias", "position")
        kind = "norm" if other else "linear" if each.role == "router" else each.role
        numbers[kind] += each.elements
        stored[kind] += each.elements * bits(each)
    if facts.tied:  # llama.cpp has it on the card as a head, and on the host
        numbers["head"] = numbers["embedding"]
        stored["head"] = stored["embedding"] if own.engine == "llama.cpp" else numbers["head"] * own.head
    return Bits(*(stored[kind] / numbers[kind] if numbers[kind] else own.block for kind in kinds))


def _as_published(facts: ModelFacts, weights: str) -> Callable[[Parameter], float]:
    own, kept = FORMATS[weights], facts.kept if weights == facts.published else ()

    def bits(each: Parameter) -> float:
        if each.role in ("embedding", "head"):
            return own.embedding if each.role == "embedding" else own.head
        if each.role in ("norm", "position") or each.name.endswith("bias"):
            return 32 if own.quantized and weights not in PUBLISHED else own.other
        if (weights == "mxfp4" and each.role != "expert") or any(is_named(each.module, name) for name in kept):
            return 16
        return own.block

    return bits


def is_named(module: str, name: str) -> bool:
    """Return whether a config's entry is about a module; entries are names, parts of names, or patterns."""
    module = _BEFORE.sub("", module)
    if name.startswith("re:"):
        with suppress(re.error):  # of what no pattern can be
            return any(re.search(name[3:], f"{before}{module}") for before in ("", "model.", "model.language_model."))
        return False
    name = _BEFORE.sub("", name)
    return fnmatch(module, name) if "*" in name else f".{name}." in f".{module}."


_BEFORE = re.compile(r"\b(model|language_model)\.")


def _of_llama(facts: ModelFacts, weights: str) -> Callable[[Parameter], float]:
    base, rules = MIXTURES.get(weights, (weights.removesuffix("_moe"), {}))

    def bits(each: Parameter) -> float:
        if each.role in ("norm", "position", "router") or each.name.endswith("bias"):
            return 32
        columns = each.shape[0] if facts.conv1d else each.shape[-1]
        if each.role == "head" or (facts.tied and each.role == "embedding"):
            odd = facts.model_type == "falcon" or base in ("q8_0", "mxfp4") or columns % TYPES[base].numbers != 0
            kind = "q8_0" if odd else "q5_k" if weights in LOW else "q6_k"
        elif base == "mxfp4":
            kind = "mxfp4" if each.role == "expert" else "q8_0"
        elif each.role == "embedding":
            kind = EMBEDDING.get(weights, base)
        else:
            kind = _type(facts, weights, _part(each), each.layer or 0, base, rules)
        while columns % TYPES[kind].numbers:
            kind = TYPES[kind].instead
        return TYPES[kind].bits

    return bits


def _part(each: Parameter) -> str:
    """Return what a matrix is to llama.cpp, by its name in transformers."""
    names = each.name.removesuffix(".weight").split(".")
    if names[-1] == "c_proj":  # GPT-2's
        return "down" if "mlp" in names else "out"
    return PARTS.get(names[-1], "")


def _type(facts: ModelFacts, weights: str, part: str, layer: int, base: str, rules: Rules) -> str:
    mixtral, low = facts.n_expert == 8, weights in LOW[1:]
    if mixtral and not low and part in ("k", "v", "out"):
        return "q8_0" if part != "out" else base if weights in NO_MIXTRAL_OUT else "q5_k"
    count = facts.n_layer
    eighth = layer < count // 8
    more = eighth or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2
    shared = facts.latent is None and facts.groups >= 4
    holds = {
        "": True,
        "more": more,
        "mixtral_more": mixtral and more,
        "eighth": eighth,
        "sixteenth": layer < count // 16,
        "first_two": layer < 2,
        "first_four": layer < 4,
        "middle": count // 8 <= layer < 7 * count // 8,
        "shared": shared,
        "several": shared or facts.n_expert >= 4,
        "mixtral": mixtral,
    }
    kind = next((kind for condition, kind in rules.get(part, ()) if holds[condition]), base)
    of_70b = part == "v" and count == 80 and not low and kind in ("q3_k", "q4_k")
    return "q5_k" if of_70b else kind
