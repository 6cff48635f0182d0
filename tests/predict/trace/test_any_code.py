"""`foretrain.trace` on code as people write it: what it asks of torch.cuda, how it sizes its memory, what it cannot do."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._triton import has_triton_package

from foretrain.base.units import GIB, MIB
from foretrain.hardware.catalogue import find
from foretrain.predict.trace.card import guard
from foretrain.predict.trace.card.guard import StandInError
from foretrain.predict.trace.forked import ChildEnded
from foretrain.predict.trace.session import Tracing, trace
from foretrain.predict.trace.traced import Traced
from foretrain.predict.trace.tracer import Tracer
from tests.kit.command import REPO

SIDE = 16384  # a square of it in fp32 is one GiB
OUTSIDE = nn.Linear(8, 8)


def square() -> Tensor:
    return torch.empty(SIDE, SIDE, device="cuda")


def linear(*x: int, device: str = "cuda") -> Tensor:
    return nn.Linear(x[-1], 8).to(device)(torch.empty(*x, device=device)).sum()


# -- torch.cuda --------------------------------------------------------------------------------------------


def test_the_common_device_idiom_is_traced_on_the_card() -> None:
    def code(on: Tracing) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        weight = torch.empty(1024, 1024, device=device, requires_grad=True)
        (weight @ weight).sum().backward()

    assert trace(code).peak_allocated_bytes >= 3 * 4 * MIB
    assert torch.cuda.is_available.__module__ == "torch.cuda"  # put back


def test_what_runs_on_the_cpu_takes_nothing_on_the_card() -> None:
    found = trace(lambda on: (linear(64, 64, device="cpu").backward(), torch.empty(4 * MIB, device="cuda")))
    assert found.peak_allocated_bytes == 16 * MIB  # no cuBLAS workspace either
    assert any("ran on CPU tensors" in note for note in found.notes)
    with pytest.raises(StandInError, match="put nothing on the RTX 4070"):
        trace(lambda on: linear(64, 64, device="cpu").backward())


def test_torch_cuda_answers_for_the_card() -> None:
    def code(on: Tracing) -> None:
        gpu = find("H200")
        assert torch.cuda.device_count() == 1
        assert torch.cuda.current_device() == 0
        assert torch.cuda.get_device_name() == torch.cuda.get_device_properties(0).name == gpu.name
        assert torch.cuda.get_device_capability() == (9, 0)
        assert torch.cuda.get_device_properties(0).total_memory == gpu.memory_bytes
        assert torch.cuda.is_bf16_supported()
        torch.cuda.set_device(0)
        torch.cuda.manual_seed_all(1)
        generator = torch.Generator(device="cuda").manual_seed(1)
        assert generator.device.type == "cuda"
        assert torch.randn(4, device="cuda", generator=generator).is_cuda
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
            torch.empty(4, device="cuda").record_stream(torch.cuda.current_stream())
        end.record()
        torch.cuda.synchronize()
        assert start.elapsed_time(end) > 0

    trace(code, gpu="H200")


def test_an_emptied_cache_is_replayed() -> None:
    def code(on: Tracing) -> None:
        a = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        del a
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
        on.phase("later")
        b = torch.empty(96 * MIB, dtype=torch.uint8, device="cuda")
        del b

    found = trace(code)
    assert not found.notes
    assert found.peak_reserved_bytes == 96 * MIB


def test_memory_statistics_are_those_of_the_trace_so_far() -> None:
    def code(on: Tracing) -> None:
        a = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == 64 * MIB
        del a
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (0, 64 * MIB)
        assert torch.cuda.max_memory_allocated() == 64 * MIB
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0
        free, total = torch.cuda.mem_get_info()
        assert total - free == 64 * MIB
        assert "65536 KiB" in torch.cuda.memory_summary()

    trace(code)


# -- storages that change their size -----------------------------------------------------------------------


def test_a_tensor_that_grows_is_counted() -> None:
    def code(on: Tracing) -> None:
        x, sums, grown = square(), torch.empty(0, device="cuda"), torch.empty(0, device="cuda")
        torch.add(x, x, out=sums)
        grown.resize_(SIDE, SIDE)

    assert trace(code).peak_allocated_bytes == 3 * GIB


def test_the_new_memory_is_there_before_the_old_goes() -> None:
    """resize_bytes_cuda copies what was there."""

    def code(on: Tracing) -> None:
        x = torch.empty(MIB, device="cuda")
        x.resize_(2 * MIB)
        on.phase("after")
        x.add_(1)

    assert [peak.allocated_bytes for peak in trace(code).replay().phases] == [12 * MIB, 8 * MIB]


def test_a_storage_that_is_emptied_and_filled_again() -> None:
    def code(on: Tracing) -> None:
        x = square()
        x.untyped_storage().resize_(0)
        y = square()
        del y
        x.untyped_storage().resize_(4 * SIDE * SIDE)

    found = trace(code)
    assert found.peak_allocated_bytes == GIB
    assert len(found.trace.allocations) == 4
    assert all(a.freed_at is not None for a in found.trace.allocations)


# -- what is said ------------------------------------------------------------------------------------------


def test_a_loss_can_be_printed() -> None:
    def code(on: Tracing) -> None:
        loss = linear(4, 8)
        assert f"{loss:.4f}" == "?"
        assert f"{loss:>8}" == "       ?"
        assert f"{loss}" == "?"
        assert "FakeTensor" in f"{loss.expand(3)}"
        assert loss.detach().cpu().numpy() == 1.0

    trace(code)


def recurrent(kind: type[nn.RNNBase]) -> Callable[[Tracing], object]:
    return lambda on: nn.Sequential(kind(8, 8)).to("cuda")[0](torch.empty(4, 2, 8, device="cuda"))


def loaded(on: Tracing) -> None:
    for row in torch.utils.data.DataLoader(torch.zeros(4, 8), num_workers=1):  # type: ignore[arg-type]
        row.cuda()


def sparse_sum(on: Tracing) -> None:
    indices = torch.zeros(1, 3, dtype=torch.int64, device="cuda")
    torch.empty(8, 4, device="cuda").add_(torch.sparse_coo_tensor(indices, torch.zeros(3, 4, device="cuda"), (8, 4)))


def sparse_momentum(on: Tracing) -> None:
    table = nn.Embedding(100, 8, sparse=True).to("cuda")
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    table(torch.zeros(4, dtype=torch.int64, device="cuda")).sum().backward()
    optimizer.step()


def jagged(on: Tracing) -> None:
    rows = [torch.empty(5, 8), torch.empty(9, 8)]
    nn.Linear(8, 8).to("cuda")(torch.nested.nested_tensor(rows, layout=torch.jagged, device="cuda"))


def in_pieces(on: Tracing) -> None:
    torch.nested.nested_tensor([torch.empty(5, 8), torch.empty(9, 8)], device="cuda")


def clustered() -> tuple[nn.AdaptiveLogSoftmaxWithLoss, torch.Tensor, torch.Tensor]:
    layer = nn.AdaptiveLogSoftmaxWithLoss(64, 1000, [100, 500]).to("cuda")
    return layer, torch.empty(32, 64, device="cuda"), torch.randint(1000, (32,), device="cuda")


def by_cluster(on: Tracing) -> None:
    layer, x, target = clustered()
    layer(x, target).loss.backward()


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (lambda on: OUTSIDE(torch.empty(4, 8, device="cuda")), "made outside the traced function.*make models"),
        (lambda on: OUTSIDE.to("cuda"), "made outside the traced function"),
        (lambda on: torch.compile(torch.relu)(torch.empty(4, device="cuda")), "compile=True"),
        (recurrent(nn.LSTM), r"nn.LSTM cannot be traced.*cuDNN.*cudnn.enabled = False.*, at .*py:\d+$"),
        (recurrent(nn.GRU), r"nn.GRU cannot be traced.*cuDNN.*cudnn.enabled = False.*, at .*py:\d+$"),
        (sparse_sum, r"dense tensors can be traced.*to_dense\(\)"),
        (sparse_momentum, "dense tensors can be traced.*without sparse=True"),
        (jagged, "nested tensors.*padded to its longest"),
        (in_pieces, "nested.*padded to its longest"),
        (by_cluster, r"trace F.nll_loss\(layer.log_prob\(x\), target\)"),
        (lambda first, second: None, "needs values for first, second.*function without arguments"),
        (loaded, "num_workers=0"),
    ],
)
def test_what_cannot_be_followed_is_one_sentence(code: Callable[[Tracing], object], sentence: str) -> None:
    with pytest.raises(StandInError, match=sentence) as caught:
        trace(code)
    assert "\n" not in str(caught.value)


def test_what_the_sentences_advise_can_be_traced() -> None:
    def code(on: Tracing) -> None:
        layer, x, target = clustered()
        nn.functional.nll_loss(layer.log_prob(x), target).backward()
        rows = torch.nn.utils.rnn.pad_sequence([torch.empty(5, 8), torch.empty(9, 8)], batch_first=True)
        nn.Linear(8, 8).to("cuda")(rows.to("cuda")).sum().backward()

    assert trace(code).bound == "exact"


def test_alignment_keeps_its_scores_twice() -> None:
    def code(on: Tracing) -> None:
        scores = torch.empty(500, 2, 20, device="cuda", requires_grad=True)
        targets = torch.ones(2, 100, dtype=torch.int64, device="cuda")
        nn.functional.ctc_loss(scores, targets, (500, 500), (100, 100)).backward()

    states, log_probs = 4 * 2 * 500 * (2 * 100 + 1), 4 * 500 * 2 * 20  # LossCTC.cpp: log_alpha and log_beta
    peak = trace(code).peak_allocated_bytes
    assert 2 * states + 2 * log_probs <= peak <= 2 * states + 2 * log_probs + 8192


@pytest.mark.parametrize(
    ("name", "first", "steady"), [("AdamW", 25448448, 25480192), ("SGD", 60041216, 23376896)], ids=("AdamW", "SGD")
)
def test_compiled_optimizer_takes_what_the_cuda_build_takes(name: str, first: int, steady: int) -> None:
    """Its updates are one kernel without temporaries, 2 MiB less than uncompiled; the first one's clones are SGD's peak.
    Figures: torch.cuda.max_memory_allocated of PyTorch's CUDA build (tests/cuda_build/README.md)."""

    def code(on: Tracing) -> None:
        layers = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).cuda()
        more = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(torch.optim, name)(layers.parameters(), lr=0.1, **more)
        step = torch.compile(optimizer.step, fullgraph=False)
        for number in range(3):
            on.phase(f"step {number}")
            layers(torch.empty(8, 512, device="cuda")).sum().backward()
            step()
            optimizer.zero_grad()

    found = {phase.phase: phase.allocated_bytes for phase in trace(code, compile=True).replay().phases}
    assert found["step 0"] == pytest.approx(first, abs=8192)
    assert [found["step 1"], found["step 2"]] == [steady] * 2


