"""A step that is recorded and replayed does what `train_step` does, whatever is written into it meanwhile.

No card is needed: a recorder for the CPU keeps the work, and does it again with each replay.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from foretrain.config.options import RunConfig
from foretrain.data.batches import Batch
from foretrain.model.graphed import WARM_STEPS, GraphedStep, OnCard
from foretrain.model.step import StepResult, TrainState, build, evaluation_loss, train_step
from tests.kit.tiny import tiny
from tests.kit.training import assert_same, final_tensors, stop_at_6, train

CONFIG = RunConfig(
    n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, batch_size=4, gradient_accumulation_steps=2,
    device="cpu", compile=False,
)  # fmt: skip
STEPS = WARM_STEPS + 4


def state_of(dtype: torch.dtype = torch.float32, **options: Any) -> TrainState:
    state = build(CONFIG.model_copy(update=options), torch.device("cpu"), dtype, compile=False)
    state.latch = torch.zeros(())
    return state


def batches(step: int) -> Iterator[Batch]:
    draw = torch.Generator().manual_seed(step)
    for _ in range(CONFIG.gradient_accumulation_steps):
        ids = torch.randint(0, CONFIG.vocab_size, (CONFIG.batch_size, CONFIG.block_size + 1), generator=draw)
        yield ids[:, :-1], ids[:, 1:]


def rate(step: int) -> float:
    return 0.01 / (step + 3)


def rounded(lr: float) -> float:
    """As a graph reads it."""
    return float(torch.tensor(lr, dtype=torch.float32))


def tensors_of(made: Any) -> list[Tensor]:
    if isinstance(made, StepResult):
        return [value for value in vars(made).values() if value is not None]
    return [made]


class OnCpu:
    """Recording changes nothing; a replay does the work, and its results are where those of the recording are."""

    def __init__(self, state: TrainState) -> None:
        self.state, self.replays, self.rooms = state, 0, 0

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        trained, optimizer = self.state.trained, self.state.optimizer
        before = copy.deepcopy((trained.state_dict(), optimizer.state_dict()))
        latch = self.state.latch.clone()  # type: ignore[union-attr]
        with torch.random.fork_rng():
            made = work()
        trained.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])
        self.state.latch.copy_(latch)  # type: ignore[union-attr]

        def replay() -> None:
            self.replays += 1
            for here, new in zip(tensors_of(made), tensors_of(work()), strict=True):
                here.copy_(new)

        return replay, made

    def make_room(self) -> None:
        self.rooms += 1


class Refusing(OnCpu):
    """A recording that meets a question to the card."""

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.state.optimizer.param_groups[0]["lr"] = torch.zeros(())
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")


def trained(take: Callable[[Iterator[Batch], float], StepResult]) -> list[tuple[float, float]]:
    results = [take(batches(step), rate(step)) for step in range(STEPS)]
    return [(float(result.loss), float(result.grad_norm)) for result in results]  # read when all are done


@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.float32, {}), (torch.bfloat16, {"master_weights": True}), (torch.bfloat16, {})]
)
def test_recorded_steps_are_the_same_steps(dtype: torch.dtype, options: dict[str, Any]) -> None:
    plain, state = state_of(dtype, **options), state_of(dtype, **options)
    recorder = OnCpu(state)
    graphed = GraphedStep(state, pytest.fail, recorder)
    expected = trained(lambda found, lr: train_step(plain, found, rounded(lr)))
    assert trained(graphed) == expected
    assert recorder.replays == STEPS - WARM_STEPS
    for ours, theirs in zip(state.trained.parameters(), plain.trained.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_evaluation_reads_what_it_is_given() -> None:
    state = state_of()
    recorder = OnCpu(state)
    graphed = GraphedStep(state, pytest.fail, recorder)
    first, second = list(batches(100))
    assert torch.equal(graphed.evaluate(first), evaluation_loss(state, first))
    trained(graphed)
    found = [graphed.evaluate(batch) for batch in (first, second, first)]
    assert recorder.replays == STEPS - WARM_STEPS + 3
    expected = [evaluation_loss(state, batch) for batch in (first, second, first)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    other = (first[0][:1], first[1][:1])
    assert torch.equal(graphed.evaluate(other), evaluation_loss(state, other))


@pytest.mark.parametrize("resumed", [False, True])
def test_a_smaller_last_batch_is_a_graph_too(resumed: bool) -> None:
    """It comes last, so the others must not be taken for batches of another size than the one that is recorded."""
    state = state_of(eval_sequences=7)
    recorder = OnCpu(state)
    graphed = GraphedStep(state, pytest.fail, recorder)
    ids, targets = next(batches(100))
    whole, rest = (ids, targets), (ids[:3], targets[:3])
    split = (whole, rest)
    if not resumed:
        for batch in split:
            graphed.evaluate(batch)
    trained(graphed)
    before = recorder.replays
    for batch in split * 2:
        assert torch.equal(graphed.evaluate(batch), evaluation_loss(state, batch))
    assert recorder.replays == before + 4


def test_an_evaluation_runs_before_the_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it compiles and allocates at first must not be in the graph, nor lie beside the graph's memory: after a
    resume the first one would come late."""
    state, seen = state_of(), list[tuple[torch.Size, bool]]()
    recorder = OnCpu(state)
    graphed = GraphedStep(state, pytest.fail, recorder)

    def judged(state: TrainState, batch: Batch) -> Tensor:
        seen.append((batch[0].shape, recorder.rooms > 0))
        return evaluation_loss(state, batch)

    monkeypatch.setattr("foretrain.model.graphed.evaluation_loss", judged)
    trained(graphed)
    assert seen == [((CONFIG.eval_batch, CONFIG.eval_block), False)]
    before, (batch, _) = recorder.replays, list(batches(100))
    losses = [graphed.evaluate(batch) for _ in range(2)]
    assert recorder.replays == before + 2
    assert torch.equal(*losses)
    assert torch.equal(losses[0], evaluation_loss(state, batch))


