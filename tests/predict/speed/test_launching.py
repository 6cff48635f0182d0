"""Steps in which a card waits for its host: a made-up host, found again from a calibration's narrow steps."""

from typing import Any, NamedTuple

import pytest
import torch

from foretrain.config.checks import launched
from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.hardware.calibration import Calibration, StepTime
from foretrain.hardware.catalogue import Gpu, find
from foretrain.hardware.cpu import nominal_cpu
from foretrain.measure.calibrate import MANY_BLOCKS, NARROW_REFERENCE, ReferenceRequest, references_for
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import FUSED_LAUNCHES, MicroBatchRun, micro_batch, optimizer
from foretrain.predict.speed.rates import (
    CHAIN_LAUNCHES,
    CHECKPOINT_LAUNCHES,
    COPIES,
    MICRO_BATCH_LAUNCHES,
    REGION_LAUNCHES,
    REPLAY,
    CatalogueRates,
    MeasuredRates,
    busy_s,
    host_of,
)
from foretrain.predict.speed.time import CALIBRATED_HIGH, HIGH, HOST_HIGH, HOST_LOW, LOW, step_time
from tests.kit.calibrations import made_up_calibration

H100 = find("H100 SXM5 80GB")
CARD: dict[str, float] = {"flop_per_s": 1e14, "bytes_per_s": 1e12}
CHARACTERS = RunConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=65, batch_size=12,
                       gradient_accumulation_steps=40, cuda_graph="off")  # fmt: skip
LARGE = RunConfig(batch_size=16, gradient_accumulation_steps=5, cuda_graph="off")


class Host(NamedTuple):
    """What a made-up host takes."""

    eager_s: float = 30e-6
    compiled_s: float = 36e-6
    python_s: float = 1.2e-3

    def step_s(self, config: RunConfig, *, compiled: bool) -> float:
        """A step that waits for it, counted here anew: kernels, sums of gradients, the optimizer's list of tensors."""
        spec = StepSpec.of(config, H100, dtype="float32", compiled=compiled)
        kernels = sum(op.runs for op in micro_batch(MicroBatchRun(spec)))
        tensors = len(list(ModelShape.of(config).parameters()))
        n = config.gradient_accumulation_steps
        each = self.compiled_s if compiled else self.eager_s
        eager = (n - 1) * tensors + FUSED_LAUNCHES + tensors
        return n * (kernels * each + self.python_s) + eager * self.eager_s


def calibrated(host: Host, narrow: tuple[tuple[int, bool], ...] = ((2, False), (6, False), (2, True))) -> Calibration:
    """A card with that host, whose narrow steps of so many blocks, compiled or not, were timed."""
    steps = []
    for blocks, compiled in narrow:
        options = {**NARROW_REFERENCE, "n_layer": blocks}
        time_s = host.step_s(launched(options), compiled=compiled)
        steps.append(StepTime(options=options, dtype="float32", compiled=compiled, time_s=time_s))
    made = made_up_calibration(steps=tuple(steps), **CARD)
    return made.model_copy(update={"device": H100.name, "driver": "580", "launch_s": host.eager_s / 2})


def forecast(config: RunConfig, found: Calibration | None, *, compiled: bool = False) -> Any:
    gpu: Gpu = H100.model_copy(update={"calibration": found})
    time = step_time(StepSpec.of(config, gpu, dtype="float32", compiled=compiled))
    assert time is not None
    return time


