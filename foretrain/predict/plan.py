"""`plan()`: what a run will take on a device, as one record. Instant: arithmetic on the config, no torch."""

import json
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

from pydantic import NonNegativeInt, computed_field, model_validator

from foretrain.base.errors import UserError
from foretrain.base.records import Note, Record
from foretrain.base.units import format_bytes, format_duration
from foretrain.config.checks import EIGHT_BITS, idle
from foretrain.config.families import family_of
from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import NANOGPT_PEAK_FLOP_PER_S, Dtype, Gpu
from foretrain.model.techniques import TECHNIQUES, optimizer_of
from foretrain.predict import software
from foretrain.predict.memory import RunMemory, Verdict, predict
from foretrain.predict.spec import STEP_NAMES, StepName, StepSpec, choose_dtype, compiles
from foretrain.predict.speed.time import Range, compile_time, evaluation_time, is_calibrated, step_time
from foretrain.predict.timing import NO_TIME, READINGS, Prices, Reading, Timing, TimingSource, spending
from foretrain.predict.trace.memory import Exact

SCHEMA = "foretrain.plan/1"
# Bytes a second at which a checkpoint is hashed and written: SHA-256 does about 1.2 GB/s on one EPYC core, a cloud
# disk took 0.2, a home NVMe waits for the hash.
SAVE_BYTES_PER_S_LOW, SAVE_BYTES_PER_S, SAVE_BYTES_PER_S_HIGH = 0.1e9, 0.4e9, 1.0e9


START_HIGH = 4.0  # times a small model's start, as a larger one, and the meters of the first steps, take longer


class ModelCounts(Record):
    """Parameters and optimizer groups, as nanoGPT prints them."""

    n_params: int
    n_params_nanogpt: int
    n_matmul_params: int
    decayed_tensors: int
    decayed_params: int
    undecayed_tensors: int
    undecayed_params: int


class Work(Record):
    """What is to be done, whatever the device: tokens and FLOPs. `epochs` is None without a dataset size."""

    tokens_per_step: int
    steps: int
    tokens: int
    dataset_tokens: int | None
    dataset_source: str
    epochs: float | None
    flops_6n: int
    flops: int
    flops_per_token: int


class PlanRecord(Record):
    """What a plan of any kind of run has. All are one schema, foretrain.plan/1: `kind` says what runs."""

    @property
    def needs(self) -> RunMemory:
        raise NotImplementedError

    @computed_field
    @property
    def needed_bytes(self) -> int:
        return self.needs.needed_bytes

    @computed_field
    @property
    def verdict(self) -> Verdict | None:
        return self.needs.verdict

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the plan of a JSON text, also of what `foretrain plan --json` prints, which has advice beside it."""
        data = json.loads(text)
        if isinstance(data, dict):
            data = {key: value for key, value in data.items() if key not in ("schema", "advice")}
        return cls.model_validate(data)

    @model_validator(mode="before")
    @classmethod
    def _without_computed(cls, data: object) -> object:
        """JSON has what follows from the other fields, too."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if key not in cls.model_computed_fields}

    @property
    def place(self) -> str:
        made: Any = self
        return made.gpu.name

    def __repr__(self) -> str:
        made: Any = self  # each kind has these, as fields or as what follows from them
        where, room, timing = made.place, made.available_bytes, made.timing
        memory = format_bytes(self.needed_bytes) + (f" of {format_bytes(room)}" if room is not None else "")
        time = f", {timing.tokens_per_s:.0f} tokens/s" if timing else ""
        if timing and timing.total_s:
            time = f", {format_duration(timing.total_s.expected_s)}"
        return f"<plan of {made.name} on {where}: {self.verdict}, {memory}{time}>"


