"""Numbers that are none, put at many places of a run: nothing is changed, nothing bad is saved, and it is said where."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.base.errors import ExitCode, UserError
from foretrain.data.batches import TRAIN, starts
from foretrain.data.dataset import read_info
from foretrain.model.step import TrainState, build, train_step
from foretrain.runs import folder
from foretrain.training import checkpoint, nonfinite, trainer
from foretrain.training.device import place
from foretrain.training.trainer import Trainer
from tests.kit.command import refused
from tests.kit.poisoned import SMALL, run_poisoned, snapshot, stop_at_random
from tests.kit.tiny import tiny, write_dataset

CPU = torch.device("cpu")


@pytest.mark.fault(
    "NaN or infinity in a loss or gradient", row="B.2",
    sees="exit code 6, the tensor and the tokens",
    safe="everything before that step: its update is not made, and nothing of it is saved",
)  # fmt: skip
def test_nothing_changes_wherever_the_number_is_none() -> None:
    stop_at_random(16, seed=1)


def test_the_failure_report_names_the_tensor_and_the_tokens() -> None:
    error, _, _, directory = run_poisoned("r", "activation", 5, 1, "transformer.h.0.mlp.c_proj", float("nan"))
    assert error.id == "diverged.step"
    assert "transformer.h.0.mlp.c_proj (micro-step 1)" in str(error)
    assert "checkpoint of step 4 is intact" in str(error)
    report = json.loads((directory.path / "nonfinite-5.json").read_text())
    assert report["schema"] == "foretrain.nonfinite/1"
    assert report["first"] == {
        "kind": "activation", "name": "transformer.h.0.mlp.c_proj", "micro": 1, "numbers": 4 * 8 * 16, "not_a_number": 1,
        "infinite": 0,
    }  # fmt: skip
    config = directory.read_record().config
    assert report["rows"] == starts(config.seed, TRAIN, 5, 8, 2000 - 8).tolist()


@pytest.mark.fault(
    "the same with --on_nonfinite=skip", row="B.2",
    sees="a note for each, at most ten in a thousand steps",
    safe="everything: weights, moments and counts are as if that step had not been",
)  # fmt: skip
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "changes", [{}, {"optimizer": "muon"}, {"optimizer": "adamw8bit", "n_embd": 64},
     {"optimizer": "adamw4bit", "n_embd": 64}, {"dtype": "bfloat16", "master_weights": True}],
    ids=["adamw", "muon", "adamw8bit", "adamw4bit", "masters"],
)  # fmt: skip
@pytest.mark.parametrize("step", [0, 3])
def test_a_skipped_step_is_as_if_it_had_not_been(
    step: int, changes: dict[str, Any], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: weights, moments and step counts are those of a run that does all other steps."""
    if late and changes:
        pytest.skip("when it is read does not hang on the optimizer")
    if late:
        original_init = Trainer.__init__

        def init(self: Trainer, *words: Any, **named: Any) -> None:
            original_init(self, *words, **named)
            self.reads_late = True

        monkeypatch.setattr(Trainer, "__init__", init)
    where = ("activation", step, 1, "transformer.h.0.ln_1", float("nan"))
    error, _, after, directory = run_poisoned("r", *where, on_nonfinite="skip", max_iters=6, **changes)
    assert error is None
    events = [e for e in directory.read_lines("events") if e["id"] == "step_skipped"]
    assert [e["values"]["step"] for e in events] == [step]
    assert [m["step"] for m in directory.read_lines("metrics") if m["kind"] == "step"] == [
        s for s in range(6) if s != step
    ]
    config = tiny(**{**SMALL, **changes, "max_iters": 6})
    own = Trainer(config, read_info(Path("data/toy")), folder.create("other"), placement := place(config))
    state = build(config, CPU, trainer.TORCH_DTYPES[placement.dtype], compile=False)
    for other in range(6):
        if other != step:
            train_step(state, own.feed.again(config, other), trainer.learning_rate(config, other))
    own.directory.release()
    plain = snapshot(state)
    for key in after:  # a parameter's state may be there, empty, before its first step
        assert torch.equal(after[key], plain[key]), key


def test_too_many_skipped_steps_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "MOST_SKIPS", 2)
    original = trainer.train_step

    def bad(state: TrainState, batches: Any, rate: float) -> Any:
        hook = state.model.register_forward_hook(lambda _, __, out: out * float("inf"))
        result = original(state, batches, rate)
        hook.remove()
        return result

    monkeypatch.setattr(trainer, "train_step", bad)
    config, directory = tiny(**SMALL, on_nonfinite="skip"), folder.create("out")
    own = Trainer(config, read_info(write_dataset(Path("data/toy"))), directory, place(config))
    with pytest.raises(UserError) as caught:
        own.run()
    directory.release()
    assert caught.value.id == "diverged.transient"  # the report's own go had no such hook
    assert len(own.progress.skipped) == 2
    assert directory.read_record().steps_done == 2


@pytest.mark.fault(
    "float16's scale collapses", row="B.2",
    sees="exit code 6 and the advice to use bfloat16",
    safe="everything before the overflows",
)  # fmt: skip
def test_float16_that_always_overflows_stops_with_advice() -> None:
    """A real scaler on the CPU: gradients that no scale brings into range."""
    config, directory = tiny(**{**SMALL, "max_iters": 60, "eval_interval": 60}, dtype="float16"), folder.create("out")
    own = Trainer(config, read_info(write_dataset(Path("data/toy"))), directory, place(config))
    with pytest.MonkeyPatch.context() as patch:
        original = trainer.train_step

        def huge(state: TrainState, batches: Any, rate: float) -> Any:
            hook = next(state.model.parameters()).register_hook(lambda g: g * 1e38)
            result = original(state, batches, rate)
            hook.remove()
            return result

        patch.setattr(trainer, "train_step", huge)
        with pytest.raises(UserError) as caught:
            own.run()
    directory.release()
    assert caught.value.id == "diverged.scaler"
    assert "--dtype=bfloat16" in str(caught.value)
    assert own.progress.step == nonfinite.MOST_OVERFLOWS - 1


def test_moments_that_are_not_finite_are_never_saved() -> None:
    state = build(tiny(**SMALL), CPU, torch.float32, compile=False)
    idx = torch.zeros(4, 8, dtype=torch.int64)
    train_step(state, [(idx, idx)] * 2, 1e-3)
    next(iter(state.optimizer.state.values()))["exp_avg_sq"].view(-1)[0] = float("inf")
    with refused(code=ExitCode.DIVERGED):
        checkpoint.save(Path("c"), state, checkpoint.Progress(step=1))
    assert checkpoint.steps_in(Path("c")) == []
