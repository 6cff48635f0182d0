"""A fine-tuning run that is to be traced: what decides its trace, and why there may be none. No torch, no transformers.

`service.traces` takes it as it takes a `service.Request`.
"""

from dataclasses import dataclass
from typing import Any

from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import ModelSource
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.trace import interpreter, service
from foretrain.predict.trace.record import Trace
from foretrain.predict.trace.repeats import with_all_micro_batches

MICRO_BATCHES = 3  # that are traced
EVALUATED = 2  # batches of an evaluation that keeps nothing
PACKAGES = {  # what a run needs, by when it does
    "transformers": lambda tune: True, "accelerate": lambda tune: True, "peft": lambda tune: tune.adapters,
    "bitsandbytes": lambda tune: tune.method == "qlora" or tune.optim in EIGHT_BIT,
    "trl": lambda tune: tune.loop == "trl",
}  # fmt: skip
EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
OLDEST_TRANSFORMERS = 5
TRACED_LOOPS = ("trainer", "trl", "own")  # whose own code is traced
# Loops that are the Trainer of transformers with other defaults, which the options say; it is traced in their place.
ON_THE_TRAINER = (*TRACED_LOOPS, "axolotl", "llama-factory")
# Options that say nothing of memory, or what `whole` puts back.
TIMES = ("dataset_tokens", "epochs", "max_steps")
EVALUATION = ("eval_batch_size", "eval_batches", "eval_accumulation_steps", "keeps_logits")


@dataclass(frozen=True)
class FineTuneRequest:
    """What to trace: a model, a way to fine-tune it, and a card."""

    source: ModelSource
    tune: FineTune
    gpu: Gpu

    def normal_tune(self) -> FineTune:
        """The options with everything at its default that does not change a trace, so that more of them are shared."""
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
        """As the worker reads it."""
        return {
            "by": "foretrain.predict.trace.finetune.job", "config": self.source.config, "compiled": self.tune.compile,
            "tune": self.normal_tune().model_dump(mode="json", exclude={"training"}),
            "gpu": service.shaping_facts(self.gpu),
        }  # fmt: skip

    def key(self) -> str:
        """The hash that the trace is kept under."""
        return service.key_of(self.job(), packages=interpreter.now().versions())

    def why_not(self) -> str:
        """'' where this can be tried here, or the sentence that says why not."""
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
        """What no trace can say, whatever is installed."""
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
        """Its trace with the micro-batches that were left out."""
        return with_all_micro_batches(
            trace, MICRO_BATCHES, self.tune.grad_accum, starts=trace.facts.get("micro_batches", ())
        )  # fmt: skip
