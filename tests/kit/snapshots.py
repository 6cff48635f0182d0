"""Made-up snapshots of PyTorch's allocator."""

from typing import Any

from foretrain.predict.allocator.settings import Settings
from foretrain.predict.snapshot import Label
from tests.kit.lifetimes import export

MIB = 1 << 20

LABELS = {"w": Label("transformer.wte.weight", "weights", ("embedding",)), "x": Label("h.0.mlp.c_fc", "activations")}

# Weights of 30 MiB, an activation of 50 that comes and goes, a small tensor, another activation in its place.
EVENTS = [
    ("alloc", "w", 30 * MIB - 100),
    ("alloc", "x", 50 * MIB),
    ("alloc", "step", 4),
    ("free", "x", 0),
    ("phase", "second", 0),
    ("alloc", "x", 45 * MIB),
]


def recorded(events: list[tuple[str, Any, int]] = EVENTS, way: Settings | None = None) -> dict[str, Any]:
    return export(events, LABELS, way)


SIDE = [
    ("alloc", "a", 30 * MIB), ("free", "a", 0), ("stream", 9, 0), ("alloc", "b", 20 * MIB), ("alloc", "small", 100),
    ("record_stream", "b", 0), ("free", "b", 0), ("stream", 0, 0), ("alloc", "c", 25 * MIB), ("stream", 9, 0),
    ("alloc", "d", 10 * MIB), ("record_stream", "d", 0), ("free", "d", 0),
]  # fmt: skip
