"""What will my own model take? An MLP-Mixer with SGD and a slow copy of itself as teacher, traced for two cards.

    python examples/trace_any_model.py

No GPU is needed and no weight is allocated. The model is neither a GPT nor foretrain's: `foretrain.trace` runs the
training code as it is, on fake tensors of the card.
"""

import copy
from collections import Counter

import torch
from torch import nn

import foretrain

PATCHES, WIDTH, LAYERS, BATCH = 196, 512, 8, 256


class Mixer(nn.Module):
    """Mixes patches, then channels (Tolstikhin et al. 2021, arXiv:2105.01601)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.patches = nn.Sequential(nn.Linear(PATCHES, 256), nn.GELU(), nn.Linear(256, PATCHES))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 2048), nn.GELU(), nn.Linear(2048, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.patches(self.norm_1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_2(x))


def train(on) -> None:  # type: ignore[no-untyped-def]
    """Three steps of self-distillation."""
    student = nn.Sequential(*(Mixer() for _ in range(LAYERS))).to(on.device)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        on.phase("first step" if step == 0 else "later steps")
        images = torch.empty(BATCH, PATCHES, WIDTH, device=on.device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.no_grad():
                wanted = teacher(images)
            loss = (student(images) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.01)


def main() -> None:
    """Trace and print."""
    for gpu in ("RTX 3060", "RTX 4090"):
        found = foretrain.trace(train, gpu=gpu)
        sizes = (found.peak_allocated_bytes, found.peak_reserved_bytes, found.smallest_limit_bytes)
        allocated, reserved, lives = (f"{size / 2**30:.2f} GiB" for size in sizes)
        left = (found.gpu.memory_bytes or 0) - (300 << 20)  # about what the CUDA context takes
        verdict = "fits" if found.fits(left) else "does not fit"
        print(f"{gpu}: {verdict}; allocated {allocated}, reserved {reserved}, lives from {lives} on (predicted)")
        for note in found.notes:  # what the answer leaves out; nothing here
            print(f"  {note}")
    peak = max(found.replay().phases, key=lambda phase: phase.allocated_bytes)
    alive = Counter[str]()
    for allocation in found.trace.alive_at(peak.position):
        alive[allocation.category] += allocation.nbytes
    print(f"alive at the highest moment ({peak.phase}):")
    for category, size in alive.most_common():
        print(f"  {category:16} {size / 2**20:9.1f} MiB")


if __name__ == "__main__":
    main()
