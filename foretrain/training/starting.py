"""What a run starts from: weights that init_from names, or its own last checkpoint, by how it was recorded."""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from foretrain.base.cache import Cache
from foretrain.base.errors import UserError
from foretrain.base.installation import installed_torch
from foretrain.base.records import Record
from foretrain.base.units import MIB
from foretrain.config.checks import BY_VALUE, EVALUATION, SPLIT, check, decides, resolved_cuda_graph
from foretrain.config.microbatches import sequences_of, with_micro_batch
from foretrain.config.nanogpt_checkpoint import Refused
from foretrain.config.options import OPTIONS, RunConfig, named, step_options
from foretrain.config.presets import GPT2_SHAPES
from foretrain.config.shape import ModelShape
from foretrain.config.weights_file import WeightsFile, inspect_weights, is_path, needs_weights, read_nanogpt
from foretrain.data.dataset import DatasetInfo
from foretrain.hardware.catalogue import Dtype
from foretrain.hardware.cpu import physical_cores, usable_cores
from foretrain.model import foreign
from foretrain.model.step import TrainState, build, train_step
from foretrain.runs.folder import RunDirectory
from foretrain.runs.record import TrainedRun
from foretrain.training import checkpoint
from foretrain.training.checkpoint import Loaded, Progress
from foretrain.training.device import TORCH_DTYPES, Placement

SHORT_S = 4.0  # no measurement for a run of fewer seconds at the CPU's nominal peak
# A run of fewer seconds at that peak is not compiled: compiling takes 5 to 40 s, or 3 s from a warm cache, and 100 MB
# more; a compiled step is 7% faster (docs/speed.md).
SHORT_TO_COMPILE_S = 150.0
BUDGET_S = 2.0
LEAST_GAIN = 0.05  # a smaller gain is not worth other kernels
LEAST_ROUNDS = 8  # of near candidates, however long a step takes: the best of three can be an accident
LAGS, NEAR = 1.5, 1.15  # a candidate that is slower by this factor is dropped; after half of the rounds
KEPT = Cache("choices")
CHOSEN = named(lambda option: option.chosen_on_cpu is not None)
# Logits of a micro-batch beyond this are made in chunks. On two CPUs that took as long (0.94 to 1.0 of a step of two
# blocks of GPT-2 124M at 8 x 512, float32 and bfloat16), and a third of the memory.
LARGE_LOGITS_BYTES, CHUNK = 256 * MIB, 1024
SMALL_STEP_S = 0.005  # of a step that one thread may do as fast as several
_SLICE_FLOPS = 8e9  # of one step: 25 to 100 ms on two cores


class StepVariant(Record):
    dtype: Dtype
    attention: str
    master_weights: bool
    threads: int
    step_s: float = 0.0


class Choice(Record):
    """The fastest variant first, then the others, each with its best time; and the slice that was timed."""

    ways: tuple[StepVariant, ...]
    layers: int
    rows: int
    took_s: float
    torch_version: str


@dataclass(frozen=True)
class Chosen:
    config: RunConfig
    placement: Placement


def recall(config: RunConfig, placement: Placement, record: TrainedRun, given: set[str]) -> Chosen:
    """Resume as recorded, bit for bit, except for the user's new choices."""
    old = record.config
    is_open = {key for key in CHOSEN if key not in given or getattr(config, key) == OPTIONS[key].chosen_on_cpu}
    update = {key: getattr(old, key) for key in is_open}
    if "cpu_threads" in update:  # the machine may be another one
        update["cpu_threads"] = min(update["cpu_threads"], usable_cores())
    if "dtype" in update:  # auto's choice on the recorded card
        placement = replace(placement, dtype=record.dtype)
    notes: tuple[tuple[str, dict[str, Any]], ...] = ()
    if "compile" not in given and not old.compile:
        update["compile"], placement = False, replace(placement, compiled=False)
    if "cuda_graph" not in given:  # also off where the step could not be recorded
        update["cuda_graph"] = old.cuda_graph
    if placement.compiled and old.compile and not record.compiled:  # compiling failed then
        placement, notes = replace(placement, compiled=False), (("still_eager", {}),)
    return _apply(config.model_copy(update=update), placement, notes)