def test_the_host_is_found_again() -> None:
    host = Host()
    assert host_of(calibrated(host), H100) == pytest.approx(host, rel=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_step_that_waits_for_its_host_takes_the_hosts_time(compiled: bool) -> None:
    for host in (Host(), Host(8e-6, 6e-6, 0.2e-3)):
        found = forecast(CHARACTERS, calibrated(host), compiled=compiled)
        assert found.expected_s == pytest.approx(host.step_s(CHARACTERS, compiled=compiled), rel=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_step_that_takes_the_card_longer_ignores_the_host(compiled: bool) -> None:
    slow, quick = (forecast(LARGE, calibrated(host), compiled=compiled) for host in (Host(), Host(3e-6, 3e-6, 1e-4)))
    way = MicroBatchRun(StepSpec.of(LARGE, H100, dtype="float32", compiled=compiled))
    rates = MeasuredRates(calibrated(Host()), H100)
    busy = LARGE.gradient_accumulation_steps * busy_s(micro_batch(way), rates)
    assert quick.expected_s > busy + busy_s(optimizer(way), rates)
    # Of the host only the optimizer's launches show, which the card waits for.
    assert slow.expected_s - quick.expected_s == pytest.approx(FUSED_LAUNCHES * 27e-6, rel=1e-6)
    assert slow.expected_s == pytest.approx(busy, rel=0.03)


def test_the_longer_of_both_in_between() -> None:
    """Wider and wider, a step goes from what the host takes to what the card takes, and never below either."""
    host = Host()
    rates = MeasuredRates(calibrated(host), H100)
    bound = set[bool]()
    for width in (128, 256, 512, 1024, 2048):
        config = RunConfig(n_layer=4, n_head=4, n_embd=width, block_size=256, vocab_size=256, batch_size=8,
                           gradient_accumulation_steps=8, cuda_graph="off")  # fmt: skip
        launching_s = host.step_s(config, compiled=False)
        way = MicroBatchRun(StepSpec.of(config, H100, dtype="float32", compiled=False))
        working_s = config.gradient_accumulation_steps * busy_s(micro_batch(way), rates)
        assert forecast(config, calibrated(host)).expected_s >= max(launching_s, working_s) * (1 - 1e-9)
        bound.add(launching_s > working_s)
    assert bound == {False, True}


def test_without_narrow_steps_the_chain_stands_for_them() -> None:
    """Calibrations that were made before there were any."""
    found = calibrated(Host(), ())
    each = CHAIN_LAUNCHES * found.launch_s
    assert host_of(found, H100) == pytest.approx((each, each, MICRO_BATCH_LAUNCHES * each))
    assert forecast(CHARACTERS, found).expected_s == pytest.approx(
        Host(each, each, MICRO_BATCH_LAUNCHES * each).step_s(CHARACTERS, compiled=False)
    )


def test_one_depth_gives_the_sum_and_noise_nothing_absurd() -> None:
    host = Host(30e-6, 30e-6, MICRO_BATCH_LAUNCHES * 30e-6)
    assert host_of(calibrated(host, ((2, False),)), H100) == pytest.approx(host)
    found = calibrated(host)
    few, many, _ = found.steps
    for times in (
        (few.time_s, few.time_s / 2),
        (few.time_s / 9, many.time_s),
    ):  # the deeper one quicker; slope too steep
        steps = tuple(one.model_copy(update={"time_s": t}) for one, t in zip((few, many), times, strict=True))
        wavered = host_of(found.model_copy(update={"steps": steps}), H100)
        assert all(0 < value < 5 * usual for value, usual in zip(wavered, host, strict=True))


def test_on_a_cpu_narrow_steps_say_nothing_of_launching() -> None:
    found = calibrated(Host())
    rates = MeasuredRates(found)
    assert [rates.launch_s(compiled=compiled) for compiled in (False, True)] == [found.launch_s, found.launch_s / 2]
    assert rates.python_s == CatalogueRates(nominal_cpu()).python_s == 0.3e-3


def test_a_graph_is_one_launch() -> None:
    graphed = CHARACTERS.model_copy(update={"compile_mode": "reduce-overhead", "compile": True})
    plain, found = (forecast(config, calibrated(Host()), compiled=True) for config in (CHARACTERS, graphed))
    way = MicroBatchRun(StepSpec.of(CHARACTERS, H100, dtype="float32", compiled=True))
    fewer = sum(op.runs for op in micro_batch(way)) - 2
    assert plain.expected_s - found.expected_s == pytest.approx(40 * fewer * Host().compiled_s)


def test_the_catalogue_says_that_it_does_not_know_the_host() -> None:
    """Where launching decides, the range is that of hosts; where kernels do, that of cards."""
    waits, works = forecast(CHARACTERS, None), forecast(LARGE, None)
    assert waits.low_s == pytest.approx(HOST_LOW * waits.expected_s, rel=0.01)
    assert waits.high_s == pytest.approx(HOST_HIGH * waits.expected_s, rel=0.01)
    assert works.low_s == pytest.approx(LOW * works.expected_s)
    assert works.high_s == pytest.approx(HIGH * works.expected_s)
    assert forecast(CHARACTERS, calibrated(Host())).high_s > CALIBRATED_HIGH * 1.1 * Host().step_s(
        CHARACTERS, compiled=False
    )


def test_an_h100s_host_is_inside_the_range() -> None:
    """4 × 128 in 40 micro-batches took 280 to 353 ms, A compiled 33 to 40, on a host that took 16 us for a product of
    two numbers (torch 2.11, a virtual machine)."""
    four = step_time(StepSpec.of(CHARACTERS, H100, dtype="bfloat16", compiled=False))
    a = launched({"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 512, "batch_size": 16,
                  "gradient_accumulation_steps": 4})  # fmt: skip
    compiled = step_time(StepSpec.of(a, H100, dtype="bfloat16", compiled=True))
    assert four.low_s < 0.280 < 0.353 < four.high_s
    assert compiled.low_s < 0.033 < 0.040 < compiled.high_s


def test_only_a_card_is_calibrated_with_narrow_steps() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    both = references_for(cuda, ["bfloat16", "float16"], [False, True])
    narrow = [
        ReferenceRequest("bfloat16", False, True),
        ReferenceRequest("bfloat16", True, True),
        ReferenceRequest("bfloat16", False, True, MANY_BLOCKS),
    ]
    assert [each for each in both if each.small] == narrow
    assert [each for each in both if not each.small] == [
        ReferenceRequest("bfloat16", False), ReferenceRequest("bfloat16", True), ReferenceRequest("float16", False)
    ]  # fmt: skip
    eager = references_for(cuda, ["float32"], [False])
    assert [each.compiled for each in eager] == [False, False, False]
    assert all(each.way in ((), (("attention", "bmm"),)) for each in references_for(cpu, ["float32"], [False]))


def test_dtype_without_compiled_steps_takes_anothers_correction() -> None:
    """On a card; by the same factor, as kernels are measured in each dtype."""
    options: dict[str, Any] = {"n_layer": 6, "n_embd": 768, "vocab_size": 50304, "batch_size": 8}
    config = launched(options)

    single = made_up_calibration(**CARD)  # type: ignore[arg-type]
    half = tuple(kernel.model_copy(update={"dtype": "bfloat16"}) for kernel in single.kernels)
    both = single.model_copy(update={"kernels": (*single.kernels, *half)})

    def found(*steps: StepTime, dtype: Any = "float32") -> float:
        gpu = H100.model_copy(update={"calibration": both.model_copy(update={"steps": steps})})
        time = step_time(StepSpec.of(config, gpu, dtype=dtype, compiled=True))
        return time.expected_s

    time_s = 1.25 * found(dtype="bfloat16")
    slower = StepTime(options=options, dtype="bfloat16", compiled=True, time_s=time_s)
    assert found(slower) == pytest.approx(1.25 * found())
    assert found(slower.model_copy(update={"compiled": False})) == found()


def test_half_precision_logits_are_cast_in_the_softmax() -> None:
    """A trace of torch 2.11 on an H100 has no kernel that casts them; the plan once counted two of 3.7 GB."""
    config = RunConfig(batch_size=12, master_weights=True)
    found = micro_batch(MicroBatchRun(StepSpec.of(config, H100, dtype="bfloat16", compiled=True)))
    logits = 12 * 1024 * 50304
    assert {op.kind for op in found if op.shape == (logits,)} == {"softmax", "softmax_backward"}


def test_kernels_of_a_step_take_what_an_h100_took_for_them() -> None:
    """124M, 12 rows, compiled with torch 2.11: the softmax of the logits 0.85 ms, attention 67 and 231 us."""
    way = MicroBatchRun(StepSpec.of(RunConfig(batch_size=12), H100, dtype="bfloat16", compiled=True))
    rates = CatalogueRates(H100)
    times = {op.kind: rates.time_s(op) for op in micro_batch(way)}
    assert times["softmax"] == pytest.approx(0.85e-3, rel=0.1)
    assert times["attention"] == pytest.approx(67e-6, rel=0.1)
    assert times["attention_backward"] == pytest.approx(231e-6, rel=0.1)


def test_a_step_that_is_one_graph_does_not_wait_for_its_host() -> None:
    """A host three times slower costs a graph no more than it costs the copies of its batches and the replay."""
    one = CHARACTERS.model_copy(update={"gradient_accumulation_steps": 1})
    graph = one.model_copy(update={"cuda_graph": "on"})
    quick, slow = Host(10e-6, 12e-6, 0.4e-3), Host(30e-6, 36e-6, 1.2e-3)
    plain, graphed = (
        [forecast(config, calibrated(host)).expected_s for host in (quick, slow)] for config in (one, graph)
    )
    assert graphed[0] < plain[0] / 3
    assert plain[1] == pytest.approx(3 * plain[0], rel=0.1)
    assert graphed[1] - graphed[0] <= (COPIES + REPLAY) * (slow.eager_s - quick.eager_s) + 1e-9


def test_a_graph_changes_little_where_the_card_has_enough_to_do() -> None:
    host = Host(8e-6, 6e-6, 0.2e-3)
    plain = forecast(LARGE, calibrated(host)).expected_s
    graphed = forecast(LARGE.model_copy(update={"cuda_graph": "on"}), calibrated(host)).expected_s
    assert graphed == pytest.approx(plain, rel=0.05)


@pytest.mark.parametrize("compiled", [False, True])
def test_python_around_blocks_counts_where_the_host_decides(compiled: bool) -> None:
    """Checkpoints, and blocks that are compiled one by one: by so many launches for each block and micro-batch."""
    host, found = Host(), calibrated(Host())
    plain = CHARACTERS.model_copy(update={"compile_blocks": compiled})
    checkpointed = plain.model_copy(update={"activation_checkpointing": True, "checkpointed_blocks": 3})
    blocks = CHARACTERS.gradient_accumulation_steps * CHARACTERS.n_layer
    more = blocks * REGION_LAUNCHES * host.eager_s if compiled else 0.0
    expected = forecast(plain, found, compiled=compiled).expected_s
    assert expected == pytest.approx(host.step_s(plain, compiled=compiled) + more, rel=1e-6)
    more += 3 / 4 * blocks * CHECKPOINT_LAUNCHES * host.eager_s
    expected = forecast(checkpointed, found, compiled=compiled).expected_s
    assert expected == pytest.approx(host.step_s(checkpointed, compiled=compiled) + more, rel=1e-6)


def test_model_compiled_whole_has_no_python_around_blocks() -> None:
    host, found = Host(), calibrated(Host())
    checkpointed = CHARACTERS.model_copy(update={"activation_checkpointing": True})
    expected = forecast(checkpointed, found, compiled=True).expected_s
    assert expected == pytest.approx(host.step_s(checkpointed, compiled=True), rel=1e-6)
