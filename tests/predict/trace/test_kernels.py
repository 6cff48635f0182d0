"""What kernels and cuDNN take for themselves in a trace, held to PyTorch's CUDA build and to cuDNN's own answers."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from foretrain.base.units import MIB
from foretrain.predict.trace.kernels.workspaces import NOTE, workspace_bytes
from foretrain.predict.trace.session import Traced, Tracing, trace
from tests.cuda_build.convolutions import KEPT, over
from tests.kit.command import REPO
from tests.kit.kernel_steps import FLEX, STEPS

MEASURED = json.loads((REPO / "tests" / "data" / "kernel_steps.json").read_text())


@pytest.mark.parametrize("name", STEPS)
def test_kernels_take_what_they_take_in_the_cuda_build(name: str) -> None:
    """`python -m tests.cuda_build.steps` measures the same code: every allocation in its order, and both peaks."""
    found = trace(lambda on: STEPS[name]())
    sizes = [found.trace.allocations[event].nbytes for event in found.trace.events if event >= 0]
    assert [size for size in sizes if size] == MEASURED[name]["allocations"]
    assert found.peak_allocated_bytes == MEASURED[name]["allocated_bytes"]
    assert found.peak_reserved_bytes == MEASURED[name]["reserved_bytes"]
    assert found.high is None


@pytest.mark.parametrize("name", FLEX)
def test_flex_attention_takes_what_it_takes_in_the_cuda_build(name: str) -> None:
    """With and without torch.compile; without, a trace with compile=True left out the scores, silently. In a process of
    its own: after hundreds of other tests in one process Dynamo has been seen not to fuse it, and why is not known."""
    code = f"from tests.predict.trace.test_kernels import compare_flex; compare_flex({name!r})"
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr


def compare_flex(name: str) -> None:
    """Assert that the traces of a step with FlexAttention are what the CUDA build measured."""
    for compile in (False, True) if name == "unfused_flex" else (True,):
        found = trace(lambda on: FLEX[name](), compile=compile)
        assert found.peak_allocated_bytes == pytest.approx(MEASURED[name]["allocated_bytes"], rel=1e-5)
        assert found.peak_reserved_bytes == MEASURED[name]["reserved_bytes"]
        assert found.notes == ()


# -- cuDNN ---------------------------------------------------------------------------------------------------


def test_cudnn_wants_at_most_the_upper_end() -> None:
    """450 answers of cuDNN 9.20 (`python -m tests.cuda_build.convolutions`): what it would take first, and the most."""
    rows = json.loads(KEPT.read_text())
    count, first, largest = over(rows)
    assert (count, len(first)) == (450, 0)
    assert len(largest) <= 2
    assert max(largest) < 1.15
    wanted = [answer[0] for row in rows for answer in row["bytes"].values()]
    assert sum(each > 8 * MIB for each in wanted) > 130  # so the lower end alone is not enough


def strided(on: Tracing) -> None:
    """One convolution of 64 x 3 x 224 x 224, without a gradient of its input."""
    layer = nn.Conv2d(3, 64, 7, stride=2, padding=3).to(on.device)
    layer(torch.empty(64, 3, 224, 224, device=on.device)).sum().backward()


def test_convolutions_are_a_range() -> None:
    found = trace(strided)
    assert found.notes == (NOTE,)
    assert found.high.high is None
    x, y = (64, 3, 224, 224), (64, 64, 112, 112)
    tensors = [torch.empty(shape, device="meta") for shape in (x, (64, 3, 7, 7), y)]
    most = workspace_bytes(tensors[0], tensors[1], tensors[2], 1, benchmark=False)
    # Each value once more and again, three channels as eight: 2 x (98 + 196) MiB; partial sums are less than 64 MiB.
    assert most == 2 * (98 + 196) * MIB + 64 * MIB
    taken = [sum(a.nbytes == most for a in each.trace.allocations) for each in (found, found.high)]
    assert taken == [0, 2]  # forward, and for the gradient of the weight
    assert found.peak_allocated_bytes + most // 2 < found.high.peak_allocated_bytes < found.peak_allocated_bytes + most
    assert not found.fits(found.peak_reserved_bytes)
    assert found.fits(found.high.peak_reserved_bytes)
    low, high = found.peak_allocated_bytes, found.high.peak_allocated_bytes
    assert f"{low / 2**20:.0f} MiB to {high / 2**20:.0f} MiB allocated" in str(found)


def test_measuring_widens_the_range() -> None:
    def ends(benchmark: bool) -> Traced:
        with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark):
            return trace(strided)

    plain, measuring = ends(False), ends(True)
    assert measuring.peak_allocated_bytes == plain.peak_allocated_bytes
    assert measuring.high.peak_allocated_bytes > plain.high.peak_allocated_bytes + 500 * MIB


def test_convolutions_without_cudnn_are_exact() -> None:
    def single(on: Tracing) -> None:
        nn.Conv2d(32, 32, 3, groups=32).to(on.device)(torch.empty(4, 32, 64, 64, device=on.device)).sum().backward()

    found = trace(single)
    assert (found.high, found.notes) == (None, ())


def test_cudnn_copies_what_is_laid_out_otherwise() -> None:
    """Weights of channels last and a plain input: 4 x 32 x 64 x 64 floats are copied, 2 MiB, and the result is last."""

    def code(on: Tracing) -> None:
        layer = nn.Conv2d(32, 32, 3, padding=1).to(on.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        out = layer(torch.empty(4, 32, 64, 64, device=on.device))
        assert out.is_contiguous(memory_format=torch.channels_last)

    sizes = [a.nbytes for a in trace(code).trace.allocations if a.nbytes >= MIB]
    assert sizes == [2 * MIB] * 3
