"""Checks of the config against the log, by every figure that both have; and hidden facts of the log."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from foretrain.base.records import Record
from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.hardware.catalogue import NANOGPT_PEAK_FLOP_PER_S, Dtype, Gpu
from foretrain.predict.spec import choose_dtype

if TYPE_CHECKING:
    from foretrain.runs.training_log import TrainingLog

SCHEMA = "foretrain.mfu/1"
CLOCK_HEADROOM = 1.1  # a cool card clocks above the boost clock that its peak is stated for


class Utilization(Record):
    """One speed on one card, as shares of one; None where no source has the peak. `clock_` figures: at `clock_ghz`."""

    gpu_name: str
    dtype: Dtype
    step_s: float
    tokens_per_step: int
    tokens_per_s: float
    flops_per_token: int
    causal_flops_per_token: int
    hardware_flops_per_token: int | None
    flop_per_s: float
    peak_flop_per_s: float | None
    peak_source: str
    mfu: float | None
    causal_mfu: float | None
    hfu: float | None
    nanogpt_mfu: float
    clock_ghz: float | None = None
    clock_peak_flop_per_s: float | None = None
    clock_mfu: float | None = None
    clock_hfu: float | None = None

    @property
    def impossible(self) -> bool:
        """Return whether it is more than the card can do, even with masked attention and at the run's own clock."""
        peak = self.clock_peak_flop_per_s or self.peak_flop_per_s
        return peak is not None and self.tokens_per_s * self.causal_flops_per_token > CLOCK_HEADROOM * peak


def recomputed_flops_per_token(config: RunConfig) -> int:
    return config.checkpointed * ModelShape.of(config).block_forward_flops_per_token


def peak_at_clock(gpu: Gpu, dtype: Dtype, clock_ghz: float) -> float | None:
    peak = gpu.peak_flop_per_s(dtype)
    if peak is None:
        return None
    if dtype != "float32":
        per_clock = gpu.fp16_flop_per_clock_per_sm
        return gpu.sm_count * per_clock * clock_ghz * 1e9 if gpu.sm_count and per_clock else None
    stated_ghz = gpu.boost_clock_ghz if gpu.tf32_dense_tflops else gpu.fp32_clock_ghz or gpu.boost_clock_ghz
    return peak * clock_ghz / stated_ghz if stated_ghz else None


def utilization(
    config: RunConfig, gpu: Gpu, step_s: float, *, tokens_per_step: int | None = None, clock_ghz: float | None = None
) -> Utilization:
    """Return this step time as shares of the card. `clock_ghz`: the mean SM clock of the run."""
    dtype, _ = choose_dtype(config, gpu)
    shape = ModelShape.of(config)
    tokens = tokens_per_step or config.tokens_per_step
    tokens_per_s = tokens / step_s
    full = shape.flops_per_token
    causal = shape.causal_flops_per_token
    hardware = full + recomputed_flops_per_token(config) if config.activation_checkpointing else None
    peak = gpu.peak_flop_per_s(dtype)
    clock_peak = peak_at_clock(gpu, dtype, clock_ghz) if clock_ghz else None

    def share(flops: int | None, of: float | None) -> float | None:
        return tokens_per_s * flops / of if flops and of else None

    return Utilization(
        gpu_name=gpu.name, dtype=dtype, step_s=step_s, tokens_per_step=tokens,
        tokens_per_s=tokens_per_s, flops_per_token=full, causal_flops_per_token=causal,
        hardware_flops_per_token=hardware, flop_per_s=tokens_per_s * full, peak_flop_per_s=peak,
        peak_source=gpu.source, mfu=share(full, peak), causal_mfu=share(causal, peak), hfu=share(hardware, peak),
        nanogpt_mfu=tokens_per_s * full / NANOGPT_PEAK_FLOP_PER_S, clock_ghz=clock_ghz,
        clock_peak_flop_per_s=clock_peak, clock_mfu=share(full, clock_peak), clock_hfu=share(hardware, clock_peak),
    )  # fmt: skip


_DECAY = 0.9  # nanoGPT's running mfu: 0.9 of the old, 0.1 of the new
_MFU_TOLERANCE = 0.03
_GPUS = (2, 3, 4, 6, 8, 16, 32, 64)  # each prints the mfu of its own share; far enough apart to be distinguished
_RATE_TOLERANCE = 0.1  # llm.c prints a running mean
_RATE_VARIES = 0.005  # of the times; rounded rates, such as 17.4k, may repeat within that
_ENOUGH = 5  # steps
_OTHER_LOSSES = {"a preference loss": "preference_loss", "a policy loss": "policy_loss"}


