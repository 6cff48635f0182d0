"""What PyTorch allocates otherwise from version to version, as far as a traced step meets it. No torch.

Found by tracing 349 small programs with torch 2.6.0, 2.9.1 and 2.13.0 (tests/torch_versions). The rest of what differed
there is below 1 KiB for each op.
"""

from typing import NamedTuple

from foretrain.base.units import format_bytes
from foretrain.predict.software import Software, parse
from foretrain.predict.trace.record import Trace

FUSED_NORM = Software(2, 9)  # on CUDA rms_norm is one kernel from here on
NORM_IN_FP32 = Software(2, 12)  # autocast casts what goes into rms_norm
SAME_SLICE = Software(2, 9)  # x[:] is x itself; before, its backward makes a gradient of its own
ERAS = (
    ("torch 2.8 and before", Software(2, 6)),
    ("torch 2.9 to 2.11", FUSED_NORM),
    ("torch 2.12 and later", NORM_IN_FP32),
)


class Norm(NamedTuple):
    """A call of rms_norm: the allocations made in it (first, one after its last), elements, and how it was called."""

    first: int
    end: int
    elements: int
    narrow: bool  # its input has 16 bits
    weight: str  # "none", "same" dtype as its input, or "other"
    autocast: bool

    def kept_bytes(self, torch: Software) -> int:
        """What it keeps for backward beside its input and the result, per element as seen in traces of each version."""
        if torch >= NORM_IN_FP32 and self.autocast:
            each = 4 if self.narrow else 0  # the input in fp32
        elif torch >= FUSED_NORM:
            each = 8 if self.narrow and self.weight == "other" else 0
        else:
            each = (4 if self.narrow else 0) + (0 if self.weight == "none" else 2 if self.narrow else 4)
        return each * self.elements


def notes(trace: Trace, trains: str = "") -> tuple[str, ...]:
    """A sentence for each known difference that the step meets, with its size. `trains`: the version that will train;
    '' is not known, and the one that traced is assumed."""
    traced, training = parse(trace.facts.get("torch", "")), parse(trains)
    if traced is None or (training is not None and training == traced):
        return ()
    others = [(f"torch {training}", training)] if training else [era for era in ERAS if _era(era[1]) != _era(traced)]
    found = [sentence for sentence in (_of_norms(trace, traced, others), _of_slices(trace, traced, others)) if sentence]
    if not found:
        return ()
    head = f"traced with torch {trace.facts['torch']}"
    assumed = "" if training else ", which is taken to be the one that trains"
    return tuple(f"{head}{assumed}: {sentence}; python=PATH traces with another torch" for sentence in found)


def _era(torch: Software) -> int:
    return sum(torch >= first for _, first in ERAS)


def _of_norms(trace: Trace, traced: Software, others: list[tuple[str, Software]]) -> str:
    if count := trace.facts.get("compiled_norms", 0):
        other = [name for name, torch in others if (torch >= NORM_IN_FP32) != (traced >= NORM_IN_FP32)]
        more = "less" if traced >= NORM_IN_FP32 else "more"
        results = f"the results of the {count} calls of rms_norm under autocast, and what is made of them, take up to 2"
        return f"{results} bytes of each element {more} with {' and '.join(other)}, where compiled" if other else ""
    norms = [Norm(*each) for each in trace.facts.get("rms_norms", ())]
    if not norms:
        return ""
    at_peak = max(trace.peaks().values(), default=(0, 0))[1]
    alive = {a.id for a in trace.alive_at(at_peak)}
    held = [norm for norm in norms if not alive.isdisjoint(range(norm.first, norm.end))]
    changes = [
        f"about {_signed(more)} with {name}"
        for name, torch in others
        if (more := sum(norm.kept_bytes(torch) - norm.kept_bytes(traced) for norm in held))
    ]
    return f"the {len(held)} calls of rms_norm at the peak keep {' and '.join(changes)}" if changes else ""


def _of_slices(trace: Trace, traced: Software, others: list[tuple[str, Software]]) -> str:
    nbytes = int(trace.facts.get("whole_slices_bytes", 0))
    names = [name for name, torch in others if (torch >= SAME_SLICE) != (traced >= SAME_SLICE)]
    if not nbytes or not names:
        return ""
    more = _signed(nbytes if traced >= SAME_SLICE else -nbytes)
    return f"slices of whole dimensions, such as x[:], take for a moment of backward up to {more} with {names[0]}"


def _signed(nbytes: int) -> str:
    return f"{format_bytes(abs(nbytes))} {'more' if nbytes > 0 else 'less'}"