def test_compiled_scans_say_what_they_lack() -> None:
    def code(make: Callable[[Tensor], Tensor]) -> Callable[[Tracing], object]:
        return lambda on: torch.compile(make)(torch.ones(256, 256, device="cuda", requires_grad=True)).sum().backward()

    scan = torch.compiler.disable(lambda x: torch.cumprod(x, 0))
    assert trace(code(lambda x: scan(x) * 2), compile=True).bound == "exact"
    if not has_triton_package():
        with pytest.raises(StandInError, match=r"keep that line out of torch\.compile"):
            trace(code(lambda x: torch.cumprod(x, 0)), compile=True)


def without_arguments() -> None:
    torch.empty(MIB, dtype=torch.uint8, device="cuda")


def with_defaults(config: str = "", *, steps: int = 1) -> None:
    assert config == ""
    without_arguments()


def given(on: Tracing | None = None) -> None:
    assert on is not None
    without_arguments()


@pytest.mark.parametrize("code", [without_arguments, with_defaults, given, lambda x: without_arguments()])
def test_a_function_is_called_with_as_much_as_it_asks_for(code: Callable[..., object]) -> None:
    assert trace(code).peak_allocated_bytes == MIB


def test_what_the_code_shows_is_shown_once_and_without_values(capfd: pytest.CaptureFixture[str]) -> None:
    """Where only the card knows a size it runs twice."""

    def code(on: Tracing) -> None:
        loss = nn.Conv2d(3, 8, 3).cuda()(torch.empty(2, 3, 16, 16, device="cuda")).sum()
        print(f"loss {loss.item():.4f} {loss:8.3f}", loss.item() / 2, round(loss.item(), 2))  # noqa: T201
        print("step", file=sys.stderr)  # noqa: T201
        loss.backward()

    assert trace(code).high is not None
    out, err = capfd.readouterr()
    assert (out, err) == ("loss ?        ? ? ?\n", "step\n")


