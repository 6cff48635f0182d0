"""A request for the trace of a fine-tuning run, as `service.traces` takes it. No torch, no transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from foretrain.base.records import Note, Record
from foretrain.config.finetune.options import OF_GENERATION, FineTune
from foretrain.config.hub.facts import ModelSource
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.allocator.replay import MemoryFailure, Tried
from foretrain.predict.allocator.settings import Settings
from foretrain.predict.finetune.memory import PHASES
from foretrain.predict.finetune.ranks import Weight, context_of
from foretrain.predict.memory import RunMemory, carried
from foretrain.predict.trace import interpreter, service
from foretrain.predict.trace.memory import replayed
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
LINKS = ("per_node", "link", "network")
EVALUATION = ("eval_batch_size", "eval_batches", "eval_accumulation_steps", "keeps_logits")


@dataclass(frozen=True)
class FineTuneRequest:
    """A run to trace; of several cards one rank. `keeps`: as of service.Request."""

    source: ModelSource
    tune: FineTune
    gpu: Gpu
    keeps: bool = False

    def normal_tune(self) -> FineTune:
        """Return the options with each that does not change a trace at its default: more traces are shared."""
        tune, default = self.tune, FineTune()
        change: dict[str, Any] = {name: getattr(default, name) for name in (*TIMES, *LINKS)}
        if not tune.evaluate:
            change |= {name: getattr(default, name) for name in EVALUATION}
        elif not tune.keeps_logits:
            change |= {"eval_batches": min(EVALUATED, tune.eval_batches), "eval_accumulation_steps": 0}
        if tune.generates:  # a trace makes old log-probabilities where there are iterations
            change |= {"num_iterations": 1 + tune.scores_again, "beta": float(tune.beta > 0)}
            change |= {"steps_per_generation": tune.micro_batches_generated, "num_generations": 2}
        if not tune.adapters:
            change |= {name: getattr(default, name) for name in FineTune.model_fields if name.startswith("lora_")}
        if tune.method != "qlora":
            change["double_quant"] = default.double_quant
        if not tune.images:
            change["image_size"] = default.image_size
        own = tune.loop in ("trl", "own") or tune.method == "qlora" or tune.world > 1
        if not own or tune.unsloth:
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
        optional = {"training": tune.preferences or tune.scores, "labels": tune.scores}
        optional |= dict.fromkeys(("images", "image_size"), tune.images)
        optional |= dict.fromkeys(OF_GENERATION, tune.generates)
        return {
            "by": "foretrain.predict.trace.finetune.drive", "config": self.source.config, "compiled": self.tune.compile,
            "tune": tune.model_dump(mode="json", exclude={name for name, decides in optional.items() if not decides}),
            "gpu": service.shaping_facts(self.gpu), "keeps": self.keeps,
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
        return self._refused() or (service.why_not_sharded() if self.tune.sharded else "")

    def _refused(self) -> str:
        tune, source = self.tune, self.source
        code, flash = source.code or "auto_map" in source.config, tune.attn == "flash_attention_2"
        other = tune.loop not in ON_THE_TRAINER and not tune.unsloth
        refused = {
            f"the config of {source.name} names Python code of its own, which is never run": code,
            f"the loop of {tune.loop} has kernels or a step of its own, which are not traced": other,
            "DeepSpeed's step is not traced; the estimate of ZeRO is a range": tune.zero_stage,
            "the kernels of cut cross-entropy are not traced; the estimate counts its tiles": tune.cut_cross_entropy,
            "pictures are traced in SFT, pretraining and classification with rows of their own, and without "
            "torch.compile": tune.images
            and (tune.training not in ("sft", "pretraining", "classification") or tune.packing or tune.compile),
            "vLLM's part of the card is not traced; the estimate counts it": tune.generates and tune.vllm == "colocate",
            "TrainingArguments has no optimizer named muon": tune.optim == "muon",
            "the flash-attn package has no fake kernels, so it is not traced; sdpa takes the same kernel": flash,
        }
        return next((reason for reason, is_so in refused.items() if is_so), "")

    def whole(self, trace: Trace) -> Trace:
        return with_all_micro_batches(
            trace, MICRO_BATCHES, self.tune.grad_accum, starts=trace.facts.get("micro_batches", ())
        )  # fmt: skip


def requests_for(source: ModelSource, tune: FineTune, gpu: Gpu) -> list[FineTuneRequest]:
    """Return one request, or two where only the card can tell when NCCL releases a bucket of DDP's."""
    remade = tune.world > 1 and not tune.sharded and not tune.looks_for_unused
    return [FineTuneRequest(source, tune, gpu, keeps) for keeps in ((False, True) if remade else (False,))]


MOMENTS = {"load": "build", "prepare": "build", "save": "save", "merge": "merge"}  # of phases that run no model


# (part, kind, shape, dtype, FLOPs, bytes read, bytes written, runs): trace/kernels/work.py
WorkRow = tuple[str, str, tuple[int, ...], str, int, int, int, int]


class FineTuneTrace(Record):
    """The traced memory of a fine-tuning run. `failure`: where it runs out of memory under what the card leaves."""

    memory: RunMemory
    failure: MemoryFailure | None
    counts: dict[str, Any] = Field(default_factory=dict)  # of FineTuneCounts
    work: tuple[WorkRow, ...] = ()  # of the second step
    shared: tuple[Weight, ...] = ()
    notes: tuple[Note, ...] = ()


def answered(
    traces: Sequence[Trace], tune: FineTune, gpu: Gpu, available_bytes: int | None, settings: Settings | None = None
) -> FineTuneTrace:
    """Answer from the traces of `requests_for`. `available_bytes`: for the process, context included; None: unknown."""
    beside, facts = RunMemory(phases=(), context=context_of(tune, gpu)), traces[0].facts
    tried = [Tried(trace, settings, physical=True) for trace in traces]
    memory, failure, _ = replayed(traces, beside, tried, available_bytes, PHASES)
    phases = tuple(p.model_copy(update={"moment": MOMENTS.get(p.phase, p.moment)}) for p in memory.phases)
    phases = phases if available_bytes is None else carried(phases)
    memory = memory.model_copy(update={"phases": phases, "paged_bytes": facts["paged_bytes"]})
    shown = {name: facts[name] for name in ("counts", "work", "shared") if name in facts}
    return FineTuneTrace(memory=memory, failure=failure, **shown, notes=_notes(traces[0]))


def _notes(trace: Trace) -> tuple[Note, ...]:
    found = [Note(id="traced_leaves_out", values={"what": what}) for what in trace.facts["notes"]]
    found += [Note(id=id, values=trace.facts[id]) for id in ("pictures", "rows") if id in trace.facts]
    if paged := trace.facts["paged_bytes"]:
        found.append(Note(id="traced_paged", values={"paged": paged}))
    return tuple(found)
