"""Writes the example snapshot: a small program that ran out of memory through fragmentation.

    python docs/snapshot_example.py

The shape is PyTorch's (torch/cuda/memory.py, _snapshot); the sizes are made up. The allocator that decides where
blocks lie, and when memory runs out, is the simulator (foretrain/predict/allocator/simulator.py); frames are put beside it.
"""

import pickle
from pathlib import Path
from typing import Any

from foretrain.base.units import MIB
from foretrain.predict.allocator.blocks import Lifetimes
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.snapshot import Label, snapshot_of

TARGET = Path(__file__).parent.parent / "examples" / "snapshots" / "fragmented.pickle"
TORCH = "site-packages/torch"
STACKS: dict[str, list[tuple[str, str, int]]] = {
    "weights": [("convert", f"{TORCH}/nn/modules/module.py", 1), ("<module>", "train.py", 195)],
    "moments": [("_init_group", f"{TORCH}/optim/adamw.py", 1), ("<module>", "train.py", 314)],
    "activations": [("linear", f"{TORCH}/nn/functional.py", 1), ("forward", "model.py", 88)],
    "logits": [("cross_entropy", f"{TORCH}/nn/functional.py", 1), ("forward", "model.py", 187)],
}


def events() -> list[tuple[str, Any, int]]:
    """Return weights and moments, a training step, an evaluation at another length, and a step that no longer fits."""
    found: list[tuple[str, Any, int]] = []
    found += [("alloc", ("weights", i), 28 * MIB) for i in range(12)]
    found += [("alloc", ("moments", i), 56 * MIB) for i in range(12)]
    for turn, size in enumerate((60, 80, 100)):
        found += [("alloc", ("activations", turn, i), size * MIB) for i in range(12)]
        found.append(("alloc", ("logits", turn), 393 * MIB))
        found += [("free", ("activations", turn, i), 0) for i in range(0, 12, 2)]  # the other half is kept by mistake
        found.append(("free", ("logits", turn), 0))
    return found


def main() -> None:
    sizes = {id: size for kind, id, size in events() if kind == "alloc"}
    numbers = {id: number for number, id in enumerate(sizes)}
    names = ["/".join(map(str, id)) for id in sizes]
    listed = [numbers[id] if kind == "alloc" else ~numbers[id] for kind, id, _ in events()]
    lifetimes = Lifetimes(listed, list(sizes.values()))
    snapshot = snapshot_of(lifetimes, lambda id: Label(names[id]), Settings(), limit_bytes=2950 * MIB, physical=True)
    kinds: dict[int, str] = {}
    for entry in snapshot["device_traces"][0]:
        if entry["frames"]:
            kinds[entry["addr"]] = entry["frames"][0]["name"].partition("/")[0]
        of_oom = "logits" if entry["size"] == 393 * MIB else "activations"
        kind = of_oom if entry["action"] == "oom" else kinds.get(entry.get("addr", 0), "")
        stack = STACKS.get(kind, [])
        entry["frames"] = [{"name": name, "filename": file, "line": line} for name, file, line in stack]
        entry.pop("category", None)
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            kind = block["frames"][0]["name"].partition("/")[0] if block["frames"] else ""
            block["frames"] = [
                {"name": name, "filename": file, "line": line} for name, file, line in STACKS.get(kind, [])
            ]
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_bytes(pickle.dumps(snapshot, protocol=0))  # as text, so that it can be looked at
    print(f"wrote {TARGET.relative_to(Path.cwd()) if TARGET.is_relative_to(Path.cwd()) else TARGET.name}")


if __name__ == "__main__":
    main()
