"""What a run starts from: weights that init_from names, or its own last checkpoint.

Weights are nanoGPT's, Hugging Face's, or those of another run. A resumed run may change how it is carried out and
watched, never what is learned.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from foretrain.base.errors import UserError
from foretrain.config.init_from import is_path, needs_weights
from foretrain.config.microbatches import cut, sequences_of
from foretrain.config.nanogpt_checkpoint import Refused
from foretrain.config.on_resume import BY_VALUE, EVALUATION, SPLIT, decides, way_of_steps
from foretrain.config.options import OPTIONS, RunConfig
from foretrain.config.presets import GPT2_SHAPES
from foretrain.config.weights_file import WeightsFile, look, read_nanogpt
from foretrain.data.dataset import DatasetInfo
from foretrain.model import foreign
from foretrain.model.shape import ModelShape
from foretrain.model.step import TrainState
from foretrain.training import checkpoint
from foretrain.training.checkpoint import Loaded, Progress
from foretrain.training.device import Placement
from foretrain.training.store import RunDirectory, RunRecord

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
            wants_moments = state.config.init_optimizer
            files, moments = _files(weights, Path(name), wants_moments=wants_moments)
            shape = ModelShape.of(state.config)
            checkpoint.put_weights(
                foreign.read_weights(files, shape, conv1d=weights.kind == "huggingface"), state.trained, weights.path
            )
            if state.masters:
                state.masters.give_weights()
            if wants_moments:
                checkpoint.put_moments(foreign.read_moments(moments, shape), state)
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


def _files(weights: WeightsFile, folder: Path, *, wants_moments: bool) -> tuple[tuple[str, ...], list[Path]]:
    if weights.kind == "nanogpt":
        read_nanogpt(Path(weights.files[0]), folder, moments=wants_moments)
        return (str(folder / "model.safetensors"),), [folder / "optimizer.safetensors"]
    if weights.kind == "checkpoint":
        path = Path(weights.path)
        if problem := checkpoint.problem_of(path):
            raise Refused(problem)
        return weights.files, [path / name for name in checkpoint.files_of(path, "optimizer")]
    return weights.files, []


def _digest(files: tuple[str, ...]) -> str:
    """SHA-256 of the one file, or of the digests of several."""
    digests = []
    for name in files:
        with Path(name).open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def config_digest(config: RunConfig) -> str:
    """A hash of every knob that decides what is learned; how a step is cut into micro-batches does not, and neither do
    options of another recipe, so that a new recipe with options of its own leaves older runs as they were."""
    values = {key: value for key, value in config.model_dump().items() if decides(key) and _of_recipe(key, config)}
    values["sequences"] = sequences_of(config)
    return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:16]


def _of_recipe(key: str, config: RunConfig) -> bool:
    """Whether the config's recipe reads this option."""
    other, wanted = OPTIONS[key].needs or ("", None)
    return other != "recipe" or config.recipe == wanted


def keep_origin(config: RunConfig, record: RunRecord, directory: RunDirectory) -> RunConfig:
    """A run goes on from where it once started, which init_from = resume does not say. Raises UserError."""
    keys, before = ("init_from", "init_optimizer"), record.config
    if config.init_from == "resume":
        return config.model_copy(update={key: getattr(before, key) for key in keys})
    if (config.init_from, before.init_from) != ("scratch", "resume"):  # which are the same
        changed = [f"{key}: {_change(key, before, config)}" for key in keys if _change(key, before, config)]
        if changed:
            raise UserError("usage.resume_changed", path=str(directory.path), changed=changed)
    return config


def _change(key: str, old: RunConfig, new: RunConfig) -> str:
    before, now = getattr(old, key), getattr(new, key)
    return "" if before == now else f"{before} → {now}"


def _changes(keys: Iterable[str], old: RunConfig, new: RunConfig) -> list[str]:
    return [f"{key}: {change}" for key in sorted(keys) if (change := _change(key, old, new))]