def test_a_step_that_cannot_be_recorded_runs_as_always() -> None:
    plain, state, told = state_of(), state_of(), list[str]()
    graphed = GraphedStep(state, told.append, Refusing(state))
    expected = trained(lambda found, lr: train_step(plain, found, rounded(lr)))
    assert trained(graphed) == expected
    assert told == ["RuntimeError: operation not permitted when stream is capturing"]
    assert graphed.gave_up


class TooLate(OnCpu):
    """A recording that fails when gradients are unscaled already."""

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("foretrain.model.step.update", _fails)
            super().record(work)
        raise AssertionError


def _fails(*_: Any, **__: Any) -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_a_scaler_forgets_a_recording_that_failed() -> None:
    plain, state, told = state_of(torch.float16), state_of(torch.float16), list[str]()
    graphed = GraphedStep(state, told.append, TooLate(state))
    assert trained(graphed) == trained(lambda found, lr: train_step(plain, found, rounded(lr)))
    assert len(told) == 1


def test_an_evaluation_that_cannot_be_recorded_runs_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of()
    recorder = OnCpu(state)
    graphed = GraphedStep(state, pytest.fail, recorder)
    batch, _ = list(batches(100))
    graphed.evaluate(batch)
    trained(graphed)
    monkeypatch.setattr(recorder, "record", _fails)
    for _ in range(2):
        assert torch.equal(graphed.evaluate(batch), evaluation_loss(state, batch))


def test_evaluation_before_a_recording_precedes_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """If memory runs out there, the step can be tried again."""
    state = state_of()
    graphed = GraphedStep(state, pytest.fail, OnCpu(state))
    for step in range(WARM_STEPS):
        graphed(batches(step), rate(step))
    monkeypatch.setattr("foretrain.model.graphed.evaluation_loss", _fails)
    waiting = batches(WARM_STEPS)
    with pytest.raises(RuntimeError, match="not permitted"):
        graphed(waiting, rate(WARM_STEPS))
    assert len(list(waiting)) == CONFIG.gradient_accumulation_steps


def record_on_cpu(monkeypatch: pytest.MonkeyPatch, kind: type[OnCpu]) -> list[OnCpu]:
    """Let trainers record; the recorders that they made."""
    made: list[OnCpu] = []

    def graphed_step(state: TrainState, gpu: object, failed: Callable[[str], None], asked: object) -> GraphedStep:
        made.append(kind(state))
        return GraphedStep(state, failed, made[-1])

    monkeypatch.setattr("foretrain.training.trainer.graphed_step", graphed_step)
    return made


@pytest.mark.usefixtures("own_directory")
def test_stopped_run_of_graphs_ends_as_one_without_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    recorders = record_on_cpu(monkeypatch, OnCpu)
    whole = train(tiny(out_dir="whole", dropout=0.1))
    assert train(tiny(out_dir="stopped", dropout=0.1), listen=stop_at_6).status == "interrupted"
    resumed = train(tiny(out_dir="stopped", dropout=0.1), resume=True)
    assert [recorder.replays > 2 for recorder in recorders] == [True, True, True]
    assert resumed.val_loss == whole.val_loss
    assert_same(final_tensors(Path("whole")), final_tensors(Path("stopped")))


@pytest.mark.usefixtures("own_directory")
def test_a_run_that_could_not_be_recorded_says_so_in_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_cpu(monkeypatch, Refusing)
    notes: list[str] = []
    record = train(tiny(), listen=lambda event: notes.append(getattr(event, "id", "")))
    assert (record.status, record.config.cuda_graph) == ("finished", "off")
    assert notes.count("not_recorded") == 1


def test_recordings_share_a_stream_and_leave_other_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream for a run, however often it records anew; batches are page-locked meanwhile, by another thread."""
    state, modes = state_of(), list[Any]()

    def graph(*_: Any, stream: object, capture_error_mode: str = "global", **__: Any) -> AbstractContextManager[None]:
        modes.append((stream, capture_error_mode))
        return nullcontext()

    monkeypatch.setattr("torch.cuda.Stream", lambda device: object())
    monkeypatch.setattr("torch.cuda.CUDAGraph", MagicMock)
    monkeypatch.setattr("torch.cuda.graph", graph)
    for _ in range(2):
        OnCard(state).record(lambda: None)
    assert modes == [(state.aside, "thread_local")] * 2
    assert state.aside is not None
