"""What is chosen on a CPU: the quickest way of those that a config leaves open, once, and again on resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.config.options import RunConfig
from foretrain.data.dataset import DatasetInfo
from foretrain.hardware.catalogue import Gpu
from foretrain.runs.record import TrainedRun
from foretrain.training import starting
from foretrain.training.device import Placement, place
from foretrain.training.starting import Chosen, StepVariant
from tests.kit.command import foretrain
from tests.kit.tiny import TINY, tiny, write_dataset

LONG = {"max_iters": 10**9, "warmup_iters": 0, "decay_lr": False}


@pytest.fixture(autouse=True)
def own_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path / "cache"))


def on_cpu(config: RunConfig) -> Placement:
    """The same peak on every machine, so that the same runs are short."""
    return replace(place(config), gpu=Gpu(name="a CPU", kind="cpu", fp32_tflops=0.1, source="test"))


def steps_take(monkeypatch: pytest.MonkeyPatch, seconds: dict[tuple[str, str, bool], float]) -> list[str]:
    """Steps that take these seconds and train nothing; the dtype of each that was built."""
    built = []

    def make(self: Any, config: RunConfig, way: StepVariant) -> None:
        built.append(way.dtype)
        self.way, self.best_s, self.clock = way, float("inf"), None

    def step(self: Any) -> float:
        return seconds[self.way.dtype, self.way.attention, self.way.master_weights]

    monkeypatch.setattr(starting.Candidate, "__init__", make)
    monkeypatch.setattr(starting.Candidate, "step", step)
    monkeypatch.setattr(starting, "BUDGET_S", 0.0)
    return built


QUICK_HALF = {
    ("float32", "sdpa", False): 1.0, ("float32", "bmm", False): 0.97, ("bfloat16", "sdpa", False): 1.2,
    ("bfloat16", "bmm", False): 0.6, ("bfloat16", "sdpa", True): 1.1, ("bfloat16", "bmm", True): 0.59,
}  # fmt: skip


def test_the_quickest_way_is_taken_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_take(monkeypatch, QUICK_HALF)
    config = tiny(**LONG)
    found = starting.decide(config, on_cpu(config), set())
    # Master weights are quicker by 2% alone, so the way that changes less is taken.
    assert (found.config.dtype, found.config.attention, found.config.master_weights) == ("bfloat16", "bmm", False)
    assert found.placement.dtype == "bfloat16"
    id, values = found.placement.notes[-1]
    assert id == "chosen"
    assert (values["step"], values["plain_step"]) == (0.6, 1.0)


def test_what_is_hardly_faster_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_take(monkeypatch, {way: seconds if way[0] == "float32" else 2.0 for way, seconds in QUICK_HALF.items()})
    config = tiny(**LONG)
    found = starting.decide(config, on_cpu(config), set())
    assert (found.config.dtype, found.config.attention, found.placement.dtype) == ("float32", "sdpa", "float32")
    assert found.placement.notes[-1][0] == "chosen_plain"


def test_it_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = steps_take(monkeypatch, QUICK_HALF)
    config = tiny(**LONG)
    first = starting.decide(config, on_cpu(config), set())
    count = len(built)
    again = starting.decide(config, on_cpu(config), set())
    assert len(built) == count
    assert again.config == first.config
    assert again.placement.notes[-1][0] == "chosen_known"
    starting.decide(tiny(**{**LONG, "n_layer": 3}), on_cpu(config), set())  # another model
    assert len(built) == 2 * count
    for path in (Path("cache/choices")).iterdir():  # a damaged file is measured anew
        path.write_text("{")
    assert starting.decide(config, on_cpu(config), set()).config == first.config
    assert len(built) == 3 * count


def test_what_the_user_gives_is_not_chosen() -> None:
    open_ways = starting.candidates(tiny(), set())
    assert {(w.dtype, w.attention, w.master_weights) for w in open_ways} == set(QUICK_HALF)
    given = {"dtype": "bfloat16", "attention": "sdpa", "master_weights": False}
    assert len(starting.candidates(tiny(**given), set(given))) == 1
    assert {w.dtype for w in starting.candidates(tiny(dtype="float32"), {"dtype"})} == {"float32"}
    assert {w.attention for w in starting.candidates(tiny(dropout=0.1), set())} == {"sdpa"}
    assert {w.attention for w in starting.candidates(tiny(recipe="modern"), set())} == {"sdpa"}
    assert {w.threads for w in starting.candidates(tiny(cpu_threads=3), {"cpu_threads"})} == {3}


def test_short_runs_and_cards_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    built = steps_take(monkeypatch, QUICK_HALF)
    config = tiny()
    short = starting.decide(config, on_cpu(config), set())
    assert (short.config.dtype, short.config.attention, short.config.master_weights) == ("float32", "sdpa", False)
    card = replace(on_cpu(config), device=torch.device("cuda"), dtype="bfloat16")
    assert starting.decide(tiny(**LONG), card, set()).config == tiny(**LONG)
    assert not built


def test_a_resumed_run_goes_on_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    built = steps_take(monkeypatch, QUICK_HALF)
    config = tiny(**LONG)
    chosen = {"dtype": "bfloat16", "attention": "bmm", "master_weights": True, "cpu_threads": 1}
    recorded = config.model_copy(update=chosen)
    record = record_of(recorded, dtype="bfloat16")
    found = starting.recall(config, on_cpu(config), record, set())
    assert (found.config, found.placement.dtype) == (recorded, "bfloat16")
    asked = starting.recall(tiny(**LONG, dtype="float32"), on_cpu(config), record, {"dtype"})
    assert asked.placement.dtype == "float32"  # which the trainer then refuses, as it changes what is learned
    open_in_words = starting.recall(config, on_cpu(config), record, {"dtype", "attention", "cpu_threads"})
    assert (open_in_words.config, open_in_words.placement.dtype) == (recorded, "bfloat16")  # auto is no wish
    assert not built


def record_of(config: RunConfig, **changes: object) -> TrainedRun:
    """Of a run that has begun."""
    placement = on_cpu(config)
    info = DatasetInfo(name="toy", path="data/toy", dtype="uint16", vocab_size=96, train_tokens=2000, val_tokens=500)
    record = TrainedRun(
        id="out", name="tiny", status="interrupted", started_at="now", config=config, gpu=placement.gpu,
        dtype=placement.dtype, compiled=False, dataset=info, n_params=1,
    )  # fmt: skip
    return record.model_copy(update=changes)


def test_what_failed_to_compile_is_not_compiled_after_a_resume() -> None:
    """Compiled kernels round otherwise, so the resumed run would not be the same."""
    config = tiny(compile=True)
    placement = replace(on_cpu(config), compiled=True)
    found = starting.recall(config, placement, record_of(config, compiled=False), set())
    assert (found.placement.compiled, found.placement.notes[-1][0]) == (False, "still_eager")
    found = starting.recall(config, placement, record_of(config, compiled=True), set())
    assert (found.placement.compiled, found.placement.notes) == (True, placement.notes)
    uncompiled = record_of(tiny(compile=False), compiled=False)
    assert starting.recall(config, placement, uncompiled, {"compile"}).placement.compiled
    left_open = starting.recall(config, placement, uncompiled, set())
    assert (left_open.placement.compiled, left_open.config.compile) == (False, False)


def test_a_step_that_was_launched_kernel_by_kernel_stays_so() -> None:
    for old, given, now in (("off", set(), "off"), ("auto", set(), "auto"), ("off", {"cuda_graph"}, "auto")):
        found = starting.recall(tiny(), on_cpu(tiny()), record_of(tiny(cuda_graph=old)), given)
        assert found.config.cuda_graph == now


def test_a_short_run_on_a_cpu_is_not_compiled_unless_asked_for() -> None:
    def spared(given: set[str], device: str = "cpu", **options: Any) -> bool:
        config = tiny(compile=True, **options)
        placement = replace(on_cpu(config), compiled=True, device=torch.device(device))
        found = starting.spared_compiling(Chosen(config, placement), given)
        assert found.config.compile == found.placement.compiled
        assert (found == Chosen(config, placement)) == found.placement.compiled
        return not found.placement.compiled

    assert spared(set())
    assert not spared(set(), **LONG)
    assert not spared({"compile"})
    assert not spared(set(), "cuda")


def test_auto_keeps_the_dtype_that_it_meant_on_another_card() -> None:
    config = tiny(dtype="auto")
    card = replace(on_cpu(config), device=torch.device("cuda"), dtype="float16")  # which knows no bfloat16
    assert starting.recall(config, card, record_of(config, dtype="bfloat16"), set()).placement.dtype == "bfloat16"


def test_the_real_measurement_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "BUDGET_S", 0.0)
    config = tiny(**LONG)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    found = starting.measure(config, starting.candidates(config, set()))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert len({(w.dtype, w.attention, w.master_weights) for w in found.ways}) == 6
    assert all(way.step_s > 0 for way in found.ways)
    assert found.ways[0].step_s <= min(w.step_s for w in found.ways) / (1 - starting.LEAST_GAIN) ** 6


def test_a_few_slow_moments_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large step leaves the budget after three rounds; the machine was busy in all three of the fastest way."""
    times = {("bfloat16", "bmm", False): [0.13, 0.12, 0.13, *[0.1] * 99], ("bfloat16", "sdpa", False): [0.115] * 99}

    class Scripted:
        def __init__(self, config: RunConfig, way: starting.StepVariant) -> None:
            self.way, self.best_s, self.clock = way, float("inf"), None
            self.left = iter(times.get((way.dtype, way.attention, way.master_weights), [0.4] * 99))

        def time(self) -> None:
            self.best_s = min(self.best_s, next(self.left))

    monkeypatch.setattr(starting, "BUDGET_S", 0.0)
    monkeypatch.setattr(starting, "Candidate", Scripted)
    config = tiny(**LONG, cpu_threads=1)
    best = starting.measure(config, starting.candidates(config, set())).ways[0]
    assert (best.dtype, best.attention, best.step_s) == ("bfloat16", "bmm", 0.1)


