"""The weights that a run starts from: nanoGPT's, Hugging Face's, or those of another run, put into its model."""

import hashlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from foretrain.base.errors import UserError
from foretrain.config.init_from import is_path, needs_weights
from foretrain.config.nanogpt_checkpoint import Refused
from foretrain.config.presets import GPT2_SHAPES
from foretrain.config.weights_file import WeightsFile, look, read_nanogpt
from foretrain.model import foreign
from foretrain.model.shape import ModelShape
from foretrain.model.step import TrainState
from foretrain.training import checkpoint

STAGING = ".import-"


@dataclass(frozen=True)
class Start:
    """Where a run starts: steps done already, and what the weights were: their path and their SHA-256."""

    step: int
    path: str
    sha256: str


def find(init_from: str) -> WeightsFile | None:
    """The weights that init_from names, or None where a run starts from none. Raises UserError.

    GPT-2's published weights come from Hugging Face's cache, else from its hub.
    """
    if not needs_weights(init_from):
        return None
    if is_path(init_from):
        return look(init_from)
    return look(str(_published(init_from).parent))


def _published(name: str) -> Path:
    """model.safetensors of a published GPT-2, with its config.json beside it."""
    assert name in GPT2_SHAPES
    try:
        import huggingface_hub as hub
    except ImportError:
        raise UserError("environment.no_weights", model=name, reason="huggingface_hub is not installed") from None
    repository = f"openai-community/{name}"
    for known in (repository, name):  # the hub's older name of the same
        found = hub.try_to_load_from_cache(known, "model.safetensors")
        if isinstance(found, str) and hub.try_to_load_from_cache(known, "config.json"):
            return Path(found)
    try:
        hub.hf_hub_download(repository, "config.json")
        return Path(hub.hf_hub_download(repository, "model.safetensors"))
    except Exception as error:  # network, TLS, proxies, disk: of many classes
        raise UserError("environment.no_weights", model=name, reason=type(error).__name__) from None


def put(weights: WeightsFile, state: TrainState, scratch: Path) -> Start:
    """Start `state` from these weights; with init_optimizer from AdamW's moments and the step count too.

    `scratch` is a folder on a disk with room for a copy of a ckpt.pt. Raises UserError.
    """
    for left in scratch.glob(f"{STAGING}*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=STAGING, dir=scratch) as name:
        try:
            files, moments = _files(weights, Path(name), wants_moments=state.config.init_optimizer)
            shape = ModelShape.of(state.config)
            checkpoint.put_weights(
                foreign.read_weights(files, shape, conv1d=weights.kind == "huggingface"), state.trained, weights.path
            )
            if state.masters:
                state.masters.give_weights()
            if moments is not None:
                _put_moments(moments, state)
        except (Refused, SafetensorError, KeyError, ValueError) as error:
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise UserError("checkpoint.cannot_start", path=weights.path, reason=reason) from None
    step = weights.step if state.config.init_optimizer else 0
    return Start(step or 0, weights.path, _digest(weights.files))


def known_digest(events: list[dict[str, Any]]) -> str | None:
    """The SHA-256 that a run's events say its weights had when it began; None where they say none."""
    for event in reversed(events):
        values = event.get("values")
        if event.get("id") == "started_from" and isinstance(values, dict) and isinstance(values.get("sha256"), str):
            return values["sha256"]
    return None


def _files(weights: WeightsFile, folder: Path, *, wants_moments: bool) -> tuple[tuple[str, ...], Path | None]:
    """(safetensors files of the weights, that of the moments where they are wanted)."""
    if weights.kind == "nanogpt":
        read_nanogpt(Path(weights.files[0]), folder, moments=wants_moments)
        return (str(folder / "model.safetensors"),), folder / "optimizer.safetensors" if wants_moments else None
    if weights.kind == "checkpoint":
        if problem := checkpoint.problem_of(Path(weights.path)):
            raise Refused(problem)
        return weights.files, Path(weights.path) / "optimizer.safetensors" if wants_moments else None
    return weights.files, None


def _put_moments(path: Path, state: TrainState) -> None:
    if type(state.optimizer) is not torch.optim.AdamW:
        raise Refused("its moments are plain AdamW's, which the optimizer of this config has not")
    with safe_open(path, "pt") as held:
        shape = ModelShape.of(state.config)
        known = {parameter.name: parameter for parameter in shape.parameters()}
        for name, parameter in state.trained.named_parameters():
            own = state.optimizer.state[parameter]
            own["step"] = held.get_tensor(f"step/{name}").float().to(state.device)
            for kind in ("exp_avg", "exp_avg_sq"):
                moment = foreign.fit_moment(known[name], held.get_tensor(f"{kind}/{name}"), shape)
                own[kind] = moment.to(state.device, torch.float32).contiguous()


def _digest(files: tuple[str, ...]) -> str:
    """SHA-256 of the one file, or of the digests of several."""
    digests = []
    for name in files:
        with Path(name).open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