class Finding(Record):
    id: str
    tone: Literal["good", "warn", "bad", "plain"]
    values: dict[str, Any] = Field(default_factory=dict)


def findings(
    log: TrainingLog, own: RunConfig | None, given: RunConfig | None, used: Utilization | None, steady_s: float | None,
    interval: int,
) -> tuple[Finding, ...]:  # fmt: skip
    """Return all findings, mismatches of the config first. `own`: the config where it can describe this log's model."""
    found: list[Finding] = []
    if own is not None:
        mismatches, mfu = _mismatches(log, own), _mfu(log, own)
        agreed = [what for what, _, _ in _pairs(log, own)]
        bad = mismatches + [f for f in mfu if f.tone == "bad"]
        if bad:
            found.append(Finding(id="not_this_config", tone="bad", values={"count": len(bad)}))
        elif agreed:
            found.append(Finding(id="config_agrees", tone="good", values={"what": agreed}))
        found += mismatches + mfu
    elif given is not None:
        nanochat = log.program.h100_mfu
        values = {} if nanochat else {"format": log.program.shown}
        found.append(Finding(id="nanochat_config" if nanochat else "other_program", tone="warn", values=values))
    if used is not None and used.impossible:
        found.append(Finding(id="beyond_peak", tone="bad", values={"mfu": used.mfu, "gpu": used.gpu_name}))
    return tuple(found + _of_the_log(log, steady_s, interval))


def rate_tokens(log: TrainingLog) -> float | None:
    """Return tokens per step by the printed tokens/s and time; None where none is printed, or for one card only."""
    steps = log.steps
    if log.program.rate_per_gpu or log.program.step_time != "printed" or has_constant_rate(log):
        return None
    tokens_per_step = [r * t for r, t in zip(steps.tokens_per_s, steps.time_s, strict=True) if math.isfinite(r * t)]
    return median(tokens_per_step) if tokens_per_step else None


def has_constant_rate(log: TrainingLog) -> bool:
    """Return whether tokens/s stay the same to the last digit while the times vary: then they are not a rate."""
    later = [i for segment in log.steps.segments() for i in segment[1:]]
    pairs = [(r, t) for i in later if math.isfinite((r := log.steps.tokens_per_s[i]) * (t := log.steps.time_s[i]))]
    rates, times = {rate for rate, _ in pairs}, sorted(time_s for _, time_s in pairs)
    if len(rates) != 1 or len(times) < _ENOUGH:
        return False
    low, middle, high = (times[round(share * (len(times) - 1))] for share in (0.1, 0.5, 0.9))
    return (high - low) / middle > _RATE_VARIES


def rate_fits(printed: float, config: RunConfig) -> bool:
    return abs(printed / config.tokens_per_step - 1) <= _RATE_TOLERANCE


def _pairs(log: TrainingLog, config: RunConfig) -> list[tuple[str, float, float]]:
    header, shape = log.header, ModelShape.of(config)
    groups = shape.optimizer_groups()
    pairs = [
        ("tokens_per_step", header.tokens_per_step, config.tokens_per_step),
        ("n_params_millions", header.n_params_millions, round(shape.n_params_nanogpt / 1e6, 2)),
        ("n_params", header.n_params, shape.n_params),
        ("decayed_tensors", header.decayed_tensors, groups[True][0]),
        ("decayed_params", header.decayed_params, groups[True][1]),
        ("undecayed_tensors", header.undecayed_tensors, groups[False][0]),
        ("undecayed_params", header.undecayed_params, groups[False][1]),
        ("vocab_size", header.vocab_size, config.vocab_size),
    ]
    return [(what, logged, configured) for what, logged, configured in pairs if logged is not None]


def _mismatches(log: TrainingLog, config: RunConfig) -> list[Finding]:
    found = [
        Finding(id=f"differs.{what}", tone="bad", values={"log": logged, "config": configured})
        for what, logged, configured in _pairs(log, config)
        if not math.isclose(logged, configured, rel_tol=0, abs_tol=0.0101 if what == "n_params_millions" else 0)
    ]
    printed = rate_tokens(log)
    if log.header.tokens_per_step is None and printed is not None and not rate_fits(printed, config):
        values = {"log": round(printed), "config": config.tokens_per_step}
        found.append(Finding(id="differs.tokens_per_step", tone="bad", values=values))
    for key, logged in log.header.settings.items():
        configured = getattr(config, key, None) if key in type(config).model_fields else None
        # Numbers and switches only: names of folders and projects tell nothing about the training.
        if isinstance(configured, int | float) and key != "wandb_log" and logged != configured:
            values = {"key": key, "log": str(logged), "config": configured}
            found.append(Finding(id="differs.override", tone="bad", values=values))
    return found