class Plan(PlanRecord):
    """The whole forecast for one config on one device. `step`: of the trainer that will run it; `assumptions`: texts
    `assumed.ID`; `world`: ranks that share foretrain's step, so that memory is the largest rank's, times are of all."""

    kind: Literal["pretraining"] = "pretraining"
    name: str
    config: RunConfig
    gpu: Gpu
    dtype: Dtype
    dtype_reason: str
    compiled: bool
    counts: ModelCounts
    work: Work
    available_bytes: NonNegativeInt | None
    available_reason: str
    used_by_others_bytes: int
    memory: tuple[RunMemory, RunMemory]
    foretrain_timing: Timing | None
    nanogpt_timing: Timing | None
    notes: tuple[Note, ...]
    step: StepName = "foretrain"
    assumptions: tuple[Note, ...] = ()
    exact: tuple[Exact, ...] = ()
    world: int = 1
    per_node: int = 1

    @property
    def needs(self) -> RunMemory:
        return self.memory_of(self.step)

    @property
    def place(self) -> str:
        return f"{self.devices} x {self.gpu.name}" if self.world > 1 else self.gpu.name

    @computed_field
    @property
    def timing(self) -> Timing | None:
        return self.timing_of(self.step)

    def exact_of(self, step: StepName | None) -> Exact | None:
        return next((found for found in self.exact if found.memory.step == step), None)

    def memory_of(self, step: StepName | None) -> RunMemory:
        return next(memory for memory in self.memory if memory.step == step)

    @property
    def memories(self) -> tuple[RunMemory, ...]:
        """Of both trainers, the one that is meant first; of one alone where the other has nothing to do with it."""
        found = sorted(self.memory, key=lambda memory: memory.step != self.step)
        return tuple(found if family_of(self.config).beside_nanogpt else found[:1])

    @property
    def evaluation_batches(self) -> int:
        """Micro-batches of both splits in one evaluation by the step that is meant."""
        c = self.config
        return 2 * (c.eval_iters if self.step == "nanogpt" else math.ceil(c.eval_rows / c.eval_batch))

    def spec(self, step: StepName | None = None) -> StepSpec:
        """The step that was planned; by default the one that is meant."""
        dtype = choose_dtype(self.config, self.gpu, step or self.step)[0]
        known: dict[str, Any] = {"dtype": dtype, "compiled": self.compiled}
        if self.world > 1 and (step or self.step) == "foretrain":
            return StepSpec.of_rank(self.config, self.gpu, self.world, self.per_node, **known)
        return StepSpec.of(self.config, self.gpu, step or self.step, **known)

    def run_by(self, step: StepName) -> Self:
        """The same with the trainer that is meant, and the dtype that it chooses."""
        dtype, reason = choose_dtype(self.config, self.gpu, step)
        notes = self.notes
        if reason == "emulated_bf16":
            values = {"gpu": self.gpu.name, "torch": str(software.of(self.config.torch_version))}
            notes = (*notes, Note(id=reason, values=values))
        return self.model_copy(update={"step": step, "dtype": dtype, "dtype_reason": reason, "notes": notes})

    @property
    def devices(self) -> int:
        """Cards of all ranks, which on a CPU share those of each machine."""
        return self.world // self.per_node if self.gpu.kind == "cpu" else self.world

    def timing_of(self, step: StepName) -> Timing | None:
        return self.foretrain_timing if step == "foretrain" else self.nanogpt_timing

    @property
    def of_untimed_recipe(self) -> bool:
        """Return whether the time is unknown because of the model's family; else, where it is, because of the card."""
        return any(note.id == "time_of_recipe_unknown" for note in self.notes)

    def verdict_of(self, step: StepName | None) -> Verdict | None:
        return self.memory_of(step).verdict


def no_time(plan: PlanRecord, text: str) -> UserError:
    """Return the error for what was asked by `text` and needs a time that is not known."""
    one: Any = getattr(plan, "one_card", plan)  # of several cards
    if isinstance(one, Plan) and one.of_untimed_recipe:
        return UserError("usage.no_time_of_recipe", text=text, recipe=one.config.recipe)
    return UserError("usage.no_time", text=text, gpu=one.gpu.name)


def _counts(shape: ModelShape) -> ModelCounts:
    groups = shape.optimizer_groups()
    return ModelCounts(
        n_params=shape.n_params,
        n_params_nanogpt=shape.n_params_nanogpt,
        n_matmul_params=shape.n_matmul_params,
        decayed_tensors=groups[True][0],
        decayed_params=groups[True][1],
        undecayed_tensors=groups[False][0],
        undecayed_params=groups[False][1],
    )


def work_of(config: RunConfig, shape: ModelShape, dataset_tokens: int | None, source: str) -> Work:
    steps = 0 if config.eval_only else config.max_iters
    tokens = steps * config.tokens_per_step
    return Work(
        tokens_per_step=config.tokens_per_step,
        steps=steps,
        tokens=tokens,
        dataset_tokens=dataset_tokens,
        dataset_source=source,
        epochs=tokens / dataset_tokens if dataset_tokens else None,
        flops_6n=shape.flops_per_token_6n * tokens,
        flops=shape.flops_per_token * tokens,
        flops_per_token=shape.flops_per_token,
    )


def n_evaluations(config: RunConfig, steps: int | None = None) -> int:
    """One before the first step, one each interval, and one at the end. `steps`: in the place of max_iters."""
    if config.eval_only:
        return 1
    return math.ceil((config.max_iters if steps is None else steps) / config.eval_interval) + 1


def save_time(config: RunConfig) -> Range:
    shape = ModelShape.of(config)
    size = 4 * shape.n_params + optimizer_of(config).moments_bytes(shape.numels)
    rates = (SAVE_BYTES_PER_S_HIGH, SAVE_BYTES_PER_S, SAVE_BYTES_PER_S_LOW)
    low, expected, high = (size / rate for rate in rates)
    return Range(low_s=low, expected_s=expected, high_s=high)


