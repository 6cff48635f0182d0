"""What the first rank tells of a run that it made ready, and the run as another rank then has it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from foretrain.app.training.data import prepare_data
from foretrain.app.training.request import Ready, Request
from foretrain.base.errors import UserError
from foretrain.config.options import RunConfig
from foretrain.training.device import Placement
from foretrain.training.host_memory import keep_memory
from foretrain.training.ranks.follower import FollowerDirectory
from foretrain.training.store import RunRecord


def told_of(found: Ready | RunRecord) -> dict[str, Any]:
    """What the other ranks have to know."""
    if isinstance(found, RunRecord):
        return {"finished": found.model_dump_json()}
    return {
        "config": found.resolved.config.model_dump_json(), "dtype": found.placement.dtype,
        "compiled": found.placement.compiled, "path": str(found.directory.path.resolve()),
        "resuming": found.resuming, "fingerprint": found.info.fingerprint,
    }  # fmt: skip


def follow(asked: Request, placement: Placement, told: dict[str, Any], rank: int) -> Ready:
    """The run as the first rank has it. Raises UserError where this machine has not the same data or folder."""
    config = RunConfig.from_json(told["config"])
    if placement.device.type == "cpu":
        keep_memory()
        if config.cpu_threads:
            torch.set_num_threads(config.cpu_threads)
    resolved, info = prepare_data(replace(asked.resolved, config=config), asked.bar)
    if info.fingerprint != told["fingerprint"]:
        raise UserError("data.other_on_rank", path=info.path)
    directory = FollowerDirectory(Path(told["path"]), rank)
    own = replace(placement, dtype=told["dtype"], compiled=told["compiled"] and placement.compiled)
    return Ready(replace(resolved, config=config), own, info, directory, told["resuming"])
