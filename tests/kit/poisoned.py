"""Runs into which a number that is none is put."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foretrain.base.errors import ExitCode, UserError
from foretrain.data.dataset import read_info
from foretrain.model.step import TrainState
from foretrain.runs import folder
from foretrain.runs.folder import RunDirectory
from foretrain.training import checkpoint, trainer
from foretrain.training.device import place
from foretrain.training.trainer import Trainer
from tests.kit.tiny import tiny, write_dataset

PLACES = ("activation", "gradient", "loss", "weight gradient", "parameter")

SMALL = {"n_layer": 1, "n_embd": 16, "n_head": 2, "block_size": 8, "max_iters": 8, "eval_interval": 4, "eval_iters": 1}


def snapshot(state: TrainState) -> dict[str, torch.Tensor]:
    found = {name: p.detach().clone() for name, p in state.trained.named_parameters()}
    for name, parameter in state.trained.named_parameters():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            found[f"{key}/{name}"] = value.clone()
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Before and after a step; moments may have been made meanwhile, as zeros."""
    made = {k: torch.zeros_like(v) for k, v in b.items() if k not in a}
    return all(torch.equal({**a, **made}[k].nan_to_num(7.5), b[k].nan_to_num(7.5)) for k in {**a, **made})


def poison(own: Trainer, place: str, step: int, micro: int, module: str, value: float) -> None:
    """Whenever the model sees one micro-batch, also when it is done again, a number in it is `value`."""
    model = own.state.model
    batch = list(own.feed.again(own.config, step))[micro][0]
    seen = [False]
    rows = random.Random(step * 7 + micro)

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.clone().reshape(-1)
        flat[rows.randrange(flat.numel())] = value
        return flat.reshape(tensor.shape)

    def look(_: object, words: Any) -> None:
        seen[0] = words[0].shape == batch.shape and torch.equal(words[0], batch) and model.training

    def on_output(_: object, __: object, out: torch.Tensor) -> torch.Tensor | None:
        if not seen[0]:
            return None
        if place in ("activation", "loss"):
            return spoil(out)
        out.register_hook(spoil)
        return None

    target = model if place == "loss" else dict(model.named_modules())[module]
    model.register_forward_pre_hook(look)
    if place == "weight gradient":
        next(target.parameters()).register_hook(lambda g: spoil(g) if seen[0] else g)
    elif place != "parameter":
        target.register_forward_hook(on_output)


MODULES = (
    "transformer.wte",
    "transformer.h.0.ln_1",
    "transformer.h.0.attn.c_attn",
    "transformer.h.0.mlp.c_proj",
    "transformer.ln_f",
)


def run_poisoned(
    out: str, place_: str, step: int, micro: int, module: str, value: float, **changes: Any
) -> tuple[Any, ...]:
    path = Path("data/toy")
    info = read_info(path if path.exists() else write_dataset(path))
    config = tiny(**{**SMALL, "out_dir": out, **changes})
    directory = folder.create(out)
    own = Trainer(config, info, directory, place(config))
    own.meter.wants = lambda phase: False  # type: ignore[method-assign] - measuring takes longer than training here
    before: dict[str, torch.Tensor] = {}
    original, count = trainer.train_step, iter(range(10**6))

    def watched(state: TrainState, batches: Any, rate: float) -> Any:
        if next(count) != step:
            return original(state, batches, rate)
        if place_ == "parameter":
            with torch.no_grad():
                next(dict(state.model.named_modules())[module].parameters()).view(-1)[3] = value
        before.update(snapshot(state))
        poison(own, place_, step, micro, module, value)
        return original(state, batches, rate)

    error = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", watched)
        try:
            own.run()
        except UserError as caught:
            error = caught
        finally:
            directory.release()
    return error, before, snapshot(own.state), directory


def assert_nothing_bad(directory: RunDirectory) -> None:
    for step in checkpoint.steps_in(directory.checkpoints):
        path = checkpoint.path_of(directory.checkpoints, step)
        assert checkpoint.problem_of(path) is None
        for name in ("model", "optimizer"):
            assert all(bool(torch.isfinite(t.float()).all()) for t in load_file(path / f"{name}.safetensors").values())


def stop_at_random(count: int, seed: int) -> None:
    chance = random.Random(seed)
    for i in range(count):
        where = (chance.choice(PLACES), chance.randrange(8), chance.randrange(2), chance.choice(MODULES))
        value = chance.choice([float("nan"), float("inf"), float("-inf")])
        error, before, after, directory = run_poisoned(f"r{i}", *where, value)
        assert error is not None, where
        assert error.exit_code == ExitCode.DIVERGED
        assert same(before, after), where
        assert_nothing_bad(directory)
        record = directory.read_record()
        assert (record.status, record.steps_done) == ("diverged", where[1]), where
        assert checkpoint.steps_in(directory.checkpoints) == ([4] if where[1] >= 4 else [])
        report = json.loads((directory.path / f"nonfinite-{where[1]}.json").read_text())
        assert report["first"] is not None, where
        if where[0] in ("activation", "gradient", "loss"):
            assert report["first"]["micro"] == where[2]
