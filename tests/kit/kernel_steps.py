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
    for shape in ((1000,), (64, 500), (100_000,), (64, 5000), (256, 5000)):
        for dtype in (torch.bfloat16, torch.float32, torch.int64):
            torch.zeros(shape, dtype=dtype, device="cuda").sort(dim=-1)
    torch.zeros(512, 64, device="cuda").sort(dim=0)
    torch.zeros(32_768, dtype=torch.int64, device="cuda").argsort(stable=True)


def rolls() -> None:
    x = torch.randn(64, 48, 32, device="cuda")
    for each in (x, x.transpose(0, 1)):
        each.roll(3, 1)
        each.roll((1, 2), (0, 1))
        each.roll((1, 2, 3), (0, 1, 2))
        each.roll(5)


def _weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype, device="cuda").requires_grad_()


def _ids(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device="cuda")


def bags() -> None:
    for mode in ("sum", "mean", "max"):
        for bags, rows in ((125, 5000), (1024, 30_000), (1024, 100)):
            F.embedding_bag(_ids(bags, 8), _weight(rows, 64), mode=mode).square().sum().backward()
    for mode in ("sum", "mean"):
        table = _weight(30_000, 64, dtype=torch.bfloat16)
        F.embedding_bag(_ids(1024, 8), table, mode=mode).square().sum().backward()
    F.embedding_bag(_ids(1000, 8), _weight(5000, 64), mode="sum", per_sample_weights=_weight(1000, 8)).sum().backward()
    starts = torch.arange(0, 8000, 8, device="cuda")
    F.embedding_bag(
        _ids(8000), _weight(5000, 64), starts, mode="mean", scale_grad_by_freq=True, padding_idx=0
    ).sum().backward()
    F.embedding_bag(_ids(8000, dtype=torch.int32), _weight(5000, 64), starts.int(), mode="sum").sum().backward()


def scattered() -> None:
    """Reductions whose formula adds to what is no zeros of its own, and selections that do."""
    for reduce in ("amax", "amin", "sum"):
        _weight(256, 256).scatter_reduce(0, _ids(256, 256), _weight(256, 256), reduce).square().sum().backward()
    for selected in (
        _weight(256, 256).index_select(0, _ids(256)), _weight(256, 256).gather(1, _ids(256, 256)),
        _weight(256, 256).index_add(0, _ids(256), _weight(256, 256)), _weight(256, 256).amax(1),
    ):  # fmt: skip
        selected.square().sum().backward()


def _attention(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, key.clone(), mask)