def timing(spec: StepSpec, logged_step_s: float | None = None) -> Timing | None:
    """How long a run of this step takes; None where the catalogue lacks the device's rates."""
    step_s = step_time(spec)
    if logged_step_s is not None:
        step_s = Range(low_s=logged_step_s, expected_s=logged_step_s, high_s=logged_step_s)
    if step_s is None:
        return None
    source: TimingSource = "calibrated" if is_calibrated(spec) else "estimated"
    if logged_step_s is not None:
        source = "measured (log)"
    return whole_run(spec, source, step_s, evaluation_time(spec), compile_time(spec.compiled))


def whole_run(
    spec: StepSpec, source: TimingSource, step_s: Range, evaluation_s: Range | None, compile_s: Range, cards: int = 1
) -> Timing:
    """Time all of a run from its parts: steps, shared by `cards`, compilation, evaluations, checkpoints."""
    config, gpu = spec.config, spec.gpu
    steps, evaluations = (0 if config.eval_only else config.max_iters), n_evaluations(config)
    saves = save_time(config)
    parts = _Parts(step_s, compile_s, saves, evaluation_s, _start(gpu) if source == "calibrated" else None)
    low, expected, high = (parts.total_s(reading, steps, evaluations) for reading in READINGS)
    total = Range(low_s=low, expected_s=expected, high_s=high)
    tokens_per_s = config.tokens_per_step / step_s.expected_s
    flop_per_s = tokens_per_s * ModelShape.of(config).flops_per_token
    peak = gpu.peak_flop_per_s(spec.dtype)
    mfu = flop_per_s / (cards * peak) if peak else None
    torch = str(software.of(config.torch_version)) if spec.cuda and source == "estimated" else ""
    return Timing(
        source=source, flops_per_step=config.tokens_per_step * ModelShape.of(config).flops_per_token,
        step_s=step_s, evaluation_s=evaluation_s, n_evaluations=evaluations, save_s=saves,
        compile_s=compile_s, total_s=total, tokens_per_s=tokens_per_s, flop_per_s=flop_per_s, mfu=mfu,
        nanogpt_mfu=flop_per_s / NANOGPT_PEAK_FLOP_PER_S, torch=torch, steps=steps,
        prices=Prices.of(config), **dict(spending(config, gpu, mfu, total, cards)),
    )  # fmt: skip


class _Parts(NamedTuple):
    step_s: Range
    compile_s: Range
    save_s: Range
    evaluation_s: Range | None
    start_s: Range | None

    def total_s(self, reading: Reading, steps: int, evaluations: int) -> float:
        name = f"{reading}_s"
        total = getattr(self.step_s, name) * steps + getattr(self.compile_s, name)
        total += getattr(self.save_s, name) * (evaluations - 1)
        if self.evaluation_s is not None:
            total += getattr(self.evaluation_s, name) * evaluations
        if self.start_s is not None:
            total += getattr(self.start_s, name)
        return total


def _start(gpu: Gpu) -> Range | None:
    """What a run takes before its first step, where that was measured."""
    start_s = gpu.calibration.start_s if gpu.calibration else None
    return None if start_s is None else Range(low_s=0.0, expected_s=start_s, high_s=START_HIGH * start_s)


def seconds_by_steps(timing: Timing, spec: StepSpec, reading: Reading) -> Callable[[int], float]:
    config, start_s = spec.config, _start(spec.gpu) if timing.source == "calibrated" else None
    parts = _Parts(timing.step_s, timing.compile_s or NO_TIME, save_time(config), timing.evaluation_s, start_s)

    def seconds(steps: int) -> float:
        return parts.total_s(reading, 0 if config.eval_only else steps, n_evaluations(config, steps))

    return seconds


def available(config: RunConfig, gpu: Gpu, used_by_others_bytes: int) -> tuple[int | None, str]:
    """Bytes that the process may take, context included, and the id of what limits it."""
    limit = config.memory_limit_bytes
    free = gpu.memory_bytes - used_by_others_bytes if gpu.memory_bytes is not None else None
    if limit is not None and (free is None or limit <= free):
        return limit, "memory_limit"
    return (max(0, free), "memory") if free is not None else (None, "unknown")


def _host_bytes(config: RunConfig) -> int:
    """Of an optimizer on the host: the fp32 twin (model/master.py), its gradients, and the moments."""
    shape = ModelShape.of(config)
    return 8 * shape.n_params + optimizer_of(config).moments_bytes(shape.numels)