def decide(config: RunConfig, placement: Placement, given: set[str]) -> Chosen:
    if placement.device.type != "cpu":
        return Chosen(config, placement)
    config, placement = _in_chunks(config, placement, given)
    ways = candidates(config, given)
    if len(ways) == 1 or _is_short(config, placement):
        return _apply(_plain(config, placement), placement, ())
    # A step of the slice is measured, so its options name the measurement.
    slice_options = step_options(slice_of(config))
    path = KEPT.path(repr([placement.gpu.name, installed_torch(), usable_cores(), slice_options, ways]))
    choice = KEPT.record(path, Choice)
    known = choice is not None and bool(choice.ways)
    if choice is None or not known:
        choice = measure(config, ways)
        KEPT.keep(path, choice.model_dump_json(indent=1))
    best, first = choice.ways[0], next(w for w in choice.ways if w.model_copy(update={"step_s": 0.0}) == ways[0])
    update: dict[str, Any] = {"dtype": best.dtype, "attention": best.attention, "cpu_threads": best.threads}
    update["master_weights"] = best.master_weights
    note = {
        "dtype": best.dtype, "attention": best.attention, "masters": ", master weights" * best.master_weights,
        "threads": best.threads, "step": best.step_s, "plain_step": first.step_s, "plain_dtype": first.dtype,
        "plain_attention": first.attention, "layers": choice.layers, "rows": choice.rows,
    }  # fmt: skip
    id = "chosen_plain" if best == first else "chosen_known" if known else "chosen"
    return _apply(config.model_copy(update=update), placement, ((id, note),))


def _in_chunks(config: RunConfig, placement: Placement, given: set[str]) -> tuple[RunConfig, Placement]:
    logits_bytes = 4 * config.vocab_size * config.batch_size * config.block_size
    decided = "loss_chunk_size" in given or config.loss_chunk_size or config.auto_chunker
    if decided or logits_bytes < LARGE_LOGITS_BYTES:
        return config, placement
    chunked = config.model_copy(update={"loss_chunk_size": CHUNK})
    if check(chunked.model_dump(), {})[0] is None:  # some recipes cap their logits
        return config, placement
    note = ("loss_in_chunks", {"chunk": CHUNK, "size": logits_bytes})
    return chunked, replace(placement, notes=(*placement.notes, note))


def spared_compiling(chosen: Chosen, given: set[str]) -> Chosen:
    """Run uncompiled, where a run on a CPU ends before compiling pays, unless asked for."""
    config, placement = chosen.config, chosen.placement
    nominal_s = _nominal_s(config, placement)
    is_open = placement.device.type == "cpu" and placement.compiled and "compile" not in given
    if not is_open or nominal_s is None or nominal_s >= SHORT_TO_COMPILE_S:
        return chosen
    notes = (*placement.notes, ("too_short_to_compile", {}))
    return Chosen(config.model_copy(update={"compile": False}), replace(placement, compiled=False, notes=notes))


def _plain(config: RunConfig, placement: Placement) -> RunConfig:
    update: dict[str, Any] = {"dtype": placement.dtype} if config.dtype == "auto" else {}
    if config.attention == "auto":
        update["attention"] = "sdpa"
    return config.model_copy(update=update)


def _apply(config: RunConfig, placement: Placement, notes: tuple[tuple[str, dict[str, Any]], ...]) -> Chosen:
    dtype: Dtype = placement.dtype if config.dtype == "auto" else config.dtype
    if placement.device.type == "cpu" and config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)
    return Chosen(config, replace(placement, dtype=dtype, notes=placement.notes + notes))


def candidates(config: RunConfig, given: set[str]) -> list[StepVariant]:
    if config.matmul != "dtype":  # other arithmetic was asked for, and stays
        given = {*given, "master_weights"}
    dtypes: list[Dtype] = ["float32", "bfloat16"] if config.dtype == "auto" else [config.dtype]
    dtypes = dtypes[:1] if config.matmul != "dtype" else dtypes
    kinds = ["sdpa", "bmm"] if config.attention == "auto" and not config.obstacle_to_bmm else [config.attention]
    kinds = ["sdpa" if kind == "auto" else kind for kind in kinds]
    masters = [config.master_weights] if "master_weights" in given or config.master_weights else [False, True]
    ways = []
    for dtype in dtypes:
        for attention in kinds:
            for master in masters if dtype == "bfloat16" else masters[:1]:
                threads = config.cpu_threads or torch.get_num_threads()
                ways.append(StepVariant(dtype=dtype, attention=attention, master_weights=master, threads=threads))
    return ways


