"""How much memory cuDNN wants for convolutions, asked of cuDNN itself for cards that are not there.

    python -m tests.cuda_build.convolutions [--count N] [--seed N] [--write]

From cuDNN 9.8 on its heuristics answer for a description of a card (CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR), without one.
Random convolutions, each forward, for the gradient of its input and of its weight: the workspace of the first way that
cuDNN proposes, which PyTorch runs, and the largest of all. `--write` keeps them in tests/data/cudnn_workspaces.json, to
which the fast suite holds the bound; those there were made with `--count 150 --seed 7 --write`. It needs the environment
that `make cuda-truth` makes.
"""

import argparse
import ctypes
import json
import random
import sys
from typing import Any

import torch

from foretrain.base.units import MIB
from foretrain.predict.trace.kernels.workspaces import workspace_bytes
from tests.cuda_build.environment import PYTHON
from tests.cuda_build.grid import REPO

KEPT = REPO / "tests" / "data" / "cudnn_workspaces.json"
DTYPES = {"float32": 0, "float16": 2, "bfloat16": 9}
INT64, FLOAT, HEURISTIC, DESCRIPTOR, CHAR = 3, 4, 8, 15, 24  # cudnnBackendAttributeType_t
DTYPE, MODE = 1, 7
# Descriptor, and its attributes alpha, beta, convolution, weight, input, output (cudnn_graph.h).
OPERATIONS = {
    "forward": (10, (700, 701, 702, 703, 704, 705)),
    "input": (12, (706, 707, 708, 709, 710, 711)),
    "weight": (11, (712, 713, 714, 715, 716, 717)),
}
INSTANT, FALLBACK = 0, 2
CARDS = {
    "RTX 4070": (46, 890, 101376, 24, 1536, 12 << 30, 36 * MIB, 2_475_000, 10_501_000),
    "RTX 4090": (128, 890, 101376, 24, 1536, 24 << 30, 72 * MIB, 2_520_000, 10_501_000),
    "A100": (108, 800, 166912, 32, 2048, 40 << 30, 40 * MIB, 1_410_000, 1_215_000),
    "H100": (132, 900, 232448, 32, 2048, 80 << 30, 50 * MIB, 1_980_000, 2_619_000),
}


class Refused(RuntimeError):
    """cuDNN has no such way."""


