"""The beginning of a rank: its card, and what it says of itself when the ranks meet."""

import os

import torch

from foretrain.base.errors import UserError
from foretrain.base.installation import installed
from foretrain.config.options import RunConfig
from foretrain.training.device import Placement, identity_of, place
from foretrain.training.ranks.group import Group, greet
from foretrain.training.ranks.place import Place, host_name


def placed(config: RunConfig, ranks: Group) -> Placement:
    """Where this rank runs. All ranks know then that they fit together, and their group is made. Raises UserError."""
    placement = place(_on_own_card(config, ranks.place))
    if placement.device.type == "cuda":
        torch.cuda.set_device(placement.device)
    same = {"torch": torch.__version__, "foretrain": installed("foretrain"), "device": placement.device.type}
    same |= {key: str(value) for key, value in config.model_dump().items()}
    uuid = identity_of(placement.device).get("uuid", "")
    greet(ranks, {"host": host_name(), "card": placement.gpu.name, "uuid": uuid, "same": same})
    ranks.start(placement.device)
    return placement


def _on_own_card(config: RunConfig, place: Place) -> RunConfig:
    """The config for the card of this rank: the one with its number on this machine.

    Slurm may let each task see its own card only, which has the number 0 then.
    """
    if config.device not in ("auto", "cuda"):
        if config.device != "cpu":
            raise UserError("usage.ranks_one_device", device=config.device, world=place.world)
        return config
    if not torch.cuda.is_available():
        return config.model_copy(update={"device": "cpu"})
    cards, index = torch.cuda.device_count(), place.local_rank
    if index >= cards:
        if cards > 1 or not os.environ.get("CUDA_VISIBLE_DEVICES"):
            raise UserError("environment.more_ranks_than_cards", ranks=place.local_world, cards=cards, host=host_name())
        index = 0
    return config.model_copy(update={"device": f"cuda:{index}"})
