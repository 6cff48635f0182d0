"""Updates in the backward pass: AdamW's numbers, what is alive, what is not finite, what is refused, the forecast."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretrain.advice.rules import BY_ID
from foretrain.advice.rules.base import State
from foretrain.config.checks import check
from foretrain.config.microbatches import with_micro_batch
from foretrain.config.options import RunConfig
from foretrain.config.sharing import Sharing, sharing_problem
from foretrain.hardware.catalogue import find
from foretrain.model.step import TrainState, build, train_step
from foretrain.predict.memory import predict
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ops import MicroBatchRun, optimizer_launches, tensor_count
from foretrain.predict.trace import self_test
from foretrain.predict.trace.service import Request
from foretrain.training.attempts import NotCompiled, attempt, use_split
from tests.kit.command import refused
from tests.kit.kernels import Kernels, learnable_batches
from tests.kit.poisoned import run_poisoned, snapshot
from tests.kit.techniques import GPU, REFERENCE
from tests.kit.tiny import tiny
from tests.kit.training import assert_same, final_tensors, train

CPU = torch.device("cpu")
ALONE: dict[str, Any] = {"gradient_accumulation_steps": 1, "grad_clip": 0.0}
EARLY: dict[str, Any] = {**ALONE, "optimizer_in_backward": True}


def made(dtype: torch.dtype = torch.float32, **changes: Any) -> TrainState:
    return build(tiny(**changes), CPU, dtype, compile=False)


def steps(state: TrainState, count: int) -> list[tuple[float, float]]:
    found = [train_step(state, learnable_batches(state.config, step), 3e-3) for step in range(count)]
    return [(float(result.loss), float(result.grad_norm)) for result in found]


# -- the same maths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"dropout": 0.1, "bias": True}, {"activation_checkpointing": True}, {"recompute_norm_gelu": True},
        {"loss_chunk_size": 16}, {"recipe": "modern"}, {"recipe": "llama", "tied_embeddings": True},
        {"recipe": "nanochat"}, {"matmul": "int8", "block_size": 32},
    ],
    ids=str,
)  # fmt: skip
def test_it_learns_bit_for_bit_what_adamw_learns(changes: dict[str, Any], dtype: torch.dtype) -> None:
    """Losses, norms, weights, moments and step counts."""
    found = []
    for way in (ALONE, EARLY):
        state = made(dtype, **changes, **way, optimizer="adamw")  # which seeds dropout, too
        found.append((steps(state, 6), snapshot(state)))
    (losses, expected), (own, early) = found
    assert own == losses
    assert_same(expected, early)
    assert all(value == 6 for key, value in expected.items() if key.startswith("step/"))


def test_a_tied_weight_is_updated_once_with_its_whole_gradient() -> None:
    state = made(**EARLY)
    table, seen = state.model.get_parameter("transformer.wte.weight"), list[Tensor]()
    update = state.early.update

    def watched(parameter: Tensor) -> None:
        if parameter is table:
            seen.append(parameter.grad.clone())
        update(parameter)

    state.early.update = watched
    batch = learnable_batches(state.config, 0)
    train_step(state, batch, 3e-3)
    other = made(**ALONE)
    other.call(*batch[0]).backward()
    whole = other.model.get_parameter("transformer.wte.weight").grad
    assert len(seen) == 1
    assert torch.equal(seen[0], whole)


def test_gradients_are_never_there_together() -> None:
    state, alive = made(**EARLY), list[int]()
    update, parameters = state.early.update, list(state.model.parameters())

    def watched(parameter: Tensor) -> None:
        alive.append(sum(each.grad is not None for each in parameters))
        update(parameter)

    state.early.update = watched
    train_step(state, learnable_batches(state.config, 0), 3e-3)
    assert alive == [1] * len(parameters)
    assert all(each.grad is None for each in parameters)


def test_a_pass_of_others_changes_nothing() -> None:
    """As a failure's report does one, or a measurement."""
    state = made(**EARLY)
    before = snapshot(state)
    state.call(*learnable_batches(state.config, 0)[0]).backward()
    assert_same(before, snapshot(state))
    assert all(each.grad is not None for each in state.model.parameters())


def test_a_run_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    knobs: dict[str, Any] = {**EARLY, "max_iters": 6, "eval_interval": 3}
    train(tiny(**knobs, out_dir="whole"))
    train(tiny(**{**knobs, "max_iters": 3}, out_dir="part"))
    train(tiny(**knobs, out_dir="part"), resume=True)
    whole = final_tensors(Path("whole"))
    assert_same(whole, final_tensors(Path("part")))
    train(tiny(**{**knobs, "optimizer_in_backward": False}, out_dir="plain"))
    assert_same(whole, final_tensors(Path("plain")))