class Cudnn:
    """The library, and the descriptors that it is asked with."""

    def __init__(self) -> None:
        folder = next(PYTHON.parent.parent.glob("lib/python*/site-packages/nvidia/cudnn/lib"))
        self.library = ctypes.CDLL(str(folder / "libcudnn.so.9"), mode=ctypes.RTLD_GLOBAL)
        self.library.cudnnGetErrorString.restype = ctypes.c_char_p

    def check(self, status: int) -> None:
        if status:
            raise Refused(self.library.cudnnGetErrorString(status).decode())

    def descriptor(self, kind: int, *attributes: tuple[int, int, Any, list[Any]]) -> ctypes.c_void_p:
        """A finalized descriptor; attributes as (name, type, C type, values)."""
        made = self.empty(kind)
        for name, type_, c_type, values in attributes:
            array = (c_type * len(values))(*values)
            self.check(self.library.cudnnBackendSetAttribute(made, name, type_, ctypes.c_int64(len(values)), array))
        self.check(self.library.cudnnBackendFinalize(made))
        return made

    def empty(self, kind: int) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self.check(self.library.cudnnBackendCreateDescriptor(kind, ctypes.byref(made)))
        return made

    def card(self, name: str) -> ctypes.c_void_p:
        sms, version, shared, blocks, threads, memory, cache, clock, memory_clock = CARDS[name]
        facts = {
            "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
            "multiProcessorCount": sms, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
            "maxSharedMemoryPerBlockOptin": shared, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536,
            "maxCtasPerSM": blocks, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": threads, "pciDeviceId": 0,
            "isTccDriver": 0, "supportCoopLaunch": 1, "totalGlobalMem": memory, "smClockRateKHz": clock,
            "memClockRateKHz": memory_clock, "l2CacheSize": cache, "cudaDeviceId": 0, "deviceVer": version,
            "driverVer": 13000, "deviceName": name,
        }  # fmt: skip
        text = list(json.dumps(facts).encode() + b"\0")
        return self.descriptor(38, (2702, CHAR, ctypes.c_char, [bytes([each]) for each in text]))

    def graph(self, of: str, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, row: dict[str, Any]) -> Any:
        """The operation on tensors of these shapes and layouts, in a graph of its own."""

        def tensor(number: int, t: torch.Tensor) -> ctypes.c_void_p:
            return self.descriptor(
                17, (901, DTYPE, ctypes.c_int, [DTYPES[row["dtype"]]]), (902, INT64, ctypes.c_int64, list(t.shape)),
                (903, INT64, ctypes.c_int64, list(t.stride())), (906, INT64, ctypes.c_int64, [number]),
                (900, INT64, ctypes.c_int64, [16]),
            )  # fmt: skip

        spatial = x.dim() - 2
        plain = [(105, row["padding"]), (104, row["padding"]), (102, 1), (103, row["stride"])]
        convolution = self.descriptor(
            1, (106, INT64, ctypes.c_int64, [spatial]), (100, DTYPE, ctypes.c_int, [0]), (101, MODE, ctypes.c_int, [1]),
            *((name, INT64, ctypes.c_int64, [value] * spatial) for name, value in plain),
        )  # fmt: skip
        kind, (alpha, beta, how, its_weight, its_input, its_output) = OPERATIONS[of]
        names = (how, its_weight, its_input, its_output)
        parts = (convolution, tensor(2, weight), tensor(1, x), tensor(3, y))
        operation = self.descriptor(
            kind, *((name, DESCRIPTOR, ctypes.c_void_p, [part.value]) for name, part in zip(names, parts, strict=True)),
            (alpha, FLOAT, ctypes.c_float, [1.0]), (beta, FLOAT, ctypes.c_float, [0.0]),
        )  # fmt: skip
        return self.descriptor(15, (801, DESCRIPTOR, ctypes.c_void_p, [operation.value]))

    def workspaces(self, graph: ctypes.c_void_p, card: ctypes.c_void_p, mode: int) -> list[int]:
        """Bytes that each way wants, in cuDNN's order."""
        asked = self.descriptor(
            4, (201, DESCRIPTOR, ctypes.c_void_p, [graph.value]), (200, HEURISTIC, ctypes.c_int, [mode]),
            (204, DESCRIPTOR, ctypes.c_void_p, [card.value]),
        )  # fmt: skip
        count = ctypes.c_int64()
        get = self.library.cudnnBackendGetAttribute
        self.check(get(asked, 202, DESCRIPTOR, ctypes.c_int64(0), ctypes.byref(count), None))
        ways = [self.empty(3) for _ in range(count.value)]
        array = (ctypes.c_void_p * max(1, len(ways)))(*(way.value for way in ways))
        self.check(get(asked, 202, DESCRIPTOR, count, ctypes.byref(count), array))
        found = []
        for way in ways[: count.value]:
            try:
                plan = self.descriptor(
                    5, (401, DESCRIPTOR, ctypes.c_void_p, [way.value]), (407, DESCRIPTOR, ctypes.c_void_p, [card.value])
                )
            except Refused:
                continue
            nbytes = (ctypes.c_int64 * 1)()
            self.check(get(plan, 402, INT64, ctypes.c_int64(1), ctypes.byref(count), nbytes))
            found.append(nbytes[0])
        return found