def _summed() -> list[Callable[[], Tensor]]:
    image, volume, line = ((4, 16, 32, 32), (2, 4, 8, 8, 8), (4, 16, 32))
    half = torch.bfloat16
    return [
        lambda: F.layer_norm(_weight(512, 256), (256,), _weight(256), _weight(256)),
        lambda: F.layer_norm(_weight(512, 256, dtype=half), (256,), _weight(256, dtype=half), _weight(256, dtype=half)),
        lambda: F.rms_norm(_weight(512, 256), (256,), _weight(256)),
        lambda: F.group_norm(_weight(*image), 4, _weight(16), _weight(16)),
        lambda: F.group_norm(_weight(*image, dtype=half), 4, _weight(16, dtype=half), _weight(16, dtype=half)),
        lambda: F.group_norm(_weight(256, 64), 8, _weight(64), _weight(64)),
        lambda: F.max_pool2d(_weight(*image), 2), lambda: F.max_pool1d(_weight(*line), 2),
        lambda: F.max_pool3d(_weight(*volume), 2),
        lambda: F.avg_pool2d(_weight(*image), 2), lambda: F.avg_pool3d(_weight(*volume), 2),
        lambda: F.adaptive_avg_pool2d(_weight(*image), 4), lambda: F.adaptive_avg_pool2d(_weight(*image), 1),
        lambda: F.adaptive_avg_pool3d(_weight(*volume), 4),
        lambda: F.adaptive_max_pool2d(_weight(*image), 4), lambda: F.adaptive_max_pool3d(_weight(*volume), 4),
        *(
            lambda how=how: F.pad(_weight(*image), (1, 1, 1, 1), how)
            for how in ("reflect", "replicate", "constant", "circular")
        ),
        lambda: F.pad(_weight(*line), (1, 1), "reflect"), lambda: F.pad(_weight(*volume), (1,) * 6, "reflect"),
        *(
            lambda how=how: F.interpolate(_weight(*image), scale_factor=2.0, mode=how)
            for how in ("nearest", "nearest-exact", "bilinear", "bicubic")
        ),
        lambda: F.interpolate(_weight(*image), scale_factor=0.5, mode="bilinear", antialias=True),
        lambda: F.interpolate(_weight(*line), scale_factor=2.0, mode="linear"),
        lambda: F.interpolate(_weight(*volume), scale_factor=2.0, mode="trilinear"),
        lambda: F.unfold(_weight(*image), 3), lambda: F.fold(_weight(4, 144, 900), (32, 32), 3),
        lambda: _weight(64, 128).unfold(1, 8, 4),
        lambda: F.log_softmax(_weight(256, 256), -1), lambda: F.softmax(_weight(256, 256), -1),
        lambda: F.embedding(_ids(512), _weight(1000, 64)), lambda: F.embedding(_ids(4096), _weight(1000, 64)),
        lambda: _weight(256, 256)[_ids(256)],
        lambda: torch.zeros(500, 64, device="cuda").index_put((_ids(8000),), _weight(64), accumulate=True),
        lambda: torch.einsum("btd,hdk->bhtk", _weight(4, 64, 64), _weight(4, 64, 16)),
        lambda: _weight(256, 256) @ _weight(256, 256), lambda: F.linear(_weight(4, 64, 64), _weight(32, 64), _weight(32)),
        lambda: _weight(128, 128)[:, ::2] @ _weight(64, 32), lambda: _weight(4, 128, 128)[:, :, ::2] @ _weight(4, 64, 32),
        lambda: _attention(_weight(2, 4, 128, 64), _weight(2, 4, 128, 64), torch.zeros(2, 1, 128, 128, device="cuda")),
        lambda: _attention(_weight(2, 4, 128, 64), _weight(2, 4, 64, 64)),
        lambda: _attention(_weight(2, 4, 64, 128).transpose(2, 3), _weight(2, 4, 64, 128).transpose(2, 3)),
        lambda: _attention(*(_weight(2, 4, 64, 128, dtype=half).transpose(2, 3) for _ in "qk")),
        lambda: F.silu(_weight(256, 256)), lambda: F.gelu(_weight(256, 256)), lambda: F.glu(_weight(256, 256)),
    ]  # fmt: skip


def sums() -> None:
    """Gradients of a plain sum, one number for all elements, which many kernels copy; and ordinary ones."""
    for make in _summed():
        make().sum().backward()
        out = make()
        out.backward(torch.ones_like(out, memory_format=torch.contiguous_format))


