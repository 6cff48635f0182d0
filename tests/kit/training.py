"""Runs of the trainer and what they leave, to compare to the bit."""

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.config.options import RunConfig
from foretrain.data.dataset import read_info
from foretrain.model.graphed import GraphedStep
from foretrain.model.step import StepResult, TrainState, build, evaluation_loss, train_step
from foretrain.runs import folder
from foretrain.runs.record import TrainedRun
from foretrain.training import checkpoint, trainer
from foretrain.training.device import place
from foretrain.training.trainer import Trainer
from tests.kit.tiny import tiny, write_dataset


def train(config: RunConfig, *, resume: bool = False, listen: Any = lambda event: None, **more: Any) -> TrainedRun:
    info = read_info(write_dataset(Path("data/toy")) if not Path("data/toy").exists() else Path("data/toy"))
    directory = folder.newest_unfinished(config.out_dir, config.max_iters) if resume else folder.create(config.out_dir)
    assert directory
    if resume:
        directory.acquire()
    try:
        return Trainer(config, info, directory, place(config), listen, **more).run(resume=resume)
    finally:
        directory.release()


def final_tensors(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    path, _ = checkpoint.newest_valid(run / "checkpoints")
    assert path
    names = ("model", "optimizer", "rng")
    return {f"{n}/{k}": v for n in names for k, v in load_file(path / f"{n}.safetensors").items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert torch.equal(value, b[key]), key


def stop_at_6(event: Any) -> None:
    if getattr(event, "kind", "") == "step" and event.step == 6:
        os.kill(os.getpid(), signal.SIGTERM)


FOLDER = Path("checkpoints")


def trained(dtype: torch.dtype = torch.float32, steps: int = 2) -> TrainState:
    state = build(tiny(dropout=0.1), torch.device("cpu"), dtype, compile=False)
    idx = torch.arange(16).repeat(4, 1)
    for _ in range(steps):
        train_step(state, [(idx, idx), (idx, idx)], 1e-2)
    return state


def tensors_of(state: TrainState) -> dict[str, torch.Tensor]:
    found = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    for name, parameter in state.model.named_parameters():
        for key, value in state.optimizer.state[parameter].items():
            found[f"{key}/{name}"] = value.clone()
    return {**found, "rng": torch.get_rng_state()}


def same_state(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def rewrite(path: Path, name: str, data: bytes) -> None:
    (path / name).write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1))


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.54 GiB.")


class FailsOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise NO_MEMORY


def fail_in_step(monkeypatch: pytest.MonkeyPatch, step: int, micro: int, where: str) -> None:
    """Let the first try of an optimizer step run out of memory in one of its micro-steps, or in the optimizer."""
    original, tries = trainer.train_step, iter(range(10**6))

    def failing(state: Any, batches: Any, rate: float) -> Any:
        if next(tries) != step:
            return original(state, batches, rate)
        call, count = state.call, iter(range(10**6))

        def model(idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            at = next(count)
            if where == "forward" and at == micro:
                call(idx[:1], targets[:1])  # draws from dropout's generator before it fails
                raise NO_MEMORY
            loss = call(idx, targets)
            return FailsOnce.apply(loss) if where == "backward" and at == micro else loss

        def no_memory(*_: object) -> None:
            raise NO_MEMORY

        state.call = model
        hook = state.optimizer.register_step_pre_hook(no_memory) if where == "optimizer" else None
        try:
            return original(state, batches, rate)
        finally:
            state.call = call
            if hook:
                hook.remove()

    monkeypatch.setattr(trainer, "train_step", failing)


class AsAlways(GraphedStep):
    """Stands for a step that is recorded, where there is no card."""

    def __init__(self, state: TrainState, *_: Any) -> None:
        self.state, self.done = state, 0

    def __call__(self, batches: Any, learning_rate: float) -> StepResult:
        self.done += 1
        return trainer.train_step(self.state, batches, learning_rate)

    def evaluate(self, batch: Any) -> torch.Tensor:
        return evaluation_loss(self.state, batch)
