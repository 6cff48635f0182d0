"""A model with fewer of its equal layers, whose trace grows to that of the whole (predict/trace/growth.py)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights

from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.growth import Cut

PLAIN = (int, float, bool, str, tuple, type(None), torch.dtype)
LONGEST_GROUP = 8
LEAST_LAYERS = 3  # of the shorter model that repeat
WORTH = 0.65  # of all layers, that are in both traces together: each trace takes time for itself too
ATTEMPTS = 2


def cuts(kind: Any, config: Any, worth: float = WORTH) -> Iterator[tuple[Cut, int]]:
    """Return how a model can be cut, each with the number of layers of the shorter one, the fewest first."""
    with torch.device("meta"), no_init_weights():
        lists = {name: m for name, m in kind(config).named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    outer = {name: m for name, m in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}
    if not outer:
        return
    longest = max(outer.values(), key=lambda layers: sum(p.numel() for p in layers.parameters()))
    count = len(longest)
    outer = {name: layers for name, layers in outer.items() if len(layers) == count}
    kinds = list(zip(*map(_kinds, outer.values()), strict=True))
    found = []
    for group in range(1, LONGEST_GROUP + 1):
        first = next((i + 1 for i in reversed(range(count - group)) if kinds[i] != kinds[i + group]), 0)
        rest = first + (count - first) % group
        found.append((rest + group * max(2, -(-LEAST_LAYERS // group)), group, first + group))
    fewest, group, first = min(found)
    for shorter in range(fewest, fewest + ATTEMPTS * group, group):
        if 2 * shorter + group <= worth * count:
            yield Cut(tuple(outer), first, group, (count - shorter) // group), shorter


def _kinds(layers: nn.ModuleList) -> list[Mapping[str, Any]]:
    """Return all that makes layers differ, but for their numbers."""
    found: list[dict[str, Any]] = []
    for layer in layers:
        kinds: dict[str, Any] = {name: (p.shape, p.dtype) for name, p in layer.named_parameters()}
        for path, module in layer.named_modules():
            kinds[path] = type(module)
            kinds |= {f"{path}.{name}": value for name, value in vars(module).items() if isinstance(value, PLAIN)}
        found.append(kinds)
    numbers = {name for name in set().union(*found) if all(kinds.get(name, i) == i for i, kinds in enumerate(found))}
    return [{name: value for name, value in kinds.items() if name not in numbers} for kinds in found]


@contextmanager
def shortened(kind: Any, lists: tuple[str, ...], layers: int) -> Iterator[None]:
    """Make models of this kind with so many layers."""
    make = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        for name in lists:
            del self.get_submodule(name)[layers:]

    with Patches() as patches:
        patches.set(kind, "__init__", init)
        yield
