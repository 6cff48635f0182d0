"""A request for the trace of a fine-tuning run. No torch, no transformers.

`service.traces` takes it like a `service.Request`.
"""

from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from foretrain.base.records import Note, Record
from foretrain.base.units import MIB
from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelSource
from foretrain.hardware.catalogue import Gpu
from foretrain.hardware.devices import Context
from foretrain.predict.allocator.replay import Death, Replay, Tried, replay, smallest_limit_bytes
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.finetune.memory import PHASES, RunMemory
from foretrain.predict.memory import PhaseMemory, carried, judged
from foretrain.predict.trace import interpreter, service
from foretrain.predict.trace.memory import end_of, phase_of, saved_bytes
from foretrain.predict.trace.record import Trace
from foretrain.predict.trace.repeats import with_all_micro_batches

MICRO_BATCHES = 3  # that are traced
EVALUATED = 2  # batches of an evaluation that keeps nothing
PACKAGES = {  # what a run needs, by condition
    "transformers": lambda tune: True, "accelerate": lambda tune: True, "peft": lambda tune: tune.adapters,
    "bitsandbytes": lambda tune: tune.method == "qlora" or tune.optim in EIGHT_BIT,
    "trl": lambda tune: tune.loop == "trl",
}  # fmt: skip
EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
OLDEST_TRANSFORMERS = 5
TRACED_LOOPS = ("trainer", "trl", "own")  # whose own code is traced
# Loops that are transformers' Trainer with other defaults, which the options carry; it is traced in their place.
ON_THE_TRAINER = (*TRACED_LOOPS, "axolotl", "llama-factory")
# Options without effect on memory, or that `whole` restores.
TIMES = ("dataset_tokens", "epochs", "max_steps")
EVALUATION = ("eval_batch_size", "eval_batches", "eval_accumulation_steps", "keeps_logits")


@dataclass(frozen=True)
class FineTuneRequest:
    source: ModelSource
    tune: FineTune
    gpu: Gpu

    def normal_tune(self) -> FineTune:
        """Return the options with every one that does not change a trace at its default, so that more traces are
        shared.
        """
        tune, default = self.tune, FineTune()
        change: dict[str, Any] = {name: getattr(default, name) for name in TIMES}
        if not tune.evaluate:
            change |= {name: getattr(default, name) for name in EVALUATION}
        elif not tune.keeps_logits:
            change |= {"eval_batches": min(EVALUATED, tune.eval_batches), "eval_accumulation_steps": 0}
        if not tune.adapters:
            change |= {name: getattr(default, name) for name in FineTune.model_fields if name.startswith("lora_")}
        if tune.method != "qlora":
            change["double_quant"] = default.double_quant
        if (tune.loop not in ("trl", "own") and tune.method != "qlora") or tune.unsloth:
            change["loop"] = default.loop
        return tune.model_copy(
            update={
                **change, "grad_accum": min(MICRO_BATCHES, tune.grad_accum),
                "max_grad_norm": 1.0 if tune.max_grad_norm else 0.0,
                "reentrant": tune.reentrant and tune.gradient_checkpointing,
            }
        )  # fmt: skip

    def job(self) -> dict[str, Any]:
        tune = self.normal_tune()
        told = {"training": tune.preferences or tune.scores, "labels": tune.scores}
        return {
            "by": "foretrain.predict.trace.finetune.drive", "config": self.source.config, "compiled": self.tune.compile,
            "tune": tune.model_dump(mode="json", exclude={name for name, decides in told.items() if not decides}),
            "gpu": service.shaping_facts(self.gpu),
        }  # fmt: skip

    def key(self) -> str:
        return service.key_of(self.job(), packages=interpreter.now().versions())

    def why_not(self) -> str:
        there = interpreter.now().versions()
        missing = [name for name, needed in PACKAGES.items() if needed(self.tune) and not there[name]]
        if missing:
            names = " and ".join(missing)
            get = " ".join(["'foretrain[hf]'", *(name for name in missing if name in ("bitsandbytes", "trl"))])
            return f"tracing this run needs {names} (pip install {get})"
        if int(there["transformers"].split(".")[0]) < OLDEST_TRANSFORMERS:
            return f"tracing needs transformers {OLDEST_TRANSFORMERS} or newer; this is {there['transformers']}"
        return self._refused()

    def _refused(self) -> str:
        tune, source = self.tune, self.source
        if source.code or "auto_map" in source.config:
            return f"the config of {source.name} names Python code of its own, which is never run"
        if tune.loop not in ON_THE_TRAINER and not tune.unsloth:
            return f"the loop of {tune.loop} has kernels or a step of its own, which are not traced"
        if tune.cut_cross_entropy:
            return "the kernels of cut cross-entropy are not traced; the estimate counts its tiles"
        if tune.optim == "muon":
            return "TrainingArguments has no optimizer named muon"
        if tune.attn == "flash_attention_2":
            return "the flash-attn package has no fake kernels, so it is not traced; sdpa takes the same kernel"
        return ""

    def whole(self, trace: Trace) -> Trace:
        return with_all_micro_batches(
            trace, MICRO_BATCHES, self.tune.grad_accum, starts=trace.facts.get("micro_batches", ())
        )  # fmt: skip