def random_row(draw: random.Random) -> dict[str, Any] | None:
    """A convolution as networks have them; None where it would be too large or has no output."""
    spatial = draw.choices((2, 1, 3), (85, 8, 7))[0]
    sides = {1: (64, 256, 1000, 3000), 2: (7, 14, 16, 28, 32, 56, 64, 112, 128, 224), 3: (8, 16, 32)}[spatial]
    rows, side, kernel = (
        draw.choice((1, 2, 4, 8, 16, 32, 64)),
        draw.choice(sides),
        draw.choice((1, 2, 3, 3, 3, 4, 5, 7)),
    )
    inner = draw.choice((1, 3, 4, 16, 32, 48, 64, 96, 128, 192, 256, 320, 512, 640, 768, 1024, 1280))
    outer, groups = (
        draw.choice((16, 32, 64, 96, 128, 192, 256, 320, 512, 640, 768, 1024)),
        draw.choice((1, 1, 1, 2, 8, 32)),
    )
    groups = 1 if inner % groups or outer % groups else groups
    row = {
        "x": [rows, inner, *[side] * spatial], "weight": [outer, inner // groups, *[kernel] * spatial],
        "groups": groups, "stride": draw.choice((1, 1, 1, 2, kernel)), "padding": draw.choice((0, kernel // 2)),
        "dtype": draw.choice(list(DTYPES)), "channels_last": spatial > 1 and draw.random() < 0.3,
        "gpu": draw.choice(list(CARDS)),
    }  # fmt: skip
    largest = rows * max(inner, outer) * side**spatial
    return row if side + 2 * row["padding"] >= kernel and largest < 10**8 else None


def tensors(row: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    spatial, kernel = len(row["x"]) - 2, row["weight"][-1]
    out = (row["x"][-1] + 2 * row["padding"] - kernel) // row["stride"] + 1
    last = torch.channels_last if spatial == 2 else torch.channels_last_3d
    layout = last if row["channels_last"] else torch.contiguous_format
    shapes = row["x"], row["weight"], [row["x"][0], row["weight"][0], *[out] * spatial]
    x, weight, y = (torch.empty(s, dtype=getattr(torch, row["dtype"]), device="meta") for s in shapes)
    return x.to(memory_format=layout), weight.to(memory_format=layout), y.to(memory_format=layout)


def asked(cudnn: Cudnn, row: dict[str, Any]) -> dict[str, Any]:
    """The row with cuDNN's answers: for each operation [first, largest] in bytes."""
    card, found = cudnn.card(row["gpu"]), {}
    for name in OPERATIONS:
        graph = cudnn.graph(name, *tensors(row), row)
        ways, others = cudnn.workspaces(graph, card, INSTANT), cudnn.workspaces(graph, card, FALLBACK)
        if every := [*ways, *others]:
            found[name] = [every[0], max(every)]
    return {**row, "bytes": found}


def over(rows: list[dict[str, Any]]) -> tuple[int, list[float], list[float]]:
    """How many answers there are, and by what factor those above the bound exceed it: of the first ways, of all."""
    count, first, largest = 0, [], []
    for row in rows:
        x, weight, y = tensors(row)
        bound = workspace_bytes(x, weight, y, row["groups"], benchmark=False)
        most = workspace_bytes(x, weight, y, row["groups"], benchmark=True)
        for one, every in row["bytes"].values():
            count += 1
            first += [one / bound] if one > bound else []
            largest += [every / most] if every > most else []
    return count, first, largest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"keep them in {KEPT.relative_to(REPO)}")
    args = parser.parse_args()
    draw, cudnn, rows = random.Random(args.seed), Cudnn(), []
    while len(rows) < args.count:
        row = random_row(draw)
        if row is not None:
            rows.append(asked(cudnn, row))
    count, first, largest = over(rows)
    for what, found in (("first way", first), ("largest of all ways", largest)):
        worst = f", by {max(found):.2f} at most" if found else ""
        print(f"{what}: {len(found)} of {count} above the bound, {100 * len(found) / count:.2f} %{worst}")
    if args.write:
        KEPT.write_text("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