def test_the_upper_end_of_a_range_stands_last() -> None:
    """At its end the second trace can take less, as others of its moments take more."""

    def takes(mib: int) -> Traced:
        return trace(lambda on: torch.empty(mib * MIB, dtype=torch.uint8, device="cuda"))

    found = replace(takes(40), high=takes(30))
    assert "30.0 MiB to 40.0 MiB allocated, 30.0 MiB to 40.0 MiB reserved" in str(found)
    assert found.fits(40 * MIB) is True
    assert found.fits(35 * MIB) is False


@pytest.mark.parametrize("gpu", ["cpu", "mps", "Apple M1 Max"])
def test_a_device_that_is_no_cuda_card_is_refused(gpu: str) -> None:
    with pytest.raises(StandInError, match=r"not a CUDA card.*RTX 4070"):
        trace(lambda on: None, gpu=gpu)


def test_without_cudnn_an_lstm_takes_kernels_that_are_known() -> None:
    def code(on: Tracing) -> None:
        with torch.backends.cudnn.flags(enabled=False):
            recurrent(nn.LSTM)(on)
        assert on.tracer.ops["_thnn_fused_lstm_cell"] == 4

    trace(code)


def test_convolutions_and_sparse_gradients_are_noted() -> None:
    def sparse(on: Tracing) -> None:
        table = nn.Embedding(100, 8, sparse=True).cuda()
        optimizer = torch.optim.SparseAdam(table.parameters())
        table(torch.zeros(4, dtype=torch.int64, device="cuda")).sum().backward()
        optimizer.step()

    def conv(on: Tracing) -> None:
        nn.Conv2d(3, 8, 3).cuda()(torch.empty(2, 3, 16, 16, device="cuda")).sum().backward()

    assert [note.split()[0] for code in (conv, sparse) for note in trace(code).notes] == ["convolutions", "sparse"]


