"""Training code whose kernels take memory of their own. tests/cuda_build/steps.py runs it in PyTorch's CUDA build."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def _learn(model: Callable[[Tensor], Tensor], *shape: int, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.randn(*shape, device="cuda")).square().mean().backward()


def convolutions() -> None:
    """By PyTorch's own kernels, which write all patches of a sample beside each other."""
    with torch.backends.cudnn.flags(enabled=False):
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU(),
            nn.Conv2d(64, 64, 1), nn.Conv2d(64, 32, 5, bias=False),
        )  # fmt: skip
        _learn(model.to("cuda"), 16, 3, 64, 64)


def normed_convolutions() -> None:
    """As in a ResNet: batch norm and pooling between them, and one of single channels."""
    with torch.backends.cudnn.flags(enabled=False):
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.Conv2d(32, 64, 1), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        _learn(model.to("cuda"), 16, 3, 64, 64)


def lstm() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        model = nn.LSTM(64, 128, num_layers=2).to("cuda")
        _learn(lambda x: model(x)[0], 20, 16, 64)


def gru() -> None:
    """Both directions, with dropout between layers."""
    with torch.backends.cudnn.flags(enabled=False):
        model = nn.GRU(64, 128, num_layers=2, bidirectional=True, dropout=0.1).to("cuda")
        _learn(lambda x: model(x)[0], 20, 16, 64)


def masks() -> None:
    """Of nothing but zeros: a card that computes nothing finds no rows in any mask."""
    x = torch.randn(4096, 512, device="cuda")
    for count in (4096, 6000, 100_000, 5_000_000):
        torch.zeros(count, dtype=torch.bool, device="cuda").nonzero()
    torch.where(torch.zeros(2, 300, 400, dtype=torch.int64, device="cuda"))
    mask = torch.zeros(4096, dtype=torch.bool, device="cuda")
    x[mask].sum()
    x.masked_select(mask[:, None]).sum()


def indices() -> None:
    """Rows that are added up: few and many of them, by one index and by two, and in the backward pass."""
    for rows, places, dtype in (
        (100, 500, torch.float32),
        (20_000, 5000, torch.float16),
        (65_536, 70_000, torch.float32),
    ):
        table = torch.zeros(places, 64, dtype=dtype, device="cuda")
        index = torch.zeros(rows, dtype=torch.int64, device="cuda")
        table.index_put_((index,), torch.zeros(rows, 64, dtype=dtype, device="cuda"), accumulate=True)
    grid, both = torch.zeros(500, 400, 8, device="cuda"), torch.zeros(20_000, dtype=torch.int64, device="cuda")
    grid.index_put_((both, both.clone()), torch.zeros(20_000, 8, device="cuda"), accumulate=True)
    weight = torch.randn(30_000, 128, device="cuda", requires_grad=True)
    weight[torch.zeros(8, 1024, dtype=torch.int64, device="cuda")].square().sum().backward()


def counted_embedding() -> None:
    table = nn.Embedding(30_000, 128, scale_grad_by_freq=True, device="cuda")
    table(torch.zeros(8, 1024, dtype=torch.int64, device="cuda")).square().sum().backward()


def sorts() -> None:
    """Short rows, one long one, several and many long ones; keys of two, four and eight bytes."""
    for shape in ((1000,), (64, 500), (100_000,), (64, 5000), (256, 5000)):
        for dtype in (torch.bfloat16, torch.float32, torch.int64):
            torch.zeros(shape, dtype=dtype, device="cuda").sort(dim=-1)
    torch.zeros(512, 64, device="cuda").sort(dim=0)
    torch.zeros(32_768, dtype=torch.int64, device="cuda").argsort(stable=True)


def rolls() -> None:
    """Of a contiguous tensor and of one that is not, along one dimension, two and three, and along all as one."""
    x = torch.randn(64, 48, 32, device="cuda")
    for each in (x, x.transpose(0, 1)):
        each.roll(3, 1)
        each.roll((1, 2), (0, 1))
        each.roll((1, 2, 3), (0, 1, 2))
        each.roll(5)


def inference() -> None:
    """Without autograd, which takes ops apart: products, attention and a loss, plain and under autocast."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to("cuda")
    for enabled in (False, True):
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            y = model(torch.zeros(64, 16, 256, device="cuda"))
            (y @ y.transpose(1, 2)).softmax(-1)
            y = y[:, None]
            y = F.layer_norm(F.scaled_dot_product_attention(y, y, y, is_causal=True), (256,))
            F.cross_entropy(y.reshape(-1, 256), torch.zeros(1024, dtype=torch.int64, device="cuda"))


def _flex(attend: Callable[..., Tensor], steps: int) -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, B=None, H=None, Q_LEN=1024, KV_LEN=1024, device="cuda")
    for _ in range(steps):
        q, k, v = (torch.randn(2, 8, 1024, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in "qkv")
        attend(q, k, v, block_mask=mask).square().mean().backward()


def unfused_flex() -> None:
    """flex_attention without torch.compile: all scores in fp32."""
    _flex(flex_attention, steps=1)


def fused_flex() -> None:
    _flex(torch.compile(flex_attention), steps=2)


STEPS: dict[str, Callable[[], None]] = {
    step.__name__: step for step in (convolutions, normed_convolutions, lstm, gru, masks, indices, counted_embedding, sorts, rolls, inference)
}  # fmt: skip
# Of these the smallest allocations differ, in block masks and in what Inductor measures; the peaks do not.
FLEX: dict[str, Callable[[], None]] = {"unfused_flex": unfused_flex, "fused_flex": fused_flex}