def other_convolutions() -> None:
    image, half = (4, 16, 32, 32), torch.bfloat16
    last = torch.ones(*image, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
    for call in (
        lambda: F.conv_transpose2d(_weight(4, 16, 16, 16), _weight(16, 8, 4, 4), _weight(8), stride=2, padding=1),
        lambda: F.conv_transpose2d(_weight(4, 16, 16, 16), _weight(16, 8, 2, 2), stride=2),
        lambda: F.conv_transpose2d(torch.ones(4, 16, 16, 16, device="cuda"), _weight(16, 8, 4, 4), _weight(8)),
        lambda: F.conv_transpose1d(_weight(4, 16, 16), _weight(16, 8, 4), _weight(8), stride=2),
        lambda: F.conv1d(_weight(4, 16, 32), _weight(8, 16, 3), _weight(8)),
        lambda: F.conv1d(_weight(4, 16, 32), _weight(8, 16, 1), _weight(8)),
        lambda: F.conv2d(_weight(*image), _weight(8, 16, 3, 3), _weight(8), stride=2, padding=1),
        lambda: F.conv2d(_weight(*image), _weight(8, 16, 1, 1), _weight(8)),
        lambda: F.conv2d(last, _weight(8, 16, 3, 3), _weight(8), padding=1),
        lambda: F.conv2d(_weight(*image, dtype=half), _weight(8, 16, 3, 3, dtype=half), _weight(8, dtype=half)),
    ):
        with torch.backends.cudnn.flags(enabled=False):
            call().sum().backward()
            out = call()
            out.backward(torch.ones_like(out, memory_format=torch.contiguous_format))


def single_channels() -> None:
    """Convolutions of single channels beside cuDNN, which takes none of these: along one dimension, as the short ones of
    Mamba and Qwen3.5, whose rows lie across; along two and three, of any dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        across = torch.ones(2, 128, 64, device="cuda", dtype=dtype).requires_grad_().transpose(1, 2)
        for call in (
            lambda x=across, d=dtype: F.conv1d(x, _weight(64, 1, 4, dtype=d), groups=64, padding=3),
            lambda d=dtype: F.conv1d(_weight(2, 64, 128, dtype=d), _weight(128, 1, 4, dtype=d), groups=64),
            lambda d=dtype: F.conv2d(_weight(2, 64, 16, 16, dtype=d), _weight(64, 1, 3, 3, dtype=d), groups=64),
            lambda d=dtype: F.conv3d(_weight(2, 64, 4, 8, 8, dtype=d), _weight(64, 1, 3, 3, 3, dtype=d), groups=64),
        ):
            out = call()
            out.backward(torch.ones_like(out, memory_format=torch.contiguous_format))


class _Block(nn.Module):
    """A residual block, with attention over pixels whose heads lie across."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, inner), nn.SiLU(), nn.Conv2d(inner, outer, 3, padding=1))
        self.skip = nn.Conv2d(inner, outer, 1)
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(8, outer),
            nn.Conv2d(outer, 3 * outer, 1),
            nn.Conv2d(outer, outer, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.skip(x) + self.first(x)
        B, C, H, W = x.shape
        q, k, v = self.qkv(self.norm(x)).view(B, 3, 4, C // 4, H * W).transpose(-1, -2).unbind(1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(B, C, H, W))


def unet() -> None:
    """In bfloat16, under autocast and in fp32, up by both ways."""
    for dtype, cast in ((torch.bfloat16, False), (torch.float32, True), (torch.float32, False)):
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), _Block(32, 32), nn.Conv2d(32, 64, 3, stride=2, padding=1), _Block(64, 64),
            nn.Upsample(scale_factor=2), nn.Conv2d(64, 64, 3, padding=1), nn.ConvTranspose2d(64, 32, 4, 2, 1),
            nn.Conv2d(32, 3, 3, padding=1),
        ).to("cuda", dtype)  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            with torch.backends.cudnn.flags(enabled=False), torch.autocast("cuda", torch.bfloat16, enabled=cast):
                loss = F.mse_loss(model(torch.zeros(4, 3, 16, 16, dtype=dtype, device="cuda")).float(), _zero())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def _zero() -> Tensor:
    return torch.zeros(4, 3, 32, 32, device="cuda")


def inference() -> None:
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
    step.__name__: step for step in (convolutions, normed_convolutions, lstm, gru, masks, indices, counted_embedding, sorts, rolls, inference,
    bags, scattered, sums, other_convolutions, single_channels, unet)
}  # fmt: skip
# Of these the smallest allocations differ, in block masks and in what Inductor measures; the peaks do not.
FLEX: dict[str, Callable[[], None]] = {"unfused_flex": unfused_flex, "fused_flex": fused_flex}
