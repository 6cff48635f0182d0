"""What is fastest on a CPU flips with the model's size and the CPU's instructions, so it is measured, not ruled.

Dtype, attention kernels, fp32 masters and threads, as far as the config leaves them open, are decided by timing
training steps of a slice of the model: some of its layers, as large a share of its vocabulary, some of its rows. The
steps run uncompiled, as compiling each candidate would take minutes, and on one thread by its CPU time, as several
threads wait for each other where something else is running. A decision is kept in the cache, and in the run's
config, so that a resumed run goes on with it. Runs that are over before it pays measure nothing.
"""

import os
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from foretrain.base.cache import Cache
from foretrain.base.installation import installed_torch
from foretrain.base.records import Record
from foretrain.base.units import MIB
from foretrain.config.checks import check
from foretrain.config.options import OPTIONS, RunConfig, named, step_options
from foretrain.hardware.catalogue import Dtype
from foretrain.hardware.cpu import physical_cores, usable_cores
from foretrain.model.shape import ModelShape
from foretrain.model.step import TrainState, build, train_step
from foretrain.training.device import TORCH_DTYPES, Placement
from foretrain.training.store import RunRecord

SHORT_S = 4.0  # a run of fewer seconds at the CPU's nominal peak is not measured for
# A run of fewer seconds at that peak is not compiled: compiling takes 5 to 40 s, or 3 s where all is known from before,
# and 100 MB more; a compiled step is 7 % quicker (docs/speed.md).
SHORT_TO_COMPILE_S = 150.0
BUDGET_S = 2.0
LEAST_GAIN = 0.05  # what is not faster by this share is not worth other kernels
LEAST_ROUNDS = 8  # of those that are near each other, however long a step takes: the best of three can be an accident
LAGS, NEAR = 1.5, 1.15  # a candidate that is slower by this factor is not timed again; after half of the rounds
KEPT = Cache("choices")
CHOSEN = named(lambda option: option.chosen_on_cpu is not None)
# Logits of a micro-batch beyond this are made in chunks. On two CPUs that took as long (0.94 to 1.0 of a step of two
# blocks of GPT-2 124M at 8 x 512, float32 and bfloat16), and a third of the memory.
LARGE_LOGITS_BYTES, CHUNK = 256 * MIB, 1024
SMALL_STEP_S = 0.005  # of a step that one thread may do as fast as several
_SLICE_FLOPS = 8e9  # of one step: 25 to 100 ms on two cores


class Way(Record):
    """How a step can be carried out, and the seconds of one step of the slice in it."""

    dtype: Dtype
    attention: str
    master_weights: bool
    threads: int
    step_s: float = 0.0


class Choice(Record):
    """The fastest way first, then the others that were timed, as quick as each got; and of which slice."""

    ways: tuple[Way, ...]
    layers: int
    rows: int
    took_s: float
    torch_version: str


@dataclass(frozen=True)
class Chosen:
    """A config whose choices are all made, where it runs, and what the user should hear of."""

    config: RunConfig
    placement: Placement


def recall(config: RunConfig, placement: Placement, record: RunRecord, given: set[str]) -> Chosen:
    """A resumed run goes on as it was recorded, bit for bit, except for what the user now asks for otherwise."""
    old = record.config
    is_open = {key for key in CHOSEN if key not in given or getattr(config, key) == OPTIONS[key].chosen_on_cpu}
    update = {key: getattr(old, key) for key in is_open}
    if "cpu_threads" in update:  # the machine may be another one
        update["cpu_threads"] = min(update["cpu_threads"], usable_cores())
    if "dtype" in update:  # what auto meant on the card that it ran on
        placement = replace(placement, dtype=record.dtype)
    notes: tuple[tuple[str, dict[str, Any]], ...] = ()
    if "compile" not in given and not old.compile:
        update["compile"], placement = False, replace(placement, compiled=False)
    if "cuda_graph" not in given:  # also off where the step could not be recorded
        update["cuda_graph"] = old.cuda_graph
    if placement.compiled and old.compile and not record.compiled:  # it could not be compiled then
        placement, notes = replace(placement, compiled=False), (("still_eager", {}),)
    return _apply(config.model_copy(update=update), placement, notes)


def decide(config: RunConfig, placement: Placement, given: set[str]) -> Chosen:
    """Measure what is open, or look it up. `given`: the knobs that the user set. On a card nothing is open."""
    if placement.device.type != "cpu":
        return Chosen(config, placement)
    config, placement = _in_chunks(config, placement, given)
    ways = candidates(config, given)
    if len(ways) == 1 or _is_short(config, placement):
        return _apply(_plain(config, placement), placement, ())
    # What is measured is a step of the slice, so its options name the measurement.
    slice_options = step_options(slice_of(config))
    path = KEPT.path(repr([placement.gpu.name, installed_torch(), usable_cores(), slice_options, ways]))
    choice = KEPT.record(path, Choice)
    known = choice is not None and bool(choice.ways)
    if choice is None or not known:
        choice = measure(config, ways)
        KEPT.keep(path, choice.model_dump_json(indent=1))
    best, first = choice.ways[0], next(way for way in choice.ways if _is_first(way, ways[0]))
    update = {
        "dtype": best.dtype, "attention": best.attention, "master_weights": best.master_weights,
        "cpu_threads": best.threads,
    }  # fmt: skip
    note = {
        "dtype": best.dtype, "attention": best.attention, "masters": _masters(best), "threads": best.threads,
        "step": best.step_s, "plain_step": first.step_s, "plain_dtype": first.dtype, "plain_attention": first.attention,
        "layers": choice.layers, "rows": choice.rows,
    }  # fmt: skip
    id = "chosen_plain" if best == first else "chosen_known" if known else "chosen"
    return _apply(config.model_copy(update=update), placement, ((id, note),))