def test_function_transforms_are_traced() -> None:
    def code(on: Tracing) -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
        x = torch.empty(8, 64, device="cuda")

        def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(model, weights, (x,)).sum()

        gradients = torch.func.grad(loss)
        assert gradients(dict(model.named_parameters()), x)["0.weight"].shape == (64, 64)
        each = torch.func.vmap(gradients, in_dims=(None, 0))(dict(model.named_parameters()), x)
        assert each["0.weight"].shape == (8, 64, 64)

    trace(code)


LOUD = """
import copy, torch, foretrain

def fine(on):
    copy.deepcopy(torch.nn.Linear(4, 4).to("cuda"))
    torch.compile(lambda x: (x @ x).relu())(torch.empty(64, 64, device="cuda"))

foretrain.trace(fine, gpu="RTX 3060 12GB", compile=True)
try:
    foretrain.trace(lambda on: torch.empty(3, 4, device="cuda") @ torch.empty(3, 4, device="cuda"))
except RuntimeError as error:
    assert "reduction dim" in str(error)
"""


def test_torch_says_nothing_of_its_own() -> None:
    """Neither the traceback of a meta kernel's error, nor that data pointers are of fakes, nor of too few SMs."""
    done = subprocess.run([sys.executable, "-c", LOUD], capture_output=True, text=True, cwd=REPO, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_phase_without_an_allocation_is_there() -> None:
    def code(on: Tracing) -> None:
        on.phase("first")
        x = torch.empty(MIB, device="cuda")
        on.phase("in place")
        x.add_(1)
        on.phase("last")

    phases = [(peak.phase, peak.allocated_bytes, peak.position) for peak in trace(code).replay().phases]
    assert phases == [("first", 4 * MIB, 0), ("in place", 4 * MIB, 0), ("last", 4 * MIB, 0)]


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "foretrain", "--version"], capture_output=True, text=True, cwd=REPO, check=True
    )
    assert done.stdout.startswith("foretrain ")