def _mfu(log: TrainingLog, config: RunConfig) -> list[Finding]:
    """Check nanoGPT's printed mfu, which implies the FLOPs per step of its config, against the config."""
    printed, flops = _printed_flops(log) if log.format == "nanogpt" else (0.0, [])
    if not flops:
        return []
    ratio = ModelShape.of(config).flops_per_token * config.tokens_per_step / median(flops)
    values = {"printed": printed, "expected": printed * ratio}
    # The mfu is printed to 0.01%, which is coarse where it is small.
    if abs(ratio - 1) <= _MFU_TOLERANCE + 0.00005 / printed:
        return [Finding(id="mfu_agrees", tone="good", values=values)]
    processes = next((n for n in _GPUS if abs(ratio / n - 1) <= _MFU_TOLERANCE), 0)
    if processes:
        return [Finding(id="mfu_of_one_of", tone="warn", values={**values, "processes": processes})]
    return [Finding(id="mfu_differs", tone="bad", values=values)]


def _printed_flops(log: TrainingLog) -> tuple[float, list[float]]:
    """Return (the last mfu, FLOPs per step by each printed one), by following nanoGPT's running mean."""
    rate, printed = math.nan, 0.0
    flops = []
    for time_s, mfu in zip(log.steps.time_s, log.steps.logged_mfu, strict=True):
        if not math.isfinite(mfu):
            rate = math.nan
        elif math.isfinite(time_s):
            rate = 1 / time_s if math.isnan(rate) else _DECAY * rate + (1 - _DECAY) / time_s
            flops.append(mfu * NANOGPT_PEAK_FLOP_PER_S / rate)
            printed = mfu
    return printed, flops


def _of_the_log(log: TrainingLog, steady_s: float | None, interval: int) -> list[Finding]:
    steps, found = log.steps, []

    def note(id: str, tone: Literal["warn", "bad", "plain"] = "warn", **values: Any) -> None:
        found.append(Finding(id=id, tone=tone, values=values))

    lost = [number for number, lost in zip(steps.number, steps.lost, strict=True) if lost]
    if lost:
        note("loss_not_finite", "bad", step=lost[0], count=len(lost))
    if log.earlier_runs:
        note("earlier_runs", count=log.earlier_runs)
    if len(steps.starts) > 1:
        note("resumed", "plain", count=len(steps.starts), steps=[steps.number[i] for i in steps.starts[1:4]])
    if log.bad_times:
        note("bad_times", count=log.bad_times)
    if log.uncounted:
        note("uncounted", count=log.uncounted)
    if log.format == "nanogpt" and interval > 1:
        note("log_interval", "plain", interval=interval)
    if log.unnumbered:
        note("unnumbered", "plain")
    if log.header.read_as:
        note("read_as", read_as=log.header.read_as)
    if log.program.val_unit in _OTHER_LOSSES:
        note(_OTHER_LOSSES[log.program.val_unit], "plain")
    if has_constant_rate(log):
        note("constant_rate", rate=next(rate for rate in steps.tokens_per_s if math.isfinite(rate)))
    if steady_s is None:
        note("only_first" if log.times else "no_times", "plain")
    elif log.program.step_time in ("bar", "stamps", "difference"):
        found.append(Finding(id=f"times_by.{log.program.step_time}", tone="plain"))
    if log.program.rate_per_gpu and any(math.isfinite(rate) for rate in steps.tokens_per_s):
        note("rate_per_gpu", "plain", format=log.program.shown)
    if len(steps) < 10:
        note("few_steps", count=len(steps))
    printed, tokens = rate_tokens(log), log.header.tokens_per_step
    if steady_s and log.program.h100_mfu and tokens and printed and printed < (1 - _RATE_TOLERANCE) * tokens:
        # Before nanochat counted gradient accumulation in tok/sec: karpathy/nanochat#157, #237.
        note("nanochat_rate", printed=printed / steady_s, right=tokens / steady_s)
    if log.program.h100_mfu and not log.header.peak_flop_per_s:
        note("nanochat_h100", "plain")
    return found