def _is_short(config: RunConfig, placement: Placement) -> bool:
    nominal_s = _nominal_s(config, placement)
    return config.eval_only or nominal_s is None or nominal_s < SHORT_S


def _nominal_s(config: RunConfig, placement: Placement) -> float | None:
    peak = placement.gpu.peak_flop_per_s("float32")
    return ModelShape.of(config).flops_per_token * config.tokens_per_step * config.max_iters / peak if peak else None


def slice_of(config: RunConfig) -> RunConfig:
    c = config
    step = ModelShape.of(c).flops_per_token * c.batch_size * c.block_size
    layers = max(1, min(c.n_layer, int(c.n_layer * _SLICE_FLOPS / step * 2)))  # two layers before more rows
    share = layers / c.n_layer
    rows = max(1, min(c.batch_size, int(c.batch_size * _SLICE_FLOPS / (step * share))))
    vocabulary = max(min(c.vocab_size, 64), int(c.vocab_size * share))
    update = {"n_layer": layers, "vocab_size": vocabulary, "batch_size": rows, "gradient_accumulation_steps": 1}
    return c.model_copy(update=update)


class Candidate:
    def __init__(self, config: RunConfig, way: StepVariant) -> None:
        update = {"attention": way.attention, "master_weights": way.master_weights}
        own = config.model_copy(update=update)
        self.way, self.best_s, self.clock = way, float("inf"), time.thread_time
        self.state: TrainState = build(own, torch.device("cpu"), TORCH_DTYPES[way.dtype], compile=False)
        tokens = torch.randint(0, own.vocab_size, (own.batch_size, own.block_size + 1))
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.step()  # allocates the moments, and oneDNN its kernels

    def step(self) -> float:
        started = self.clock()
        train_step(self.state, [self.batch], 1e-4)
        return self.clock() - started

    def time(self) -> None:
        self.best_s = min(self.best_s, self.step())


def measure(config: RunConfig, ways: list[StepVariant]) -> Choice:
    """Time the variants in turn for about BUDGET_S, and drop slow ones; torch's generator and threads are restored."""
    sliced, started, threads = slice_of(config), time.perf_counter(), torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.set_num_threads(1)
        running = [Candidate(sliced, way) for way in ways]
        done: list[Candidate] = list(running)
        rounds = 0
        while rounds < LEAST_ROUNDS or time.perf_counter() - started < BUDGET_S:
            for candidate in running:
                candidate.time()
            rounds += 1
            best = min(c.best_s for c in running)
            behind = LAGS if rounds < LEAST_ROUNDS // 2 else NEAR
            running = [c for c in running if c.best_s < behind * best]
            if len(running) == 1:
                break
        best_way = _best(done)
        found = [
            c.way.model_copy(update={"step_s": c.best_s}) for c in (best_way, *(c for c in done if c is not best_way))
        ]
        fewer = _fewer_threads(best_way, config)
        if fewer is not None:
            found.insert(0, fewer)
        torch.set_num_threads(threads)
    return Choice(
        ways=tuple(found), layers=sliced.n_layer, rows=sliced.batch_size, took_s=time.perf_counter() - started,
        torch_version=installed_torch(),
    )  # fmt: skip


def _best(timed: list[Candidate]) -> Candidate:
    best = timed[0]
    for candidate in timed[1:]:
        if candidate.best_s < (1 - LEAST_GAIN) * best.best_s:
            best = candidate
    return best


def _fewer_threads(best: Candidate, config: RunConfig) -> StepVariant | None:
    """Return the best variant on fewer threads where that is faster: on real cores, or on one for a small model."""
    now, best.clock = best.way.threads, time.perf_counter
    if config.cpu_threads or "OMP_NUM_THREADS" in os.environ:  # somebody decided
        return None
    wanted = {min(now, physical_cores()), 1 if best.best_s < SMALL_STEP_S else now} - {now}
    found = best.way
    for threads in (now, *sorted(wanted, reverse=True)) if wanted else ():
        torch.set_num_threads(threads)
        step_s = min(best.step() for _ in range(20))
        if threads == now or step_s < (1 - LEAST_GAIN) * found.step_s:
            found = best.way.model_copy(update={"threads": threads, "step_s": step_s})
    return found.model_copy(update={"step_s": best.best_s}) if found.threads != now else None