# -- the process that asks ---------------------------------------------------------------------------------


def test_a_trace_changes_nothing_in_the_process_that_asks() -> None:
    seen: list[int] = []
    before = torch.cuda.is_available, torch.cuda.device_count, torch.Tensor.cuda, list(guard._alive)
    process = trace(lambda on: (seen.append(1), square()), "H200")
    assert process.peak_allocated_bytes == GIB
    assert seen == []
    assert (torch.cuda.is_available, torch.cuda.device_count, torch.Tensor.cuda, list(guard._alive)) == before


IN_PROCESS = """
from foretrain import trace
import torch

def code(on):
    weight = torch.empty(1024, 1024, device="cuda", requires_grad=True)
    weight.sum().backward()
    seen.append(weight.grad.shape)

seen = []
trace(code, in_process=True)
print(seen, trace(code).peak_allocated_bytes >> 20)
"""


def test_code_in_process_may_set_variables_before_a_child_traces() -> None:
    """Autograd started a thread for each device in the process that stood in, and a forked child has none of them."""
    done = subprocess.run([sys.executable, "-c", IN_PROCESS], capture_output=True, text=True, cwd=REPO)
    assert done.stdout == "[torch.Size([1024, 1024])] 8\n", done.stderr


def test_autograd_that_cannot_run_in_a_child_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def calibrate(device: str) -> None:
        raise RuntimeError(
            "Unable to handle autograd's threading in combination with fork-based multiprocessing. "
            "See https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork"
        )

    monkeypatch.setattr(Tracer, "calibrate", calibrate)
    with pytest.raises(StandInError, match=r"sees a card.*in_process=True"):
        trace(lambda on: square())


def test_the_codes_own_error_comes_back_with_where_it_was_raised() -> None:
    def code(on: Tracing) -> None:
        raise ValueError("no such head")

    with pytest.raises(ValueError, match="no such head") as caught:
        trace(code)
    assert "in code" in caught.value.__notes__[0]


def test_a_child_that_is_killed_is_said_in_a_sentence() -> None:
    with pytest.raises(ChildEnded, match=r"ended without an answer \(signal SIGKILL\)"):
        trace(lambda on: os.kill(os.getpid(), signal.SIGKILL))


def test_a_trace_prints_what_it_found() -> None:
    found = trace(lambda on: square())
    assert repr(found) == "<trace on RTX 4070: 1.00 GiB allocated at the peak>"
    assert "1.00 GiB allocated, 1.00 GiB reserved at the peak" in str(found)