def notes_of(config: RunConfig, gpu: Gpu, used_by_others_bytes: int, dataset_tokens: int | None) -> list[Note]:
    notes, compiled, dtype = [], compiles(config, gpu), choose_dtype(config, gpu)[0]

    def note(id: str, **values: Any) -> None:
        notes.append(Note(id=id, values=values))

    if gpu.kind == "cuda" and not used_by_others_bytes:
        note("others_unknown")
    notes += gpu.notes
    if gpu.lowest_board_power_w and gpu.board_power_w:
        note("power_range", gpu=gpu.name, low_w=gpu.lowest_board_power_w, high_w=gpu.board_power_w)
    if dtype == "bfloat16" and not gpu.supports_bf16:
        note("bf16_unsupported", gpu=gpu.name)
    if config.decay_lr and not config.eval_only and config.lr_decay_iters != config.max_iters:
        note("decay_beyond_end", lr_decay_iters=config.lr_decay_iters, max_iters=config.max_iters)
    if config.vocab_size % 8 and compiled:
        note("vocab_unaligned", vocab_size=config.vocab_size)
    unmodelled = [f"compile_mode = {config.compile_mode}"] if config.compile_mode != "default" else []
    unmodelled += [reason_id for technique in TECHNIQUES if (reason_id := technique.not_estimated(config))]
    if config.optimizer_offload and gpu.kind == "cuda":
        note("offload_host", size=_host_bytes(config))
    if config.elements_on_host and gpu.kind == "cuda":
        wide = 2 if config.master_weights and dtype != "float32" else 4
        note("checkpoints_host", size=wide * config.elements_on_host)
    if compiled and unmodelled:
        note("compile_not_modelled", settings=" and ".join(unmodelled))
    if compiled and (rough := family_of(config).roughly_compiled(config)):
        note("compiled_roughly", settings=rough)
    if config.cuda_graph == "auto" and StepSpec.of(config, gpu, dtype=dtype).is_one_graph:
        note("one_graph")
    if not family_of(config).is_timed(compiled=compiled):
        note("time_of_recipe_unknown", recipe=config.recipe)
    if config.max_iters % config.eval_interval == 0 and not config.eval_only:
        note("nanogpt_extra_step", max_iters=config.max_iters)
    if dataset_tokens is None and not config.eval_only:
        note("dataset_unknown", dataset=config.dataset)
    if gpu.memory_bytes is None and config.memory_limit_bytes is None:
        note("memory_unknown", gpu=gpu.name, example=gpu.sized_name)
    if gpu.kind == "mps":
        note("mps_as_cuda")
    if config.compile and not compiled:
        note("mps_eager" if gpu.kind == "mps" else "old_card_eager", gpu=gpu.name, capability=gpu.compute_capability)
    for option, reason in idle(config, gpu, dtype):
        note("no_effect_here", option=option, reason=reason)
    if config.matmul != "dtype":
        note("matmul_unmeasured", mode=config.matmul)
    if config.matmul in EIGHT_BITS:
        note("matmul_in_ledger", mode=config.matmul, dtype=dtype)
    return notes


def plan(
    config: RunConfig,
    gpu: Gpu,
    *,
    name: str = "run",
    used_by_others_bytes: int = 0,
    dataset_tokens: int | None = None,
    dataset_source: str = "unknown",
    logged_step_s: float | None = None,
) -> Plan:
    """Forecast a config on a device. `dataset_tokens`: in the training split; `logged_step_s`: of one iteration, by a
    log. Raises UserError where the device cannot train, or not as `matmul` asks."""
    if not gpu.is_trained_on:
        raise UserError("usage.training_needs_cuda", gpu=gpu.name)
    shape = ModelShape.of(config)
    dtype, reason = choose_dtype(config, gpu)
    available_bytes, limited_by = available(config, gpu, used_by_others_bytes)
    dataset_tokens = config.dataset_tokens or dataset_tokens
    if config.dataset_tokens:
        dataset_source = "config"
    work = work_of(config, shape, dataset_tokens, dataset_source)
    specs = [StepSpec.checked(config, gpu, step) for step in STEP_NAMES]
    ours, nanos = (predict(spec, available_bytes) for spec in specs)
    timings = [timing(spec, logged_step_s) for spec in specs]
    notes = notes_of(config, gpu, used_by_others_bytes, dataset_tokens)
    if logged_step_s is not None and timings[0] is not None and (timings[0].mfu or 0) > 1:
        notes.append(Note(id="mfu_beyond_peak", values={"mfu": timings[0].mfu, "gpu": gpu.name}))
    return Plan(
        name=name, config=config, gpu=gpu, dtype=dtype, dtype_reason=reason, compiled=specs[0].compiled,
        counts=_counts(shape), work=work, available_bytes=available_bytes, available_reason=limited_by,
        used_by_others_bytes=used_by_others_bytes, memory=(ours, nanos), foretrain_timing=timings[0],
        nanogpt_timing=timings[1],
        notes=tuple(notes),
    )  # fmt: skip
