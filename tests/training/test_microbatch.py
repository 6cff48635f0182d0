"""Memory runs out at every place of a run, by injection: what is learned stays, or the run ends cleanly."""

import os
import signal
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from foretrain.base.errors import ExitCode, UserError
from foretrain.config.microbatches import divisors, largest_divisor, sequences_of, smaller_micro_batch, with_micro_batch
from foretrain.config.resolve import resolve
from foretrain.data.dataset import read_info
from foretrain.hardware.catalogue import find
from foretrain.model import graphed
from foretrain.model.graphed import GraphedStep
from foretrain.model.step import build, evaluation_loss, train_step
from foretrain.runs import folder
from foretrain.runs.folder import RunDirectory
from foretrain.training import memory_limit, trainer
from foretrain.training.attempts import attempt, is_out_of_memory
from foretrain.training.device import place
from foretrain.training.meter import Meter
from foretrain.training.starting import config_digest
from foretrain.training.trainer import Trainer
from tests.kit.calibrations import made_up_calibration
from tests.kit.command import refused
from tests.kit.tiny import tiny, write_dataset
from tests.kit.training import NO_MEMORY, AsAlways, assert_same, fail_in_step, final_tensors, train

CPU = torch.device("cpu")


@pytest.mark.fault(
    "out of memory in a forward or backward pass", row="B.1",
    sees="a note: the micro-batch is halved; at one sequence exit code 5 with remedies",
    safe="everything: the step is done again with the same rows, bit for bit the run at that micro-batch",
)  # fmt: skip
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("micro", [0, 1])
def test_out_of_memory_in_a_micro_step_learns_as_the_smaller(
    where: str, micro: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with dropout: weights, moments and the generator of the run that had the smaller one all along."""
    changes = {"dropout": 0.1, "max_iters": 6}
    reference = train(tiny(**changes, batch_size=2, gradient_accumulation_steps=4, eval_iters=4, out_dir="small"))
    with monkeypatch.context() as patch:
        fail_in_step(patch, 0, micro, where)
        record = train(tiny(**changes, out_dir="shrunk"))
    assert_same(final_tensors(Path("small")), final_tensors(Path("shrunk")))
    assert (record.config.batch_size, record.config.gradient_accumulation_steps, record.shrunk_from) == (2, 4, 4)
    assert record.val_loss == reference.val_loss  # the same sequences are evaluated
    events = RunDirectory(Path("shrunk")).read_lines("events")
    assert [e["values"]["new"] for e in events if e["id"] == "micro_batch_shrunk"] == [2]
    written = resolve(["shrunk/config.toml"]).config
    assert (written.batch_size, written.gradient_accumulation_steps, written.eval_rows) == (2, 4, 8)


def test_out_of_memory_in_a_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run that was stopped before that step and resumed at the smaller micro-batch."""

    def stop(event: Any) -> None:
        if getattr(event, "kind", "") == "step" and event.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    train(tiny(dropout=0.1, out_dir="resumed"), listen=stop)
    notes: list[Any] = []
    changed = tiny(dropout=0.1, out_dir="resumed", batch_size=2, gradient_accumulation_steps=4)
    resumed = train(changed, resume=True, listen=notes.append)
    assert "split_changed_dropout" in [getattr(note, "id", "") for note in notes]
    assert resumed.config.eval_rows == 8  # as before, though eval_iters x batch_size would be 4
    with monkeypatch.context() as patch:
        fail_in_step(patch, 4, 1, "backward")
        train(tiny(dropout=0.1, out_dir="shrunk"))
    assert_same(final_tensors(Path("resumed")), final_tensors(Path("shrunk")))


def test_a_resumed_run_keeps_the_micro_batch_that_memory_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        fail_in_step(patch, 1, 0, "forward")
        train(tiny(max_iters=4, out_dir="r", decay_lr=False))
    record = train(tiny(max_iters=7, out_dir="r", decay_lr=False), resume=True)
    assert (record.config.batch_size, record.shrunk_from, record.steps_done) == (2, 4, 7)
    assert "split_kept" in [event["id"] for event in RunDirectory(Path("r")).read_lines("events")]


def test_a_measured_step_that_is_broken_off_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd saves is counted by a hook; a tensor that it gives to the tensor's own node would stay for good."""
    config = tiny(attention="sdpa")
    state = build(config, CPU, torch.float32, compile=False)
    attend, kept = torch.nn.functional.scaled_dot_product_attention, list[weakref.ref[torch.Tensor]]()

    def followed(*given: Any, **options: Any) -> torch.Tensor:
        made = attend(*given, **options)  # its own node saves it
        kept.append(weakref.ref(made))
        return made

    def without_room(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", followed)
    state.model.layers()[-1].register_forward_hook(without_room)
    Meter(CPU).watch(state, compiled=False)
    ids = torch.zeros((config.batch_size, config.block_size), dtype=torch.int64)
    assert attempt(state, [(ids, ids)], partial(train_step, state, learning_rate=0.0)) == "micro_step"
    assert [found() for found in kept] == [None] * config.n_layer


@pytest.mark.parametrize(("graph_at", "expected"), [(4, [True, True]), (2, [False, False])])
def test_run_that_ran_out_of_memory_keeps_its_way_of_steps(
    graph_at: int, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph takes more: it is none of the ways out, though smaller micro-batches alone would be one; nor after a
    resume. That it is one is said once."""
    made: list[bool] = []

    def recorded(*given: Any) -> GraphedStep | None:
        found = graphed.graphed_step(*given)
        made.append(found is not None)
        return found

    monkeypatch.setattr(graphed, "is_one_graph", lambda config, *_: config.batch_size <= graph_at)
    monkeypatch.setattr(graphed, "GraphedStep", AsAlways)
    monkeypatch.setattr(trainer, "graphed_step", recorded)
    with monkeypatch.context() as patch:
        fail_in_step(patch, 1, 0, "forward")
        train(tiny(max_iters=4, out_dir="r", decay_lr=False))
    assert made == expected
    train(tiny(max_iters=6, out_dir="r", decay_lr=False), resume=True)
    assert set(made) == set(expected)
    events = [event["id"] for event in RunDirectory(Path("r")).read_lines("events")]
    assert events.count("one_graph") == 2 * expected[0]  # of the run, and of the resume


@pytest.mark.parametrize("step", [0, 2])
def test_out_of_memory_in_the_optimizer_is_never_tried_again(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in_step(monkeypatch, step, 0, "optimizer")
    with refused("memory.optimizer_step", code=ExitCode.OUT_OF_MEMORY) as caught:
        train(tiny())
    assert "--batch_size=2 --gradient_accumulation_steps=4" in str(caught.value)
    record = RunDirectory(Path("out")).read_record()
    assert (record.status, record.steps_done, record.config.batch_size) == ("failed", step, 2)


@pytest.mark.fault(
    "out of memory in an evaluation", row="B.1",
    sees="a note: smaller batches for the same sequences",
    safe="everything: training is not moved",
)  # fmt: skip
@pytest.mark.parametrize("at", [0, 1, 3, 5])
def test_out_of_memory_in_an_evaluation(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sequences in smaller batches: the same loss to rounding, and training is not moved."""
    whole = train(tiny(dropout=0.1, out_dir="whole"))
    original, count = trainer.evaluation_loss, iter(range(10**6))

    def failing(*args: Any) -> torch.Tensor:
        if next(count) == at:
            raise NO_MEMORY
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "evaluation_loss", failing)
        record = train(tiny(dropout=0.1, out_dir="shrunk"))
    assert_same(final_tensors(Path("whole")), final_tensors(Path("shrunk")))
    assert record.config.eval_batch_size == 2
    assert (record.val_loss, record.first_val_loss) == pytest.approx((whole.val_loss, whole.first_val_loss), rel=1e-6)
    assert "evaluation_shrunk" in [event["id"] for event in RunDirectory(Path("shrunk")).read_lines("events")]


def test_an_evaluation_of_one_sequence_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise NO_MEMORY

    monkeypatch.setattr(trainer, "evaluation_loss", failing)
    with refused("memory.one_sequence", code=ExitCode.OUT_OF_MEMORY):
        train(tiny())


@pytest.mark.parametrize("eval_batch", [1, 3, 5, 8, 64])
def test_evaluation_sees_the_same_sequences_at_any_batch(eval_batch: int) -> None:
    changes = {"eval_only": True, "eval_iters": 5}  # 20 sequences; 3 and 8 leave a smaller last batch
    whole = train(tiny(**changes, out_dir="whole"))
    other = train(tiny(**changes, out_dir="other", eval_batch_size=eval_batch))
    assert other.val_loss == pytest.approx(whole.val_loss, rel=1e-6)
    sequences = train(tiny(**changes, out_dir="s", batch_size=2, gradient_accumulation_steps=4, eval_sequences=20))
    assert sequences.val_loss == pytest.approx(whole.val_loss, rel=1e-6)


def test_evaluation_makes_no_second_peak() -> None:
    """Logits rule here. Many batches take what one takes: half of training's where each is half as large."""
    sizes = {"vocab_size": 4096, "block_size": 64, "max_iters": 6, "eval_interval": 3}

    def peaks(**changes: object) -> dict[str, int]:
        measured = train(tiny(**sizes, **changes)).memory.phases
        return {p.phase: p.allocated_bytes or 0 for p in measured}

    few, many = peaks(out_dir="few", eval_batch_size=2), peaks(out_dir="many", eval_batch_size=2, eval_iters=8)
    assert abs(many["evaluate_steady"] - few["evaluate_steady"]) < 4096
    logits = 4 * 2 * 64 * 4096
    assert few["evaluate_steady"] < few["steady_step"] - 2 * logits


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(NO_MEMORY)
    assert is_out_of_memory(MemoryError())
    for text in (
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory",
    ):
        assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as real:  # what this torch says when the system has no more
        torch.empty(2**50, dtype=torch.uint8)
    assert is_out_of_memory(real.value)


def test_nothing_holds_the_activations_of_a_failed_step() -> None:
    """An exception kept alive would keep every activation, and the smaller micro-batch would fail as well."""
    state = build(tiny(), CPU, torch.float32, compile=False)
    kept: list[weakref.ref[torch.Tensor]] = []

    def step(batches: Any) -> Any:
        for idx, targets in batches:
            loss = state.call(idx, targets)
            kept.append(weakref.ref(loss))
            raise NO_MEMORY

    batch = (torch.zeros(4, 16, dtype=torch.int64), torch.zeros(4, 16, dtype=torch.int64))
    before = torch.get_rng_state()
    NO_MEMORY.__traceback__ = None
    assert attempt(state, [batch], step) == "micro_step"
    NO_MEMORY.__traceback__ = None  # ours is a constant; PyTorch's is gone with its handler
    assert all(reference() is None for reference in kept)
    assert all(p.grad is None for p in state.model.parameters())
    assert torch.equal(torch.get_rng_state(), before)


# -- splits ------------------------------------------------------------------------------------------------


@given(st.integers(1, 3000), st.integers(1, 5000))
@hypothesis_settings(max_examples=150)
def test_divisors(number: int, most: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
    assert largest_divisor(number, most) == max(d for d in range(1, number + 1) if number % d == 0 and d <= most)


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 9), st.integers(1, 50))
@hypothesis_settings(max_examples=150)
def test_shrinking_ends_at_one_and_keeps_tokens_and_evaluation(batch: int, acc: int, own: int, iters: int) -> None:
    config = first = tiny(batch_size=batch, gradient_accumulation_steps=acc, eval_batch_size=own, eval_iters=iters)
    seen = [batch]
    while (smaller := smaller_micro_batch(config.batch_size, sequences_of(config))) is not None:
        config = with_micro_batch(config, smaller)
        assert smaller <= seen[-1] // 2
        assert config.tokens_per_step == first.tokens_per_step
        assert (config.eval_rows, config_digest(config)) == (first.eval_rows, config_digest(first))
        seen.append(smaller)
    assert seen[-1] == 1


@given(st.integers(1, 12), st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(0, 2**20))
@hypothesis_settings(max_examples=20)
def test_any_split_has_the_gradient_of_the_whole(rows: int, heads: int, layers: int, width: int, seed: int) -> None:
    """In fp32 to 1e-5 of the gradient's norm, against autograd on the whole batch."""
    shape = {"n_head": heads, "n_embd": 4 * heads * width, "n_layer": layers, "block_size": 8, "seed": seed}
    random = torch.Generator().manual_seed(seed)
    idx, targets = (torch.randint(0, 96, (rows, 8), generator=random) for _ in range(2))
    state = build(tiny(**shape, batch_size=rows, gradient_accumulation_steps=1), CPU, torch.float32, compile=False)
    loss = torch.nn.functional.cross_entropy(
        state.model.lm_head(state.model.hidden(idx)).flatten(0, 1), targets.flatten()
    )
    whole = torch.autograd.grad(loss, list(state.model.parameters()))
    norm = torch.stack([g.norm() for g in whole]).norm()
    found: list[torch.Tensor] = []
    for batch in divisors(rows):
        config = tiny(**shape, batch_size=batch, gradient_accumulation_steps=rows // batch, grad_clip=0.0)
        fresh = build(config, CPU, torch.float32, compile=False)

        def keep(*_: object, model: torch.nn.Module = fresh.model) -> None:
            found[:] = [p.grad.clone() for p in model.parameters() if p.grad is not None]

        fresh.optimizer.register_step_pre_hook(keep)
        train_step(fresh, zip(idx.split(batch), targets.split(batch), strict=True), 1e-3)
        difference = torch.stack([(a - b).norm() for a, b in zip(found, whole, strict=True)]).norm()
        assert difference <= 1e-5 * norm, batch


def test_the_digest_knows_the_product_alone() -> None:
    assert config_digest(tiny()) == config_digest(tiny(batch_size=8, gradient_accumulation_steps=1))
    assert config_digest(tiny()) != config_digest(tiny(batch_size=8))
    train(tiny(max_iters=4, out_dir="r"))
    with pytest.raises(UserError) as caught:
        train(tiny(max_iters=8, out_dir="r", batch_size=8), resume=True)
    assert "batch_size x gradient_accumulation_steps: 8 → 16" in str(caught.value)


# -- memory_limit ------------------------------------------------------------------------------------------


def test_a_limit_on_a_cpu_is_watched_and_recorded() -> None:
    notes: list[Any] = []
    record = train(tiny(memory_limit="50MiB"), listen=notes.append)
    told = [note for note in notes if getattr(note, "id", "") == "memory_exceeded"]
    assert len(told) == 1
    assert told[0].values["peak"] > told[0].values["limit"] == record.memory.limit_bytes == 50 * 2**20
    assert (record.memory.process_peak_bytes or 0) > 50 * 2**20
    notes.clear()
    train(tiny(memory_limit="500GiB", out_dir="b"), listen=notes.append)
    assert "memory_exceeded" not in [getattr(note, "id", "") for note in notes]


@pytest.mark.parametrize(("name", "index"), [("cuda", 3), ("cuda:0", 0), ("cuda:1", 1)])
@pytest.mark.parametrize(
    ("calibrated", "now", "card", "held"),
    [(None, None, "RTX 4070", 300), (None, None, "H200", 758), (200, None, "H200", 264), (200, 250, "RTX 4070", 314)],
)
def test_the_cap_on_cuda_leaves_room_for_the_context(
    calibrated: int | None, now: int | None, card: str, held: int, name: str, index: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Against a card that is not there: PyTorch's own functions, down to what they would call in C++."""
    given: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=12 * 2**30))
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", lambda *values: given.append(values), raising=False)
    monkeypatch.setattr(memory_limit, "beside_allocator", lambda _: now and now * 2**20)
    known = made_up_calibration().model_copy(update={"context_bytes": calibrated * 2**20}) if calibrated else None
    gpu = find(card).model_copy(update={"calibration": known})
    placement: Any = SimpleNamespace(device=torch.device(name), gpu=gpu)
    values = memory_limit.cap(placement, 6 * 2**30)
    assert values["context"] == held * 2**20
    assert given == [((6 * 2**30 - held * 2**20) / (12 * 2**30), index)]
    with refused(code=ExitCode.USAGE):
        memory_limit.cap(placement, held * 2**20)


def test_a_failure_outside_of_steps_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> Callable[..., None]:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")

    monkeypatch.setattr(trainer, "build", no_memory)
    info, directory = read_info(write_dataset(Path("data/toy"))), folder.create("out")
    try:
        with pytest.raises(UserError) as caught:
            Trainer(tiny(), info, directory, place(tiny())).run()
    finally:
        directory.release()
    assert (caught.value.id, caught.value.exit_code) == ("memory.out_of_memory", ExitCode.OUT_OF_MEMORY)


def test_an_own_evaluation_batch_does_not_make_training_symbolic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo would compile for any size what it has seen in two, and kernels for any size are slower."""
    original, symbolic = torch.compile, []

    def record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        symbolic.append(any(isinstance(value, torch.SymInt) for value in inputs))
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda model, **options: original(model, backend=record, **options))
    torch.compiler.reset()
    config = tiny(n_layer=1)
    state = build(config, CPU, torch.float32, compile=True)

    def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(rows, 16, dtype=torch.int64), torch.zeros(rows, 16, dtype=torch.int64)

    for rows in (7, 3):
        evaluation_loss(state, batch(rows))
    train_step(state, [batch(4), batch(4)], 1e-3)
    torch.compiler.reset()
    assert symbolic == [False] * 3