def test_a_function_that_is_compiled_for_any_size_is_traced() -> None:
    """Orthogonalised updates of Muon, as programs compile them: from the second shape on, sizes are symbols."""

    @torch.compile
    def orthogonal(gradient: torch.Tensor) -> torch.Tensor:
        x = gradient.bfloat16()
        tall = x.size(0) > x.size(1)
        if tall:
            x = x.T
        x = 2 * x + (x @ x.T) @ x
        return x.T if tall else x

    def code(on: Tracing) -> None:
        for rows in (64, 96, 128):
            for shape in ((rows, 64), (64, rows)):
                orthogonal(torch.empty(shape, device=on.device))

    found = trace(code, compile=True).trace
    assert {a.shape for a in found.allocations} >= {(96, 64), (64, 128)}


def test_tied_weights_that_are_cast_go_at_once() -> None:
    """As on a card, where a parameter's data is exchanged for all modules that share it."""

    def code(on: Tracing) -> None:
        first, second, head = (torch.nn.Linear(64, 64, bias=False) for _ in range(3))
        head.weight = first.weight
        model = torch.nn.ModuleList([first, second, head]).to(on.device)
        on.phase("cast")
        model.to(torch.bfloat16)
        assert head.weight is first.weight

    found = trace(code).trace
    (start,) = (mark.position for mark in found.phases if mark.name == "cast")
    sizes = [(1 if e >= 0 else -1) * found.allocations[e if e >= 0 else ~e].nbytes for e in found.events[start:]]
    assert sizes[:4] == [8192, -16384, 8192, -16384]


def test_gradients_go_back_through_an_index_on_the_host() -> None:
    def code(on: Tracing) -> None:
        weight = torch.empty(64, 512, device=on.device, requires_grad=True)
        on.phase("indexed")
        weight[torch.arange(3)].sum().backward()

    found = trace(code).trace
    made = [(a.op, a.nbytes) for a in found.allocations if a.allocated_at and a.nbytes > 4096]
    written = ("_index_put_impl_ (inside)", 3 * 2048)  # the gradient of a sum, laid out in order
    assert made == [("index", 3 * 2048), ("new_zeros", 64 * 2048), written]


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm"), reason="torch 2.8 and before have none")
def test_rms_norm_is_one_kernel_where_torch_has_one() -> None:
    """As in PyTorch's CUDA build; a CPU build takes it apart into six, and keeps three more tensors for backward."""

    def code(on: Tracing) -> None:
        norm = torch.nn.RMSNorm(512, device=on.device)
        on.phase("forward")
        norm(torch.empty(64, 512, device=on.device, requires_grad=True))

    found = trace(code).trace
    (start,) = (mark.position for mark in found.phases if mark.name == "forward")
    of_norm = [(a.op, a.nbytes) for a in found.allocations if a.allocated_at >= start and a.op != "empty"]
    assert of_norm == [("_fused_rms_norm", 4 * 64 * 512), ("_fused_rms_norm", 4 * 64)]


@pytest.mark.parametrize(("name", "inside"), [("silu", 0), ("mish", 0), ("softmax", 1)])
def test_backward_passes_take_what_the_card_takes(name: str, inside: int) -> None:
    """A CPU build takes those of silu and mish apart; that of softmax makes gradient times output (SoftMax.cu). Both as
    PyTorch's CUDA build allocates, and as recorded on an A100 (docs/trust.md, single operations)."""
    call = {"silu": F.silu, "mish": F.mish, "softmax": lambda x: F.softmax(x, -1)}[name]

    def code(on: Tracing) -> None:
        out = call(torch.empty(512, 512, device=on.device, requires_grad=True))
        gradient = torch.empty_like(out)
        on.phase("backward")
        out.backward(gradient)

    found = trace(code).trace
    (start,) = (mark.position for mark in found.phases if mark.name == "backward")
    assert [a.nbytes for a in found.allocations if a.allocated_at >= start] == [4 * 512 * 512] * (1 + inside)


