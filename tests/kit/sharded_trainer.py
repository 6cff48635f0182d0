"""transformers' own Trainer with FSDP2, traced as one rank of several that talk to nobody.

Fake tensors have no address and no time: accelerate, which finds an optimizer's weights again by their addresses, finds
them by their names here, and nothing waits for an event.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import accelerate.accelerator
import accelerate.state
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.utils._python_dispatch import _disable_current_modes
from transformers import Trainer
from transformers.trainer_callback import PrinterCallback

from foretrain.config.finetune.options import FineTune
from foretrain.config.sharing import Sharing
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.trace import ranks
from foretrain.predict.trace.finetune import drive
from foretrain.predict.trace.record import Trace


class ShardedRun(drive.Run):
    """The run of one rank: its model is on the host until the Trainer shards it, and nothing is merged."""

    def go(self) -> None:
        with tempfile.TemporaryDirectory(prefix="foretrain-") as folder, drive.standins.written_to_host():
            self.trainer(folder).train()

    def trainer(self, folder: str) -> Trainer:
        self.tracer.enter("load")
        model: Any = drive.loaded(self.written, self.tune, torch.device("cpu"))
        self.names.learn(model)
        made = drive.loop_of(self.tune).trainer(self, model, folder)
        made.remove_callback(PrinterCallback)
        self.names.before_a_root()
        return made

    @property
    def samples(self) -> tuple[int, int]:
        train, evaluate = super().samples
        return self.tune.world * train, self.tune.world * evaluate


def traced(config: dict[str, Any], tune: FineTune, gpu: Gpu) -> Trace:
    world, made = str(tune.world), drive.arguments
    ranked = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}

    def arguments(tune: FineTune, *args: Any, **more: Any) -> Any:
        return made(tune, *args, fsdp=True, fsdp_config={"reshard_after_forward": tune.strategy == "fsdp"}, **more)

    with (
        mock.patch.dict(os.environ, {**ranked, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}),
        mock.patch.object(drive, "arguments", arguments), mock.patch.object(drive, "Run", ShardedRun),
        mock.patch.object(_fully_shard, "_init_default_mesh", _mesh),
        mock.patch.object(torch.accelerator, "current_stream"),
        ranks.group(Sharing("fsdp", tune.world, tune.world)), _names_of_weights(),
    ):  # fmt: skip
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        try:
            return drive.trace({"config": config, "tune": tune.model_dump(), "gpu": gpu.model_dump()})
        finally:
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def _mesh(*args: Any) -> Any:
    with _disable_current_modes():  # a mesh reads its ranks out of a tensor
        return init_device_mesh("cuda", (dist.get_world_size(),))


@contextlib.contextmanager
def _names_of_weights() -> Iterator[None]:
    create = Trainer.create_optimizer
    known: list[tuple[Any, list[list[str]]]] = []

    def created(self: Any, *args: Any, **more: Any) -> Any:
        optimizer = create(self, *args, **more)
        names = {id(p): name for name, p in self.model.named_parameters()}
        known.append((self.model, [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]))
        return optimizer

    def switch(optimizer: torch.optim.Optimizer, mapping: object) -> None:
        model, names = known[-1]
        weights = dict(model.named_parameters())
        for group, own in zip(optimizer.param_groups, names, strict=True):
            group["params"] = [weights[name] for name in own]

    with (
        mock.patch.object(Trainer, "create_optimizer", created),
        mock.patch.object(accelerate.accelerator, "fsdp2_switch_optimizer_parameters", switch),
    ):
        yield