def test_a_slice_has_the_shape_of_the_whole() -> None:
    for knobs in ({}, {"block_size": 64, "n_embd": 128, "n_head": 4, "n_layer": 4, "vocab_size": 256}, {"n_layer": 48}):
        whole = RunConfig.model_validate(knobs)
        part = starting.slice_of(whole)
        assert (part.n_embd, part.n_head, part.block_size) == (whole.n_embd, whole.n_head, whole.block_size)
        assert 1 <= part.n_layer <= whole.n_layer
        assert part.vocab_size / whole.vocab_size == pytest.approx(part.n_layer / whole.n_layer, rel=0.02)


def test_the_command_records_what_it_chose() -> None:
    write_dataset(Path("data/toy"))
    foretrain("train", *[f"--{k}={v}" for k, v in {**TINY, "max_iters": 6}.items()], code=0)
    config = Path("out/config.toml").read_text()
    assert 'dtype = "float32"' in config
    assert 'attention = "sdpa"' in config


WIDE = {"vocab_size": 50304, "block_size": 512, "batch_size": 8}  # 786 MiB of logits


def test_large_logits_are_made_in_chunks_and_that_is_said() -> None:
    config = tiny(**WIDE, max_iters=1)
    found = starting.decide(config, on_cpu(config), set())
    assert found.config.loss_chunk_size == starting.CHUNK
    (values,) = [values for id, values in found.placement.notes if id == "loss_in_chunks"]
    assert values == {"chunk": 1024, "size": 4 * 50304 * 512 * 8}


@pytest.mark.parametrize(
    ("options", "given", "kept"),
    [
        ({**WIDE, "vocab_size": 256}, set(), 0), (WIDE, {"loss_chunk_size"}, 0),
        ({**WIDE, "loss_chunk_size": 512}, {"loss_chunk_size"}, 512), ({**WIDE, "recipe": "nanochat"}, set(), 0),
        ({**WIDE, "auto_chunker": True, "compile": True}, set(), 0),
    ],
    ids=["small", "whole on purpose", "other chunks", "a recipe that cannot", "another chunker"],
)  # fmt: skip
def test_the_loss_stays_as_it_is(options: dict[str, Any], given: set[str], kept: int) -> None:
    config = tiny(**options, max_iters=1)
    found = starting.decide(config, on_cpu(config), given)
    assert found.config.loss_chunk_size == kept
    assert not [id for id, _ in found.placement.notes if id == "loss_in_chunks"]