def test_a_model_moves_in_the_order_in_which_torch_moves_it() -> None:
    """Children first, then a module's own weights, then its buffers: torch's own Module._apply tells."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(11))
            self.scale = nn.Parameter(torch.zeros(13))
            self.attention = nn.MultiheadAttention(8, 2)
            self.head = nn.Linear(8, 3)

    order: list[int] = []

    def seen(tensor: Tensor) -> Tensor:
        order.append(tensor.numel())
        return tensor

    Model()._apply(seen)
    found = trace(lambda on: Model().to(on.device)).trace
    assert [found.allocations[event].nbytes // 4 for event in found.events if event >= 0] == order


def _moved_by_data(model: nn.Module, on: Tracing) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(on.device)


MOVES: dict[str, Callable[[nn.Module, Tracing], object]] = {
    "to": lambda model, on: model.to(on.device),
    "cuda": lambda model, on: model.cuda(),
    "to and back and to": lambda model, on: model.to(on.device).cpu().cuda(),
    "its data": _moved_by_data,
    "child by child": lambda model, on: [child.to(on.device) for child in model.children()],
}
SHARE = 2048 * 2048 * 4  # of the weights of one layer


def two_layers(on: Tracing) -> nn.Module:
    return nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.Linear(2048, 2048, bias=False))


@pytest.mark.parametrize("name", MOVES)
def test_optimizer_made_before_the_model_moved_keeps_it(name: str) -> None:
    """An optimizer, a list and hooks: parameters stay the same objects, as on a real card."""

    def steps(on: Tracing, model: nn.Module, optimizer: torch.optim.Optimizer, kept: list[nn.Parameter]) -> None:
        model(torch.empty(4, 2048, device=on.device)).sum().backward()
        torch.nn.utils.clip_grad_norm_(kept, 1.0)
        optimizer.step()

    def before(on: Tracing) -> None:
        model = two_layers(on)
        optimizer, kept, heard = torch.optim.AdamW(model.parameters()), list(model.parameters()), list[int]()
        for parameter in kept:
            parameter.register_hook(lambda gradient: heard.append(gradient.numel()))
        MOVES[name](model, on)
        assert all(a is b for a, b in zip(kept, model.parameters(), strict=True))
        steps(on, model, optimizer, kept)
        assert len(heard) == 2

    def after(on: Tracing) -> None:
        model = two_layers(on).to(on.device)
        steps(on, model, torch.optim.AdamW(model.parameters()), list(model.parameters()))

    moved, made_there = trace(before), trace(after)
    assert moved.peak_allocated_bytes == made_there.peak_allocated_bytes > 8 * SHARE
    assert moved.notes == made_there.notes


def test_backward_hooks_set_before_the_model_moved_update_it() -> None:
    def code(on: Tracing, *, early: bool) -> None:
        model = two_layers(on)
        if not early:
            model.to(on.device)
        optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}

        def update(parameter: Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            optimizers[parameter].zero_grad()  # type: ignore[index]

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        model.to(on.device)
        for _ in range(2):
            model(torch.empty(4, 2048, device=on.device)).sum().backward()

    early, late = (trace(lambda on, early=early: code(on, early=early)) for early in (True, False))
    assert early.peak_allocated_bytes == late.peak_allocated_bytes > 6 * SHARE


def test_gradients_go_with_the_parameters_as_in_torch() -> None:
    """Each conversion keeps parameters and gradients, and a model's own _apply is called, on real tensors and fake."""

    class Counted(nn.Linear):
        calls = 0

        def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Counted":
            self.calls += 1
            return super()._apply(fn, recurse)

    def code(on: Tracing | None) -> list[object]:
        model = nn.Sequential(Counted(8, 8))
        parameter = model[0].weight
        model(torch.ones(2, 8)).sum().backward()
        told: list[object] = []
        for convert in (model.half, model.cpu, lambda: model.to(torch.float64), model.float):
            convert()
            told += [parameter is model[0].weight, parameter.dtype, parameter.grad.dtype, parameter.requires_grad]
        return [*told, model[0].calls]

    on_real_ones = code(None)

    def on_fakes(on: Tracing) -> None:
        linear(2, 8)
        assert code(on) == on_real_ones

    trace(on_fakes)