def _in_chunks(config: RunConfig, placement: Placement, given: set[str]) -> tuple[RunConfig, Placement]:
    """With a chunked loss, where its logits are large and nobody said how it is computed."""
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
    """Uncompiled, where the run is over on a CPU before compiling pays, and nobody asked for it."""
    config, placement = chosen.config, chosen.placement
    nominal_s = _nominal_s(config, placement)
    if placement.device.type != "cpu" or not placement.compiled or "compile" in given or nominal_s is None:
        return chosen
    if nominal_s >= SHORT_TO_COMPILE_S:
        return chosen
    notes = (*placement.notes, ("too_short_to_compile", {}))
    return Chosen(config.model_copy(update={"compile": False}), replace(placement, compiled=False, notes=notes))


def _masters(way: Way) -> str:
    return ", master weights" if way.master_weights else ""


def _is_first(way: Way, first: Way) -> bool:
    return way.model_copy(update={"step_s": 0.0}) == first


def _plain(config: RunConfig, placement: Placement) -> RunConfig:
    """What is open, without a measurement: as PyTorch does it by itself."""
    update: dict[str, Any] = {"dtype": placement.dtype} if config.dtype == "auto" else {}
    if config.attention == "auto":
        update["attention"] = "sdpa"
    return config.model_copy(update=update)


def _apply(config: RunConfig, placement: Placement, notes: tuple[tuple[str, dict[str, Any]], ...]) -> Chosen:
    dtype: Dtype = placement.dtype if config.dtype == "auto" else config.dtype
    if placement.device.type == "cpu" and config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)
    return Chosen(config, replace(placement, dtype=dtype, notes=placement.notes + notes))


def candidates(config: RunConfig, given: set[str]) -> list[Way]:
    """Every way that the config leaves open; the first is what PyTorch does by itself."""
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
                ways.append(Way(dtype=dtype, attention=attention, master_weights=master, threads=threads))
    return ways


def _is_short(config: RunConfig, placement: Placement) -> bool:
    nominal_s = _nominal_s(config, placement)
    return config.eval_only or nominal_s is None or nominal_s < SHORT_S


def _nominal_s(config: RunConfig, placement: Placement) -> float | None:
    """Seconds of the whole run at the device's peak in float32."""
    peak = placement.gpu.peak_flop_per_s("float32")
    return ModelShape.of(config).flops_per_token * config.tokens_per_step * config.max_iters / peak if peak else None


# -- the measurement ---------------------------------------------------------------------------------------


def slice_of(config: RunConfig) -> RunConfig:
    """A config whose step takes about _SLICE_FLOPS and whose parts have the same shares: layers and vocabulary are cut
    alike, then rows."""
    c = config
    step = ModelShape.of(c).flops_per_token * c.batch_size * c.block_size
    layers = max(1, min(c.n_layer, int(c.n_layer * _SLICE_FLOPS / step * 2)))  # two layers before more rows
    share = layers / c.n_layer
    rows = max(1, min(c.batch_size, int(c.batch_size * _SLICE_FLOPS / (step * share))))
    vocabulary = max(min(c.vocab_size, 64), int(c.vocab_size * share))
    update = {"n_layer": layers, "vocab_size": vocabulary, "batch_size": rows, "gradient_accumulation_steps": 1}
    return c.model_copy(update=update)


class Candidate:
    """A throw-away model that trains in one way on tokens drawn at random."""

    def __init__(self, config: RunConfig, way: Way) -> None:
        update = {"attention": way.attention, "master_weights": way.master_weights}
        own = config.model_copy(update=update)
        self.way, self.best_s, self.clock = way, float("inf"), time.thread_time
        self.state: TrainState = build(own, torch.device("cpu"), TORCH_DTYPES[way.dtype], compile=False)
        tokens = torch.randint(0, own.vocab_size, (own.batch_size, own.block_size + 1))
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.step()  # makes the moments, and oneDNN its kernels

    def step(self) -> float:
        started = self.clock()
        train_step(self.state, [self.batch], 1e-4)
        return self.clock() - started

    def time(self) -> None:
        self.best_s = min(self.best_s, self.step())


def measure(config: RunConfig, ways: list[Way]) -> Choice:
    """Time the ways in turn, LEAST_ROUNDS and for about BUDGET_S; what falls far behind is dropped. The state of
    torch's generator and its thread count are as they were."""
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
    """The fastest; an earlier one where the gain is small, as it changes less."""
    best = timed[0]
    for candidate in timed[1:]:
        if candidate.best_s < (1 - LEAST_GAIN) * best.best_s:
            best = candidate
    return best


def _fewer_threads(best: Candidate, config: RunConfig) -> Way | None:
    """The best way on fewer threads where that is faster: on real cores only, or on one for a small model."""
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