# -- what is not finite ------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    state = made(**EARLY)
    steps(state, 1)
    before, call = snapshot(state), state.call
    state.call = lambda idx, targets: call(idx, targets) * float("inf")
    result = train_step(state, learnable_batches(state.config, 1), 1e-2)
    assert result.held == 1
    assert_same(before, snapshot(state))
    state.call = call
    assert train_step(state, learnable_batches(state.config, 1), 1e-2).held == 0  # no latch: the next one is made


@pytest.mark.parametrize("stops", [True, False])
def test_nonfinite_gradient_holds_back_its_and_later_parameters(stops: bool) -> None:
    state = made(**EARLY)
    steps(state, 1)
    if stops:
        state.latch = torch.zeros(())
    before = snapshot(state)
    bad = state.model.get_parameter("transformer.h.0.mlp.c_proj.weight")
    hook = bad.register_hook(lambda gradient: gradient * float("nan"))
    result = train_step(state, learnable_batches(state.config, 1), 1e-2)
    hook.remove()
    after = snapshot(state)
    assert result.held == 1
    assert not torch.isfinite(result.grad_norm)
    assert all(value.isfinite().all() for value in after.values())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "transformer.h.0.mlp.c_proj.weight" not in changed
    assert "step/transformer.h.0.mlp.c_proj.weight" not in changed
    assert "transformer.h.0.attn.c_attn.weight" not in changed  # its gradient comes later
    assert {"transformer.ln_f.weight", "transformer.h.1.mlp.c_proj.weight"} <= changed  # theirs came before
    again = train_step(state, learnable_batches(state.config, 2), 1e-2)
    assert again.held == stops  # with a latch, nothing changes until the host has seen it
    assert stops == all(torch.equal(value, after[name]) for name, value in snapshot(state).items())


@pytest.mark.parametrize("where", ["activation", "weight gradient"])
def test_the_run_hears_of_it(where: str) -> None:
    poisoned = where, 3, 0, "transformer.h.0.mlp.c_proj", float("nan")
    error, before, after, directory = run_poisoned("r", *poisoned, **EARLY)
    assert error.id == "diverged.step"
    assert (directory.path / "nonfinite-3.json").exists()
    if where == "activation":  # the loss tells, before the backward pass begins
        assert_same(before, after)


def test_skipped_steps_go_on() -> None:
    poisoned = "activation", 3, 0, "transformer.h.0.mlp.c_proj", float("nan")
    error, _, _, directory = run_poisoned("r", *poisoned, on_nonfinite="skip", **EARLY)
    assert error is None
    assert [e["values"]["step"] for e in directory.read_lines("events") if e["id"] == "step_skipped"] == [3]


# -- what breaks off ---------------------------------------------------------------------------------------


def broken(state: TrainState, error: Exception, name: str | None) -> Any:
    """What `attempt` makes of a step that fails when the gradient of `name` is made; None: in the forward pass."""

    def fail(*_: Any) -> None:
        raise error

    target: Any = state.model if name is None else state.model.get_parameter(name)
    hook = target.register_forward_pre_hook(fail) if name is None else target.register_hook(fail)
    batches = learnable_batches(state.config, 1)
    found = attempt(state, batches, lambda given: train_step(state, given, 1e-2))
    hook.remove()
    return found


def test_memory_out_before_the_first_update_is_retried_smaller() -> None:
    state, plain = made(**EARLY), made(**ALONE)
    steps(state, 2)
    steps(plain, 2)
    before = snapshot(state)
    assert broken(state, torch.OutOfMemoryError("gone"), None) == "micro_step"
    assert_same(before, snapshot(state))
    for each in (state, plain):
        use_split(each, with_micro_batch(each.config, 2), compiled=False)
    assert not state.config.optimizer_in_backward  # of several micro-batches gradients are summed
    assert steps(state, 2) == steps(plain, 2)
    assert_same(snapshot(plain), snapshot(state))


def test_memory_that_runs_out_after_an_update_ends_the_run() -> None:
    state = made(**EARLY)
    steps(state, 2)
    assert broken(state, torch.OutOfMemoryError("gone"), "transformer.h.0.mlp.c_fc.weight") == "optimizer"


