"""Training code that allocates on side streams. tests/cuda_build/streams.py runs it in PyTorch's CUDA build."""

import torch
from torch import Tensor, nn


def prefetching() -> None:
    """Batches are copied on a stream of their own while the one before is worked on, and recorded as used there."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    copies = torch.cuda.Stream()

    def fetch(rows: int) -> Tensor:
        with torch.cuda.stream(copies):
            return torch.empty(rows, 1024).to("cuda", non_blocking=True)

    batch = fetch(2048)
    for rows in (4096, 3072, 2048, 1024):
        torch.cuda.current_stream().wait_stream(copies)
        batch.record_stream(torch.cuda.current_stream())
        following = fetch(rows)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        batch = following


def two_branches() -> None:
    """Half of a model runs on a side stream; so does its backward pass, although nothing says so."""
    side = torch.cuda.Stream()
    first, second = (nn.Linear(2048, 2048, bias=False, device="cuda") for _ in range(2))
    for _ in range(3):
        x = torch.randn(4096, 2048, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            a = torch.tanh(first(x))
            a = torch.tanh(a * 2)
        b = torch.tanh(second(x) * 3)
        torch.cuda.current_stream().wait_stream(side)
        a.record_stream(torch.cuda.current_stream())
        (a * b).sum().backward()
        x.record_stream(side)


def gathering() -> None:
    """As FSDP2: weights are gathered on one stream ahead of use, and gradients are reduced on another."""
    gathers, reduces = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)
    shards = [torch.randn(512, 1024, device="cuda") for _ in range(4)]
    main = torch.cuda.current_stream()

    def gather(shard: Tensor) -> Tensor:
        with torch.cuda.stream(gathers):
            whole = torch.cat([shard, shard])
        main.wait_stream(gathers)
        whole.record_stream(main)
        return whole.requires_grad_()

    for _ in range(2):
        x = torch.randn(2048, 1024, device="cuda")
        weights = []
        for shard in shards:
            weight = gather(shard)
            weight.register_hook(lambda gradient: _reduced(gradient, reduces))
            weights.append(weight)
            x = torch.relu(x @ weight)
        x.sum().backward()
        del weights, weight  # type: ignore[possibly-unbound]


def _reduced(gradient: Tensor, stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1)
        half = gradient[:512] * 2
    gradient.record_stream(stream)
    half.record_stream(torch.cuda.default_stream())


STEPS = {"prefetching": prefetching, "two_branches": two_branches, "gathering": gathering}
