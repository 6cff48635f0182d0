"""The limit of a step: peaks that are made up, closed forms, FlopCounterMode; and what a run says of it."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.step_operations import is_work, profiled, sides_of
from foretrain.analysis.run_pace import calibration_here, limit_of_run
from foretrain.base.messages import say
from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.hardware.calibration import Bandwidth, Calibration, KernelTime, Peaks, ProductPeak, best_of, save
from foretrain.hardware.catalogue import find
from foretrain.hardware.cpu import cpu_device
from foretrain.measure import peaks
from foretrain.model.step import build, train_step
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.limit import StepLimit, group_of, limit_of, peaks_of, with_kernels
from foretrain.predict.speed.ops import MicroBatchRun, step
from foretrain.reports.views import agreement as calibration_view
from foretrain.runs.folder import RunDirectory
from foretrain.training.device import place
from tests.kit.calibrations import hasty, made_up_calibration  # noqa: F401
from tests.kit.command import foretrain
from tests.kit.tiny import tiny
from tests.kit.training import train

CPU = torch.device("cpu")
NEVER = 1e30  # a rate that nothing waits for


def made_up(
    flop_per_s: float = NEVER, attention: float = NEVER, rates: Iterable[tuple[int, float]] = ((1, NEVER),),
    in_place: Iterable[tuple[int, float]] = (), dtype: str = "float32",
) -> Peaks:  # fmt: skip
    products = [("matmul", (64, 64, 64), flop_per_s), ("attention", (2, 8, 8, 4), attention)]
    moved = [("copy", *each) for each in rates] + [("in_place", *each) for each in in_place]
    return Peaks(
        matmuls=tuple(ProductPeak(kind=k, dtype=dtype, shape=s, flop_per_s=r) for k, s, r in products),
        bandwidths=tuple(Bandwidth(access=a, moved_bytes=b, bytes_per_s=r) for a, b, r in moved),  # type: ignore[arg-type]
        launch_s=1e-6, autograd_launch_s=3e-6,
    )  # fmt: skip


def limit(config: RunConfig, found: Peaks, dtype: Any = "float32", **how: Any) -> StepLimit:
    made = limit_of(StepSpec.of(config, cpu_device(), dtype=dtype, **how), found)
    assert made is not None
    return made


# -- peaks -------------------------------------------------------------------------------------------------


def test_bandwidth_is_interpolated_and_monotone() -> None:
    found = made_up(rates=((100, 8.0), (10_000, 16.0), (1_000_000, 1.0)), in_place=((100, 50.0),))
    assert found.bytes_per_s(1) == found.bytes_per_s(100) == found.bytes_per_s(10_000) == 16.0
    assert found.bytes_per_s(100_000) == pytest.approx(4.0)  # half the way in logarithms, between 16 and 1
    assert found.bytes_per_s(10**9) == found.memory_bytes_per_s() == 1.0
    assert found.cache_bytes_per_s() == 16.0
    assert found.bytes_per_s(10**9, in_place=True) == 50.0
    assert made_up(rates=((1, 7.0),)).bytes_per_s(5, in_place=True) == 7.0  # nothing measured in place


def test_of_two_measurements_the_better_of_every_figure_counts() -> None:
    one, other = made_up(2.0, 9.0, ((1, 3.0), (2, 9.0))), made_up(5.0, 4.0, ((1, 6.0), (2, 1.0)), dtype="float32")
    found = best_of(one.model_copy(update={"page_s": 2e-6, "page_bytes": 4096}), other)
    assert (found.flop_per_s("float32"), found.flop_per_s("float32", attention=True)) == (5.0, 9.0)
    assert [each.bytes_per_s for each in found.bandwidths] == [6.0, 9.0]
    assert (found.page_s, found.page_bytes) == (2e-6, 4096)


def test_attention_without_a_peak_has_that_of_matmuls() -> None:
    fast = ProductPeak(kind="matmul_input", dtype="float32", shape=(1, 1, 1), flop_per_s=30.0)
    slow = ProductPeak(kind="matmul_weight", dtype="float32", shape=(1, 1, 1), flop_per_s=10.0)
    found = made_up().model_copy(update={"matmuls": (slow, fast)})
    assert found.flop_per_s("float32") == found.flop_per_s("float32", attention=True) == 30.0
    assert found.flop_per_s("bfloat16") is None


def test_a_calibration_gives_the_peaks_that_its_kernels_reached() -> None:
    """Of an older version, too, that measured no peaks as such."""
    kernels = (
        KernelTime(kind="matmul", dtype="float32", shape=(10, 20, 30), time_s=2.0),
        KernelTime(kind="matmul_weight", dtype="float32", shape=(20, 30, 10), time_s=1.0),
        KernelTime(kind="attention", dtype="float32", shape=(2, 3, 16, 8), time_s=1.0),
        KernelTime(kind="clip", dtype="float32", shape=(800,), time_s=2.0),
        KernelTime(kind="gelu", dtype="float32", shape=(800,), time_s=4.0),
    )
    old = made_up_calibration().model_copy(update={"kernels": kernels})
    found = peaks_of(old)
    assert found.flop_per_s("float32") == 2 * 10 * 20 * 30
    assert found.flop_per_s("float32", attention=True) == 2 * 2 * 3 * 16 * 16 * 8  # the causal half of 4BHT²D
    assert (found.bytes_per_s(1, in_place=True), found.bytes_per_s(1)) == (400.0, 200.0)
    better = old.model_copy(update={"peaks": made_up(flop_per_s=1e6, attention=1.0)})
    assert peaks_of(better).flop_per_s("float32") == 1e6
    assert peaks_of(better).flop_per_s("float32", attention=True) == found.flop_per_s("float32", attention=True)


def test_what_is_measured_is_what_is_said(hasty: Path) -> None:
    """With a clock on which every run takes a second, the best rate is that of the largest shape."""
    found = peaks.measure(CPU, ["float32", "bfloat16"], lambda run, count: [(run(), 1.0)[1] for _ in range(count)])
    assert found.dtypes == ["float32", "bfloat16"]
    for dtype in found.dtypes:
        for kind in ("matmul", "matmul_input", "matmul_weight", "attention"):
            best = found.best(dtype, kind)
            assert best.flop_per_s == 2 * math.prod(best.shape)
    assert {each.access for each in found.bandwidths} == {"copy", "read", "write", "in_place"}
    assert all(each.bytes_per_s == each.moved_bytes for each in found.bandwidths)
    assert found.page_s >= 0
    assert found.launch_s > 0


def test_batched_products_have_the_flops_of_their_shape(hasty: Path) -> None:
    for kernel in peaks.batched(CPU, "float32"):
        with FlopCounterMode(display=False) as counter:
            kernel.run()
        assert counter.get_total_flops() == 2 * math.prod(kernel.shape)


class Moved(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = self.written_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        read = {"copy_": args[1:2], "sum": args[:1], "mul_": args[:1], "fill_": ()}[name]
        self.read_bytes += sum(each.nbytes for each in read)
        self.written_bytes += result.nbytes if name != "sum" else 0
        return result


def test_bytes_of_a_bandwidth_are_those_that_the_operation_moves(hasty: Path) -> None:
    for _, moved_bytes, run in peaks.accesses(CPU):
        with Moved() as moved:
            run()
        assert moved.read_bytes + moved.written_bytes == moved_bytes


# -- the limit ---------------------------------------------------------------------------------------------


def test_limit_with_endless_bandwidth_is_causal_flops_at_peak() -> None:
    config = tiny(n_layer=3, n_head=4, n_embd=48, block_size=24)
    found = limit(config, made_up(flop_per_s=1e9, attention=1e9))
    assert found.limit_s == pytest.approx(sum(group.total_flops for group in found.groups) / 1e9)
    flops = {group.group: group.total_flops for group in found.groups}
    tokens, weights = config.tokens_per_step, 12 * 3 * 48 * 48 + config.vocab_size * 48
    assert flops["forward"] == flops["input_gradient"] == flops["weight_gradient"] == 2 * tokens * weights
    assert flops["attention"] == 7 * tokens * 24 * 48 * 3  # 2·T·C a token and layer forward, 2.5 times that backward
    assert not flops["pointwise"] + flops["loss"] + flops["optimizer"]


def test_its_flops_are_those_of_the_real_step() -> None:
    """But for attention's, whose kernel on a CPU FlopCounterMode does not know."""
    config = tiny(dropout=0.0, attention="sdpa")
    state = build(config, CPU, torch.float32, compile=False)
    tokens = torch.randint(0, config.vocab_size, (config.batch_size, config.block_size + 1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    with FlopCounterMode(display=False) as counter:
        train_step(state, iter([batch] * config.gradient_accumulation_steps), 1e-3)
    groups = {group.group: group.total_flops for group in limit(config, made_up()).groups}
    assert sum(groups.values()) - groups["attention"] == counter.get_total_flops() > 0


def test_limit_with_endless_arithmetic_is_bytes_at_bandwidth() -> None:
    config = tiny(gradient_accumulation_steps=1)
    found = limit(config, made_up(rates=((1, 1e6),), in_place=((1, 4e6),)))
    parts = {(each.kind, each.part): each for each in found.operations if each.group == "optimizer"}
    assert {each.bound for each in found.operations} == {"memory"}
    n_params = sum(p.numel for p in ModelShape.of(config).parameters())
    adamw = [each for each in found.operations if each.kind == "adamw"]
    assert sum(each.total_bytes for each in adamw) == 28 * n_params  # four read and three written, fp32
    assert math.fsum(each.limit_s for each in adamw) == pytest.approx(28 * n_params / 4e6)
    norm = parts["gradient_norm", "optimizer"]
    assert norm.limit_s == pytest.approx(norm.total_bytes / 1e6)


def test_pass_over_all_weights_finds_nothing_in_the_cache() -> None:
    config = tiny(gradient_accumulation_steps=1)
    largest = max(28 * p.numel for p in ModelShape.of(config).parameters())
    cached = made_up(rates=((largest, 8e6), (largest + 1, 1e6)), in_place=((largest, 8e6), (largest + 1, 1e6)))
    slow = made_up(rates=((1, 1e6),))
    for kind in ("adamw", "clip"):
        times = [
            math.fsum(each.limit_s for each in limit(config, found).operations if each.kind == kind)
            for found in (cached, slow)
        ]
        assert times[0] == pytest.approx(times[1]), kind


def test_it_depends_on_no_way_to_run_the_step() -> None:
    found = made_up(1e9, 1e9, ((1, 1e6),), dtype="bfloat16")
    ways = [
        limit(tiny(dropout=0.0, attention=attention), found, "bfloat16", compiled=compiled)
        for attention in ("sdpa", "bmm")
        for compiled in (False, True)
    ]
    assert len({each.to_json().__repr__() for each in ways}) == 1


def test_no_limit_where_a_peak_is_missing() -> None:
    spec = StepSpec.of(tiny(), cpu_device(), dtype="float32")
    assert limit_of(spec, made_up(dtype="bfloat16")) is None
    assert limit_of(spec, made_up(rates=())) is None
    card = find("RTX 4070")
    offloaded = tiny(optimizer_offload=True, device="cuda")
    assert limit_of(StepSpec.of(offloaded, card, dtype="float32"), made_up()) is None


def test_every_operation_has_a_group_and_their_times_add_up() -> None:
    for dtype in ("float32", "bfloat16"):
        config = tiny(dropout=0.1, activation_checkpointing=True)
        for op in step(MicroBatchRun(StepSpec.of(config, cpu_device(), dtype=dtype, compiled=False))):
            assert group_of(op)
        found = limit(config, made_up(1e9, 1e8, ((1, 1e6),), dtype=dtype), dtype)
        assert found.limit_s == pytest.approx(math.fsum(each.limit_s for each in found.operations))
        assert found.limit_s == pytest.approx(math.fsum(each.limit_s for each in found.groups))


def test_calibrated_kernels_are_never_faster_than_the_peaks() -> None:
    calibration = made_up_calibration(bytes_per_s=1e13)  # matmuls wait for arithmetic alone
    gpu = cpu_device().model_copy(update={"calibration": calibration})
    spec = StepSpec.of(tiny(), gpu, dtype="float32", compiled=True)
    made = limit_of(spec, peaks_of(calibration))
    assert made is not None
    found = with_kernels(made, spec)
    assert all(group.kernels_s is not None for group in found.groups)
    for group in found.groups:
        assert group.limit_s <= (group.kernels_s or 0) * 1.0001, group.group


# -- what a run says ---------------------------------------------------------------------------------------


@pytest.fixture
def a_run(own_directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A run of some steps, and a cache of its own."""
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path / "cache"))
    train(tiny(max_iters=15, out_dir="r"))
    return own_directory / "r"


def calibrated() -> Calibration:
    return made_up_calibration().model_copy(update={"peaks": made_up(1e12, 1e12, ((1, 1e11),))})


def explained(*words: str) -> str:
    result = foretrain("explain", "r", *words, code=0)
    return " ".join(result.stdout.split())


def test_explain_says_the_share_and_the_table_is_one_option_away(a_run: Path) -> None:
    save(calibrated())
    found = json.loads(explained("--json"))["limit"]
    assert found["share"] == pytest.approx(found["step"]["limit_s"] / found["step_s"])
    assert found["step"]["operations"]
    kernels = sum(group["kernels_s"] for group in found["step"]["groups"])
    assert found["rest_s"] == pytest.approx(found["step_s"] - kernels)
    short, long = explained(), explained("--limit")
    assert "of what this machine can do" in short
    assert say("run_limit.section") not in short
    assert say("run_limit.section") in long
    assert say("run_limit.weight_gradient") in long


def test_step_that_beats_its_limit_says_the_peaks_are_wrong(a_run: Path) -> None:
    slow = made_up_calibration(flop_per_s=1.0, bytes_per_s=1.0)  # a FLOP and a byte a second
    save(slow)
    assert json.loads(explained("--json"))["limit"]["share"] > 1
    said = explained()
    assert "of what this machine can do" not in said
    assert "So the peaks were measured too low" in said


def test_without_a_calibration_explain_names_the_command(a_run: Path) -> None:
    assert say("run_limit.calibrate", gpu=cpu_device().name) in explained()
    found = json.loads(explained("--json"))
    assert found["limit"] is None
    assert found["calibrate_first"]
    assert say("run_limit.section") not in explained("--limit")


def test_a_run_of_another_device_has_no_limit_here(a_run: Path) -> None:
    save(calibrated())
    record = RunDirectory(a_run).read_record()
    assert calibration_here(record.gpu) is not None
    assert calibration_here(record.gpu.model_copy(update={"name": "CPU (another one)"})) is None


def test_several_ranks_and_a_step_of_no_time_have_no_share(a_run: Path) -> None:
    record = RunDirectory(a_run).read_record()
    assert limit_of_run(record, 0.5, calibrated()) is not None
    assert limit_of_run(record.model_copy(update={"world": 2}), 0.5, calibrated()) is None
    assert limit_of_run(record, 0.0, calibrated()) is None


def test_calibrate_shows_the_peaks_first(hasty: Path) -> None:
    found = peaks.calibrated(place(RunConfig(device="cpu", compile=False)), ["float32"], [False], ignore)
    assert found.peaks is not None
    sections = calibration_view.document(found, cpu_device(), kept=True).sections
    assert [section.title.id for section in sections] == ["calibration.peaks", "calibration.section"]
    old = found.model_copy(update={"peaks": None})
    assert len(calibration_view.document(old, cpu_device(), kept=True).sections) == 1
    assert Calibration.from_json(found.model_dump_json()) == found


def ignore(what: str, share: float) -> None:
    assert 0 <= share <= 1


# -- a real step, operation by operation (benchmarks/step_operations.py) -----------------------------------


def test_a_profiled_step_has_every_matmul_in_its_group() -> None:
    """Four linear layers a block and the head, and each has three matmuls."""
    config = tiny(dropout=0.0, gradient_accumulation_steps=1, n_layer=3, attention="sdpa")
    state = build(config, CPU, torch.float32, compile=False)
    tokens = torch.randint(0, config.vocab_size, (config.batch_size, config.block_size + 1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def run() -> None:
        train_step(state, iter([batch]), 1e-3)

    run()
    found = profiled(run, 2, [p.shape for p in ModelShape.of(config).parameters()])
    products = 4 * 3 + 1
    groups = ("forward", "input_gradient", "weight_gradient")
    assert [found.operations[group] for group in groups] == [products] * 3
    assert found.operations["attention"] >= 2 * 3
    assert set(found.groups) == {*groups, "attention", "pointwise", "loss", "optimizer"}
    step_s = found.profiled_step_s
    assert found.rest_s(step_s) + sum(found.groups.values()) == pytest.approx(step_s)
    assert found.rest_s(step_s) > 0


def test_views_and_wrappers_are_no_work() -> None:
    for name in ("aten::view", "aten::empty_strided", "aten::linear", "aten::to", "MmBackward0", "foretrain::attention",
                 "autograd::engine::evaluate_function: MmBackward0", "Optimizer.step#AdamW.step"):  # fmt: skip
        assert not is_work(SimpleNamespace(name=name)), name
    for name in ("aten::mm", "aten::copy_", "aten::_softmax", "graph_0_cpp_fused_gelu_1", "aten::add_"):
        assert is_work(SimpleNamespace(name=name)), name


def test_matmul_sides_are_rows_inner_and_columns() -> None:
    mm, addmm, bmm = "aten::mm", "aten::addmm", "aten::bmm"
    assert sides_of(SimpleNamespace(name=mm, input_shapes=[[3, 5], [5, 7]])) == (3, 5, 7)
    assert sides_of(SimpleNamespace(name=mm, input_shapes=[[3, 5], [5, 7], [3, 7]])) == (
        3,
        5,
        7,
    )  # compiled: with `out`
    assert sides_of(SimpleNamespace(name=addmm, input_shapes=[[7], [3, 5], [5, 7], [], []])) == (3, 5, 7)
    assert sides_of(SimpleNamespace(name=bmm, input_shapes=[[2, 3, 5], [2, 5, 7]])) == (0, 0, 0)


def test_chunked_loss_gradients_count_in_the_forward_pass() -> None:
    config = tiny(loss_chunk_size=40, vocab_size=300, batch_size=5, dtype="float32")
    state = build(config, torch.device("cpu"), torch.float32, compile=False)
    ids = torch.randint(0, 300, (config.batch_size, config.block_size))
    shapes = [tuple(parameter.shape) for parameter in state.model.parameters()]
    found = profiled(lambda: train_step(state, [(ids, ids)], 1e-3), 1, shapes).operations
    matmuls = 4 * config.n_layer + -(-ids.numel() // 40)
    assert (found["forward"], found["input_gradient"], found["weight_gradient"]) == (matmuls, matmuls, matmuls)