MOMENTS = {"load": "build", "prepare": "build", "save": "save", "merge": "merge"}  # of phases that run no model


# (part, kind, shape, dtype, FLOPs, bytes read, bytes written, runs): trace/kernels/work.py
WorkRow = tuple[str, str, tuple[int, ...], str, int, int, int, int]


class FineTuneTrace(Record):
    """The traced memory of a fine-tuning run. `death`: where it runs out of memory under what the card leaves.

    `attention`: the kernels that it took. `versions`: of the packages whose code was traced.
    """

    memory: RunMemory
    # The least that the allocator may reserve without running out of memory, to a thousandth; without the context.
    smallest_limit_bytes: int
    smallest_limit_expandable_bytes: int  # the same with expandable_segments:True
    death: Death | None
    attention: tuple[str, ...]
    versions: dict[str, str]
    counts: dict[str, Any] = Field(default_factory=dict)  # of FineTuneCounts
    work: tuple[WorkRow, ...] = ()  # of the second step
    notes: tuple[Note, ...] = ()


def answered(
    trace: Trace, gpu: Gpu, versions: dict[str, str], *, available_bytes: int | None, settings: Settings | None = None
) -> FineTuneTrace:
    """Answer from a trace. `available_bytes`: for the process, context included; None: unknown."""
    context, run = Context.of(gpu), replay(trace, settings)
    peaks = {peak.phase for peak in run.phases}
    phases = tuple(_phase(trace, run, name, context) for name in PHASES if name in peaks)
    death = None
    if available_bytes is not None:
        limits = available_bytes - context.low_bytes, available_bytes - context.expected_bytes
        tried = Tried(trace, settings, physical=True)
        dies = end_of(tried, limits[0], run)
        death = dies or end_of(tried, limits[1], run)
        phases = judged(phases, available_bytes, death.phase if death else None, dies is not None, limits)
        phases = carried(phases)
    expandable = replace(settings or Settings(), expandable_segments=True)
    step = max(MIB, run.peak_reserved_bytes // 1000)
    memory = RunMemory(
        phases=tuple(phases), saved_bytes=saved_bytes(trace), source="traced", context=context,
        paged_bytes=trace.facts["paged_bytes"],
    )  # fmt: skip
    return FineTuneTrace(
        memory=memory, death=death,
        smallest_limit_bytes=smallest_limit_bytes(trace, settings, physical=True, step_bytes=step, free=run),
        smallest_limit_expandable_bytes=smallest_limit_bytes(trace, expandable, physical=True, step_bytes=step),
        attention=tuple(trace.facts["attention"]), versions=versions, counts=trace.facts.get("counts", {}),
        work=trace.facts.get("work", ()),
        notes=_notes(trace),
    )  # fmt: skip


def _phase(trace: Trace, run: Replay, name: str, context: Context) -> PhaseMemory:
    found = phase_of(trace, [run], name, context, {})
    return found.model_copy(update={"moment": MOMENTS.get(name, found.moment)})


def _notes(trace: Trace) -> tuple[Note, ...]:
    found = [Note(id="traced_leaves_out", values={"what": what}) for what in trace.facts["notes"]]
    if paged := trace.facts["paged_bytes"]:
        found.append(Note(id="traced_paged", values={"paged": paged}))
    return tuple(found)