def test_a_compiler_that_fails_after_an_update_ends_the_run() -> None:
    failure = type("BackendCompilerFailed", (RuntimeError,), {"__module__": "torch._dynamo.exc"})
    state = made(**EARLY)
    steps(state, 2)
    assert broken(state, failure("no"), None) == NotCompiled("BackendCompilerFailed: no")
    found = broken(state, failure("no"), "transformer.h.0.mlp.c_fc.weight")
    assert found == NotCompiled("BackendCompilerFailed: no", sent=True)


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "id"),
    [
        ({}, None), ({"compile": False, "compile_blocks": False}, None),
        ({"gradient_accumulation_steps": 2}, "in_backward_step"), ({"grad_clip": 1.0}, "in_backward_step"),
        ({"optimizer": "muon"}, "in_backward_step"), ({"optimizer": "adamw8bit"}, "in_backward_step"),
        ({"optimizer": "adamw4bit"}, "in_backward_step"), ({"compile_blocks": False}, "in_backward_compile"),
        ({"dtype": "float16"}, "excluded"), ({"cuda_graph": "on"}, "excluded"), ({"master_weights": True}, "excluded"),
        ({"optimizer_offload": True}, "excluded"), ({"optimizer_offload": True, "gradient_offload": True}, "excluded"),
    ],
    ids=str,
)  # fmt: skip
def test_what_it_cannot_go_with_is_refused(changes: dict[str, Any], id: str | None) -> None:
    _, problems = check({**EARLY, "compile_blocks": True, **changes}, {})
    assert [problem.id for problem in problems] == ([f"config.{id}"] if id else [])
    assert all("optimizer_in_backward" in str(problem) for problem in problems)


def test_a_card_without_bfloat16_and_ranks_refuse_it() -> None:
    config = RunConfig(**EARLY, compile=False)
    StepSpec.checked(config, find("RTX 4070"))
    with refused("config.in_backward_dtype"):
        StepSpec.checked(config, find("T4"))
    problem = sharing_problem(config, Sharing("ddp", 2, 2))
    assert problem.id == "config.sharing_in_backward"


def test_advice_offers_it_only_where_it_works() -> None:
    rule = BY_ID["optimizer_in_backward"]

    def offers(card: str = "RTX 4070", **changes: Any) -> bool:
        config = RunConfig.model_validate({**ALONE, "compile": False, **changes})
        return bool(rule.changes(State(config, find(card), "foretrain", 0)))

    assert offers()
    assert offers(compile=True, compile_blocks=True)
    assert not offers(compile=True)
    assert not offers(gradient_accumulation_steps=2)
    assert not offers(grad_clip=1.0)
    assert not offers(optimizer="adamw8bit")
    assert not offers(optimizer_in_backward=True)
    assert not offers("T4")
    assert offers("T4", dtype="float32")


# -- forecast ----------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "n_layer": 5, "n_head": 4, "n_embd": 256, "block_size": 256, "batch_size": 2, "vocab_size": 4096, "eval_iters": 1,
}  # fmt: skip
WAYS: list[dict[str, Any]] = [
    {}, {"dropout": 0.1, "bias": True}, {"activation_checkpointing": True, "loss_chunk_size": 128},
    {"recompute_norm_gelu": True}, {"recipe": "llama", "n_kv_head": 2}, {"recipe": "modern", "optimizer": "adamw"},
]  # fmt: skip


def assert_phases_are_the_trace(changes: dict[str, Any], dtype: Any, *, compiled: bool, rel: float) -> None:
    more = {"compile": True, "compile_blocks": True} if compiled else {}
    spec = StepSpec.of(tiny(**SIZES | EARLY | more | changes), GPU, dtype=dtype, compiled=compiled)
    found = self_test.trace(Request(spec).job()).peaks()
    for phase in predict(spec).phases:
        if phase.phase in found and phase.phase != "evaluate_first":  # before any update
            assert phase.tensors_bytes == pytest.approx(found[phase.phase][0], rel=rel), phase.phase


@pytest.mark.parametrize(
    ("changes", "dtype"), [*((each, "bfloat16") for each in WAYS), ({}, "float32"), (WAYS[-2], "float32")], ids=str
)
def test_the_estimate_is_the_trace(changes: dict[str, Any], dtype: str) -> None:
    assert_phases_are_the_trace(changes, dtype, compiled=False, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("changes", WAYS, ids=str)
def test_the_estimate_of_compiled_blocks_is_the_trace(changes: dict[str, Any]) -> None:
    assert_phases_are_the_trace(changes, "bfloat16", compiled=True, rel=0.005)


def test_a_model_that_is_mostly_weights_needs_a_quarter_less() -> None:
    """4 of 16 bytes a parameter."""
    config = REFERENCE.model_copy(update={**ALONE, "n_layer": 12, "n_embd": 1024, "batch_size": 1, "block_size": 16})
    plain, early = (
        max(p.tensors_bytes for p in predict(StepSpec.of(c, GPU, dtype="float32", compiled=False)).phases)
        for c in (config, config.model_copy(update=EARLY))
    )
    assert early / plain == pytest.approx(0.75, abs=0.04)


def test_launches_are_those_of_a_real_step() -> None:
    """What a step has more than its two passes."""
    state = made(**EARLY)
    steps(state, 2)
    batch = learnable_batches(state.config, 0)[0]
    with Kernels() as whole:
        train_step(state, [batch], 1e-3)
    with Kernels() as passes:
        state.call(*batch).backward()
    way = MicroBatchRun(StepSpec.of(state.config, GPU, dtype="float32", compiled=False), True)
    assert whole.count - passes.count == pytest.approx(optimizer_launches(way), abs=tensor_count(way))