def differences(
    loaded: Loaded, previous: RunRecord, config: RunConfig, placement: Placement, threads: int | None, world: int = 1
) -> list[tuple[str, dict[str, Any]]]:
    """What the user should hear of a resume, as (event id, values): what was passed over, and what is not as it was."""
    found: list[tuple[str, dict[str, Any]]] = [
        ("checkpoint_skipped", {"name": name, "problem": problem}) for name, problem in loaded.skipped
    ]
    old = previous.config
    # Another split has an event of its own; what the steps were carried out with counts, not what was asked for.
    rounding = _changes(BY_VALUE, old, config)
    if previous.compiled != placement.compiled:
        rounding.append(f"compile: {previous.compiled} → {placement.compiled}")
    before = way_of_steps(old, previous.gpu, previous.dtype, previous.world)
    if before != (now := way_of_steps(config, placement.gpu, placement.dtype, world)):
        rounding.append(f"cuda_graph: {before} → {now}")
    had = previous.threads or old.cpu_threads
    if had and threads and had != threads:
        rounding.append(f"cpu_threads: {had} → {threads}")
    if loaded.torch_version != torch.__version__:
        rounding.append(f"torch: {loaded.torch_version} → {torch.__version__}")
    if previous.world != world:
        rounding.append(f"ranks: {previous.world} → {world}")
    if previous.gpu.name != placement.gpu.name:
        rounding.append(f"device: {previous.gpu.name} → {placement.gpu.name}")
    if rounding:
        found.append(("resumed_otherwise", {"changed": rounding}))
    if (old.eval_rows, old.eval_block) != (config.eval_rows, config.eval_block):
        found.append(("evaluation_changed", {"changed": _changes(EVALUATION, old, config)}))
    return found


def resumed_split(new: RunConfig, previous: RunRecord) -> tuple[RunConfig, str, dict[str, Any]]:
    """(the config with the micro-batch that memory had forced, unless another one is asked for; event id, values).

    The id is '' where nothing is to be told.
    """
    old = previous.config
    if new.batch_size == old.batch_size and not new.auto_batch_size:
        return new, "", {}
    if new.auto_batch_size or new.batch_size == previous.shrunk_from:
        values = {"batch_size": old.batch_size, "accumulation": old.gradient_accumulation_steps}
        return cut(new, old.batch_size), "split_kept", values
    accumulation, rows = new.gradient_accumulation_steps, old.eval_rows
    if (old.eval_iters, old.eval_sequences) == (new.eval_iters, new.eval_sequences):
        new = new.model_copy(update={"eval_sequences": rows})  # evaluations stay comparable
    values = {"old": old.batch_size, "new": new.batch_size, "accumulation": accumulation, "rows": rows}
    return new, "split_changed_dropout" if new.dropout else "split_changed", values


def check_compatible(progress: Progress, config: RunConfig, info: DatasetInfo, directory: RunDirectory) -> None:
    """Raise UserError where a checkpoint belongs to another model, data order or dataset, or is beyond max_iters."""
    if progress.config_digest != config_digest(config):
        old = directory.read_record().config
        changed = _changes(filter(decides, RunConfig.model_fields), old, config)
        if sequences_of(old) != sequences_of(config):
            changed.append(f"{' x '.join(SPLIT)}: {sequences_of(old)} → {sequences_of(config)}")
        raise UserError("usage.resume_changed", path=str(directory.path), changed=changed)
    if progress.dataset_fingerprint != info.fingerprint:
        raise UserError("data.changed", path=info.path)
    if progress.step > config.max_iters and not config.eval_only:
        raise UserError(
            "usage.resume_beyond", path=str(directory.path), steps=progress.step, max_iters=config.max_iters
        )


def worlds(previous: RunRecord, step: int, world: int) -> tuple[tuple[int, int], ...]:
    """(from which step, ranks) of a run that goes on at `step` with so many; none where it always had as many."""
    before = previous.worlds or ((0, previous.world),)
    kept = tuple(one for one in before if one[0] < step)
    changed = kept if kept and kept[-1][1] == world else (*kept, (step, world))
    return changed if len(changed) > 1 else ()


def with_former(record: RunRecord, former: RunRecord | None) -> RunRecord:
    """`record`, with what the process before it measured wherever this one has made no step: its speed, its memory.

    Only of the same device, dtype, ranks and way to run the step; of another one it would be no measurement. `former`:
    the record as the resume found it. A phase that both measured is this one's.
    """
    same = ("gpu", "dtype", "compiled", "world")
    if former is None or any(getattr(record, name) != getattr(former, name) for name in same):
        return record
    kept: dict[str, Any] = {}
    if record.step_s is None:
        kept = {name: getattr(former, name) for name in ("step_s", "tokens_per_s", "mfu", "data_wait_s")}
    if record.evaluation_s is None:
        kept["evaluation_s"] = former.evaluation_s
    if not record.ranks:
        kept["ranks"] = former.ranks
    now, before = record.memory, former.memory
    if not any(now.phase(name) for name in ("first_step", "steady_step")):
        own = {phase.phase for phase in now.phases}
        phases = (*(phase for phase in before.phases if phase.phase not in own), *now.phases)
        sizes = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "saved_bytes")
        memory: dict[str, Any] = {name: getattr(before, name) or getattr(now, name) for name in sizes}
        peaks = [size for size in (before.process_peak_bytes, now.process_peak_bytes) if size]
        memory |= {"phases": phases, "process_peak_bytes": max(peaks, default=None)}
        kept["memory"] = now.model_copy(update=memory)
    return record.model_copy(update=kept)
