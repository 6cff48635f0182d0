"""What a run begins with: what its config leaves open, chosen, and config, environment and forecast on the disk."""

import json
from dataclasses import replace

from foretrain.app import auto_batch
from foretrain.app.plan import make_plan
from foretrain.app.training.request import Request
from foretrain.config.ranks import as_one_rank_of, of_all, of_rank
from foretrain.config.resolve import ResolvedConfig, to_toml
from foretrain.hardware.devices import Target
from foretrain.predict.plan import SCHEMA
from foretrain.predict.ranks.plan import of_run
from foretrain.training import choices
from foretrain.training.device import Placement, environment
from foretrain.training.notes import Note
from foretrain.training.store import RunDirectory


def choose(
    resolved: ResolvedConfig, placement: Placement, directory: RunDirectory, resuming: bool, world: int = 1
) -> tuple[ResolvedConfig, Placement]:
    """What the config leaves open: as the run has it already, else measured."""
    given = set(resolved.sources)
    if world > 1:  # their gradients would be sent in half precision (model/ranks/sharing.py)
        given.add("master_weights")
    if resuming:
        chosen = choices.recall(resolved.config, placement, directory.read_record(), given)
    else:
        chosen = choices.spared_compiling(choices.decide(resolved.config, placement, given), given)
    return replace(resolved, config=chosen.config), chosen.placement


def pick_batch(resolved: ResolvedConfig, placement: Placement, asked: Request, world: int) -> ResolvedConfig:
    """The micro-batch for this device, picked for the part of a step that one rank carries out."""
    whole = resolved.config
    own = replace(resolved, config=of_rank(as_one_rank_of(whole, world), world))
    chosen = auto_batch.chosen(own, placement, trial=asked.trial, listen=asked.listen)
    return replace(chosen, config=of_all(chosen.config, world))


def write_inputs(directory: RunDirectory, resolved: ResolvedConfig, placement: Placement, asked: Request) -> None:
    """Config, environment and the forecast, on disk before the first step."""
    known = environment(placement)
    config = resolved.config.model_copy(update={"compile": placement.compiled, "dtype": placement.dtype})
    planned = ResolvedConfig(config, {**resolved.sources, "vocab_size": "run"}, (), resolved.name)
    forecast = make_plan(planned, Target(placement.gpu, 0))
    if asked.place.world > 1:
        forecast = of_run(forecast, asked.place.world, asked.place.local_world)
    if resolved.config.memory_limit and forecast.verdict_of("foretrain") == "does_not_fit":
        # It starts all the same: it may shrink its micro-batch, and a CPU's limit is only watched.
        needs = max(phase.needed_low_bytes for phase in forecast.memory_of("foretrain").phases)
        if needs > (limit := resolved.config.memory_limit_bytes or 0):  # else it is the card that is too small
            asked.listen(Note("train.beyond_limit", needs=needs, limit=limit))
    directory.write("config.toml", to_toml(resolved.config))
    directory.write("environment.json", json.dumps(known, indent=1) + "\n")
    directory.write("plan.json", json.dumps(forecast.to_json(schema=SCHEMA)) + "\n")