STAGING = ".import-"


@dataclass(frozen=True)
class Start:
    """Where a run starts: its step, and the path and SHA-256 of its weights."""

    step: int
    path: str
    sha256: str


def find(init_from: str) -> WeightsFile | None:
    """Return the weights that init_from names, from Hugging Face's cache or hub for GPT-2; None. Raises UserError."""
    if not needs_weights(init_from):
        return None
    if is_path(init_from):
        return inspect_weights(init_from)
    return inspect_weights(str(_published(init_from).parent))


def _published(name: str) -> Path:
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
    """Start `state` from these weights; with init_optimizer from AdamW's moments and the step count too. `scratch`: a
    folder with room for a copy of a ckpt.pt. Raises UserError."""
    for left in scratch.glob(f"{STAGING}*"):  # a killed process's
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
    """Return the SHA-256 of the run's first weights by its events; None where they have none."""
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
    digests = []
    for name in files:
        with Path(name).open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def config_digest(config: RunConfig) -> str:
    """Hash every option that decides what is learned, and none of other recipes, so that new ones leave runs alone."""
    needs = {key: option.needs for key, option in OPTIONS.items() if option.needs and option.needs[0] == "recipe"}
    idle = {key for key, (_, recipe) in needs.items() if recipe != config.recipe}
    values = {key: value for key, value in config.model_dump().items() if decides(key) and key not in idle}
    values["sequences"] = sequences_of(config)
    return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:16]


def keep_origin(config: RunConfig, record: TrainedRun, directory: RunDirectory) -> RunConfig:
    """Keep where a run once started, which init_from = resume does not tell. Raises UserError."""
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
    loaded: Loaded, previous: TrainedRun, config: RunConfig, placement: Placement, threads: int | None, world: int = 1
) -> list[tuple[str, dict[str, Any]]]:
    """Return what the user should hear of a resume, as (event id, values): skipped checkpoints and changes."""
    found: list[tuple[str, dict[str, Any]]] = [
        ("checkpoint_skipped", {"name": name, "problem": problem}) for name, problem in loaded.skipped
    ]
    old = previous.config
    # Another split has an event of its own; what the steps used counts, not what was asked for.
    rounding = _changes(BY_VALUE, old, config)
    if previous.compiled != placement.compiled:
        rounding.append(f"compile: {previous.compiled} → {placement.compiled}")
    before = resolved_cuda_graph(old, previous.gpu, previous.dtype, previous.world)
    if before != (now := resolved_cuda_graph(config, placement.gpu, placement.dtype, world)):
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


def resumed_split(new: RunConfig, previous: TrainedRun) -> tuple[RunConfig, str, dict[str, Any]]:
    """Return (the config with the micro-batch that memory had forced, unless another is asked for; event; values)."""
    old = previous.config
    if new.batch_size == old.batch_size and not new.auto_batch_size:
        return new, "", {}
    if new.auto_batch_size or new.batch_size == previous.shrunk_from:
        values = {"batch_size": old.batch_size, "accumulation": old.gradient_accumulation_steps}
        return with_micro_batch(new, old.batch_size), "split_kept", values
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


def worlds(previous: TrainedRun, step: int, world: int) -> tuple[tuple[int, int], ...]:
    """Return (from which step, ranks) of a run that resumes at `step`; none where the number never changed."""
    before = previous.worlds or ((0, previous.world),)
    kept = tuple(one for one in before if one[0] < step)
    changed = kept if kept and kept[-1][1] == world else (*kept, (step, world))
    return changed if len(changed) > 1 else ()


def with_former(record: TrainedRun, former: TrainedRun | None) -> TrainedRun:
    """Fill in the speed and memory of `former`, the record before the resume, where this process has made no step, only
    of the same device, dtype, ranks and kind of step."""
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
