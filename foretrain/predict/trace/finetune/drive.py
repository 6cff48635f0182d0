"""A traced fine-tuning run: transformers' own Trainer, for three optimizer steps of at most three micro-batches, as in
predict/trace/drive.py, with evaluation, saving and merging, on fake tensors."""

import contextlib
import importlib
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from traceback import extract_tb
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import liger as integration
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from foretrain.config.finetune.arguments import adapter_arguments, trainer_arguments
from foretrain.config.finetune.options import FineTune
from foretrain.config.hub.facts import LIGER_FAMILIES, Liger
from foretrain.config.hub.keys import POSITIONS
from foretrain.config.sharing import Sharing
from foretrain.hardware.catalogue import Gpu
from foretrain.model.hub.liger import FusedLoss, cross_entropy, gated_product, rms_norm, rotary
from foretrain.predict.abstract.passage import OUTSIDE
from foretrain.predict.finetune.program import CONVERTED_BACK, widens
from foretrain.predict.finetune.ranks import Weight
from foretrain.predict.trace import ranks
from foretrain.predict.trace.card.patches import Patches
from foretrain.predict.trace.finetune import standins, unsloth
from foretrain.predict.trace.finetune.inputs import Inputs, inputs_of
from foretrain.predict.trace.finetune.standins import loaded
from foretrain.predict.trace.growth import cuts, grown, shortened
from foretrain.predict.trace.kernels.work import Work
from foretrain.predict.trace.names import Names
from foretrain.predict.trace.record import Allocation, Trace
from foretrain.predict.trace.session import in_one_sentence, tracing
from foretrain.predict.trace.traced import StandInError
from foretrain.predict.trace.tracer import Tracer

if TYPE_CHECKING:
    Base = Trainer
else:
    Base = object


# Liger's package needs a card and Triton, so stand-ins allocate, save and overwrite the same tensors
# (model/hub/liger.py). The Trainer applies them as Liger's (transformers integrations/liger.py, liger_kernel
# transformers/monkey_patch.py: `_apply_liger_kernel_to_instance`).
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@contextmanager
def stood_in() -> Iterator[None]:
    with Patches() as patches:

        def apply(model: Any, **options: Any) -> None:
            own = LIGER_FAMILIES.get(model.config.model_type)
            if own is not None:
                if options.get("fused_linear_cross_entropy") is False and own.loss == "fused":
                    own = own._replace(loss="")
                _applied(patches, model, own)

        package: Any = ModuleType("liger_kernel.transformers")
        package._apply_liger_kernel_to_instance = apply
        for name, module in (("liger_kernel", ModuleType("liger_kernel")), (package.__name__, package)):
            before = sys.modules.get(name)
            sys.modules[name] = module
            patches.callback(_put_back, name, before)
        patches.set(integration, "is_liger_kernel_available", lambda: True)
        yield


def _put_back(name: str, before: ModuleType | None) -> None:
    if before is None:
        del sys.modules[name]
    else:
        sys.modules[name] = before


def _applied(patches: Patches, model: Any, own: Liger) -> None:
    code: Any = sys.modules[type(model).__module__]
    patches.set(code, "apply_rotary_pos_emb", lambda q, k, cos, sin, *args, **kwargs: rotary(q, k, cos, sin))
    base = getattr(model, model.base_model_prefix, model)
    base = getattr(base, "language_model", base)  # of a multimodal model
    _norm(base.norm, in_place=own.last_in_place)
    for layer in base.layers:
        layer.mlp.forward = MethodType(_fused_mlp if hasattr(layer.mlp, "gate_up_proj") else _mlp, layer.mlp)
        heads = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")] if own.heads else []
        for norm in (*(getattr(layer, name, None) for name in NORMS), *heads):
            if norm is not None:
                _norm(norm, in_place=own.in_place)
    if own.loss == "fused":
        model.forward = MethodType(_forward, model)
    elif own.loss:
        patches.set(sys.modules["transformers.loss.loss_utils"].nn.functional, "cross_entropy", _cross_entropy)


def _norm(module: Any, *, in_place: bool) -> None:
    module.forward = lambda x: rms_norm(x, module.weight, in_place=in_place)


def _mlp(self: Any, x: Tensor) -> Any:
    return self.down_proj(gated_product(self.gate_proj(x), self.up_proj(x)))


def _fused_mlp(self: Any, x: Tensor) -> Any:
    up = self.gate_up_proj(x)
    gate, up = up.chunk(2, dim=-1)
    return self.down_proj(gated_product(gate, up))


def _cross_entropy(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return cross_entropy(logits, labels)


def _forward(
    self: Any, input_ids: Any = None, labels: Any = None, skip_logits: bool | None = None, **options: Any
) -> CausalLMOutputWithPast:
    """`lce_forward`: no logits while it trains, or where nobody wants them."""
    items = options.pop("num_items_in_batch", None)
    outputs = self.model(input_ids=input_ids, **options)
    states, logits, loss = outputs[0], None, None
    if skip_logits is None:
        skip_logits = self.training and labels is not None
    if skip_logits:
        loss = FusedLoss()(states, self.lm_head.weight, labels)
    else:
        logits = self.lm_head(states)
        options = {"vocab_size": self.config.get_text_config().vocab_size, "num_items_in_batch": items}
        loss = None if labels is None else self.loss_function(logits, labels, **options)
    return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)


MOST = 100  # batches written down whole; of later ones only the results


class Batch:
    def __init__(self, tracer: Tracer, start: int, inputs: Mapping[str, Any], results: Any) -> None:
        self.tracer, self.done = tracer, 0
        self.events = tracer.record.events[start:]
        made = {event for event in self.events if event >= 0}
        named = inputs if isinstance(inputs, Mapping) else {}  # GRPO's are prompts
        given = {tracer.id_of(value): name for name, value in named.items() if isinstance(value, Tensor)}
        kept = [tensor for tensor in tree_leaves(results) if isinstance(tensor, Tensor)]
        self.kept = sorted({id for tensor in kept if (id := tracer.id_of(tensor)) in made and id is not None})
        self.results = tree_map_only(Tensor, lambda tensor: Place.of(tensor, tracer.id_of(tensor), given), results)
        # What lives on and is not a result is made once: a workspace.
        self.passing = made & {~event for event in self.events if event < 0}

    def again(self, inputs: Mapping[str, Any]) -> Any:
        record, alive, storages = self.tracer.record, {}, {}
        self.done += 1
        record.moment("forward")
        for event in self.events if self.done <= MOST else self.kept:
            if event in self.kept:
                storages[event] = self._storage(event)
            elif event in self.passing:
                alive[event] = record.alloc(record.sizes[event], *record.labels[event])
                if event in record.tags:
                    record.tag(alive[event], *record.tags[event])
            elif event < 0 and ~event in alive:
                record.free(alive.pop(~event))
        return tree_map_only(Place, lambda place: place.filled(storages, inputs), self.results)

    def _storage(self, like: int) -> Tensor:
        record = self.tracer.record
        found = torch.empty(record.sizes[like], dtype=torch.uint8, device=self.tracer.device_type)
        id = self.tracer.id_of(found)
        assert id is not None
        record.labels[id] = record.labels[like]
        return found


class Place:
    def __init__(self, source: int | str | None, tensor: Tensor) -> None:
        self.source, self.dtype, self.device = source, tensor.dtype, tensor.device
        self.sizes, self.strides, self.offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()

    @classmethod
    def of(cls, tensor: Tensor, id: int | None, given: Mapping[int | None, str]) -> "Place":
        return cls(given.get(id, id), tensor)

    def filled(self, storages: Mapping[int, Tensor], inputs: Mapping[str, Any]) -> Tensor:
        if isinstance(self.source, str):
            return inputs[self.source].detach()
        if self.source is None or self.source not in storages:  # on the host
            return torch.empty(self.sizes, dtype=self.dtype, device=self.device)
        return storages[self.source].view(self.dtype).as_strided(self.sizes, self.strides, self.offset)


STEPS, MICRO_BATCHES = 3, 3
HERE = "foretrain.predict.trace.finetune"
LOOPS = {"trainer": f"{HERE}.drive", "trl": f"{HERE}.sft"}


class Tokens(Dataset[dict[str, Tensor]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {}


@dataclass
class Run:
    written: dict[str, Any]  # config.json
    tune: FineTune
    device: torch.device
    tracer: Tracer
    names: Names
    micro_batches: list[int] = field(default_factory=list)
    work: Work = field(default_factory=Work)  # of the second step
    counts: dict[str, Any] = field(default_factory=dict)
    shared: list[Weight] = field(default_factory=list)
    inputs: Inputs | None = None

    def go(self) -> None:
        with tempfile.TemporaryDirectory(prefix="foretrain-") as folder, standins.written_to_host():
            trainer = self.trainer(folder)
            trainer.train()
            if self.tune.merges:
                self.tracer.enter("merge")
                model: Any = trainer.model
                model.merge_and_unload()

    def trainer(self, folder: str) -> Trainer:
        self.tracer.enter("load")
        sharded = self.tune.sharded  # on the host until the Trainer shards it
        model: Any = loaded(self.written, self.tune, torch.device("cpu") if sharded else self.device)
        if self.tune.method != "qlora" and not sharded:
            model.to(self.device)
        self.names.learn(model)
        tag_quantized(self.tracer, model)
        if not sharded:
            self.tracer.enter("prepare")
        found = loop_of(self.tune).trainer(self, model, folder)
        self.names.learn(found.model)
        self.counts = counts_of(found.model)
        for name, p in found.model.named_parameters() if self.tune.world > 1 else ():
            layer = re.search(r"\.(\d+)\.", name)
            self.shared.append((int(layer[1]) if layer else OUTSIDE, tuple(p.shape), p.itemsize, p.requires_grad))
        found.remove_callback(PrinterCallback)
        self.names.before_a_root()  # whatever was imported by now
        return found

    def common(self, folder: str, kind: type[TrainingArguments], **more: Any) -> dict[str, Any]:
        return {
            "args": arguments(self.tune, folder, kind, cpu=self.device.type == "cpu", **more),
            "data_collator": self.batch, "callbacks": [Marks(self)],
            "compute_metrics": (lambda found: {}) if self.tune.keeps_logits else None,
        }  # fmt: skip

    @property
    def samples(self) -> tuple[int, int]:
        """Return the numbers of samples to train on, one step more than is trained, and to evaluate."""
        tune = self.tune
        trained = (tune.grad_accum * STEPS + 1) * tune.batch_size
        return tune.world * trained, tune.world * tune.eval_batches * tune.eval_batch_size

    def batch(self, samples: list[Any]) -> dict[str, Tensor]:
        """Return token ids, a mask and what the trainer takes beside them, or what the model takes in their place. A
        padded batch's mask has zeros, whose value the trace knows.
        """
        tune, shape = self.tune, self.tune.rows(len(samples))
        if self.inputs is not None:
            return self._tagged(self.inputs.batch(self.tracer, shape, padded=tune.padded))
        mask = torch.zeros if tune.padded and not tune.packing else torch.ones
        found = {
            "input_ids": torch.zeros(shape, dtype=torch.int64), "attention_mask": mask(shape, dtype=torch.int64),
        }  # fmt: skip
        if tune.whole:
            found["labels"] = torch.zeros(shape, dtype=torch.int64)
            halves = {name: tensor.chunk(2) for name, tensor in found.items()}
            kinds = enumerate(("chosen", "rejected"))
            found = {f"{kind}_{name}": half[i].clone() for i, kind in kinds for name, half in halves.items()}
        elif tune.references:
            found["completion_mask"] = torch.ones(shape, dtype=torch.int64)
        elif tune.scores and not tune.rewards:
            found["labels"] = torch.zeros((len(samples),), dtype=torch.int64)
        elif not tune.rewards:
            found["labels"] = torch.zeros(shape, dtype=torch.int64)
        names = ("chosen", "rejected")
        if tune.drifts:
            found |= {f"KL_{name}": torch.clone(tensor) for name, tensor in found.items()}
            found["label"], names = torch.ones(len(samples), dtype=torch.bool), ("", "KL")
        if tune.precompute_reference:
            found |= {f"ref_{name}_logps".replace("__", "_"): torch.zeros(len(samples)) for name in names}
        return self._tagged(found)

    def _tagged(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in batch.items():
            self.tracer.tag(tensor, "batch", name)
        return batch


def counts_of(model: Any) -> dict[str, Any]:
    """Count parameters, those in 4 bits as they were before."""
    found = [(getattr(p, "quant_state", None), p) for p in model.parameters()]
    trained = [p for _, p in found if p.requires_grad]
    return {
        "n_params": sum(math.prod(state.shape) if state else p.numel() for state, p in found),
        "n_trained": sum(p.numel() for p in trained),
        "gradient_dtypes": sorted({str(p.dtype)[6:] for p in trained}),
    }


class Marks(TrainerCallback):
    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_begin(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        if self.run.tune.sharded:  # its weights are others now
            self.run.names.parameter_names.clear()
            self.run.names.learn(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.tracer.enter("steady_step" if state.global_step else "first_step")
        self.run.tracer.work = self.run.work if state.global_step == 1 else None
        self.on_substep_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.tracer.work = None

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.micro_batches.append(len(self.run.tracer.record.events))


# A mixin must see the methods that it calls; at run time it has no base.


class Marking(Base):
    """A Trainer that marks when it evaluates and saves, and does each once."""

    run: Run
    _evaluated, _saved = 0, False
    _batch: Batch | None = None
    _outputs: Any = None

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if self._evaluated:
            return {}
        self.run.tracer.enter("evaluate")
        return super().evaluate(*args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict the first two batches and the last as the Trainer does. Those between allocate as the second did."""
        self._evaluated += 1
        if self._batch is not None and self._evaluated < self.run.tune.eval_batches:
            return self._batch.again(inputs)
        start = len(self.run.tracer.record.events)
        found = super().prediction_step(model, inputs, *args, **kwargs)
        if self._evaluated == 2 and start:  # a run on real tensors has no record
            self._batch = Batch(self.run.tracer, start, inputs, found)
        return found

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss; a loop of one's own holds `outputs = model(**batch)` until the next ones."""
        if self.run.tune.loop != "own":
            return super().compute_loss(model, inputs, return_outputs, *args, **kwargs)
        loss, self._outputs = super().compute_loss(model, inputs, True, *args, **kwargs)
        return (loss, self._outputs) if return_outputs else loss

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if not self._saved:
            self._saved = True
            self.run.tracer.enter("save")
            super()._save_checkpoint(*args, **kwargs)


class Marked(Marking, Trainer):
    pass


def trainer(run: Run, model: Any, folder: str) -> Trainer:
    own = run.tune.unsloth_functions(model.config.model_type)
    model = prepared_for_4_bits(model, run.tune)
    if run.tune.adapters:
        model = with_adapters(model, run.tune)
    if own is not None:
        unsloth.put_in(model, own, run.tune)
    train, evaluate = run.samples
    found = Marked(
        model=model, train_dataset=Tokens(train), eval_dataset=Tokens(evaluate), **run.common(folder, TrainingArguments)
    )  # fmt: skip
    found.run = run
    return found


def on_a_card() -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


def loop_of(tune: FineTune) -> Any:
    return importlib.import_module(LOOPS.get(tune.loop, LOOPS["trainer"]))


def arguments(
    tune: FineTune, folder: str, kind: type[TrainingArguments] = TrainingArguments, *, cpu: bool, **more: Any
) -> TrainingArguments:
    return kind(
        output_dir=folder, max_steps=STEPS, eval_steps=2, save_strategy="steps", save_steps=2, report_to=[],
        disable_tqdm=True, use_cpu=cpu, dataloader_num_workers=0, remove_unused_columns=False, label_names=["labels"],
        **({"use_cache": True} if tune.loop == "own" else {}), **trainer_arguments(tune), **more,
    )  # fmt: skip


def liger_asked(tune: FineTune) -> bool:
    return tune.liger and not tune.unsloth


def prepared_for_4_bits(model: PreTrainedModel, tune: FineTune) -> PreTrainedModel:
    """Apply peft's prepare_model_for_kbit_training, where the loop calls it: what is not in 4 bits becomes fp32."""
    peft: Any = importlib.import_module("peft")
    if not widens(tune):
        return model
    own = model.dtype
    convert_passing(model, tune, torch.float32)
    model = peft.prepare_model_for_kbit_training(
        model, use_gradient_checkpointing=tune.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": tune.reentrant},
    )  # fmt: skip
    convert_passing(model, tune, own)
    return model


def convert_passing(model: nn.Module, tune: FineTune, dtype: torch.dtype) -> None:
    """Convert as axolotl does before and after (loaders/model.py, _convert_embedding_modules_dtype)."""
    for name, module in model.named_modules():
        if tune.loop == "axolotl" and any(part in name for part in CONVERTED_BACK) and hasattr(module, "weight"):
            module.to(dtype)


def with_adapters(model: Any, tune: FineTune) -> Any:
    peft: Any = importlib.import_module("peft")
    if tune.gradient_checkpointing and tune.reentrant:
        model.enable_input_require_grads()
    config = adapter_config(tune)
    if model.main_input_name != "input_ids" or not (tune.scores or model.can_generate()):
        config.task_type = None  # which names the inputs of a decoder
        config.modules_to_save = config.modules_to_save or (["classifier"] if tune.scores else None)
    return peft.get_peft_model(model, config)


def adapter_config(tune: FineTune) -> Any:
    peft: Any = importlib.import_module("peft")
    return peft.LoraConfig(**adapter_arguments(tune))


def tag_quantized(tracer: Tracer, model: nn.Module) -> None:
    for name, module in model.named_modules():
        state = getattr(module, "quant_state", None)
        while state is not None:
            for part in ("absmax", "code", "offset"):
                tensor = getattr(state, part, None)
                if isinstance(tensor, Tensor):
                    tracer.tag(tensor, "weights", f"{name}.weight.{part}")
            state = getattr(state, "state2", None)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries, and load weights one after the other: threads do not know fake tensors."""
    logging.disable_progress_bar()
    with warnings.catch_warnings(), mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}):
        warnings.simplefilter("ignore")
        yield


def trace(job: dict[str, Any]) -> Trace:
    """Trace a job ("config", "tune", "gpu", "compiled", "keeps"), of fewer layers if alike. Raises StandInError."""
    tune = FineTune.model_validate(job["tune"])
    with quiet():
        try:
            return (None if tune.compile or tune.world > 1 else trace_few_layers(job, tune)) or trace_whole(job, tune)
        except ImportError as error:
            raise StandInError(" ".join(str(error).split()).rstrip(".")) from error
        except Exception as error:
            text = standins.config_of(job["config"]).get_text_config(decoder=True)
            longest = min((size for name in POSITIONS if (size := getattr(text, name, None))), default=tune.seq_len)
            if tune.seq_len > longest:
                raise StandInError(f"a row has at most {longest} tokens, and --seq-len is {tune.seq_len}") from error
            seen = [each for each in extract_tb(error.__traceback__) if "/peft/" in each.filename]
            if not tune.adapters or all(each.name == "forward" for each in seen):  # which the model's own error passes
                raise
            first = next(iter(str(error).splitlines()), "").rstrip(".")
            raise StandInError(f"peft raised {type(error).__name__}: {first}; --lora-targets names modules") from error


def trace_few_layers(job: dict[str, Any], tune: FineTune) -> Trace | None:
    """Return the trace of all layers from traces of a few; None where they do not repeat."""
    config = standins.config_of(job["config"])
    kind = standins.kind_of(config, job["config"], tune)
    traces: dict[int, Trace] = {}
    for cut, shorter in cuts(kind, config):
        try:
            for count in {shorter, shorter + cut.group} - {*traces}:
                with shortened(kind, cut.lists, count):
                    traces[count] = trace_whole(job, tune)
            found = grown(traces[shorter], traces[shorter + cut.group], cut)
        except Exception:  # its code needs all of its layers; the trace of the whole reports any other error
            return None
        if found is not None:
            return found
    return None


def trace_whole(job: dict[str, Any], tune: FineTune) -> Trace:
    gpu, loop, sharing = Gpu.model_validate(job["gpu"]), loop_of(tune), Sharing(tune.way, tune.world, tune.world)
    place = ranks.placed(sharing, keeps=job["keeps"]) if tune.world > 1 else contextlib.nullcontext()
    inputs = inputs_of(job["config"], tune)
    with place, in_one_sentence() as seen, tracing(gpu, compiled=tune.compile) as session:
        there, tracer = session.there, session.tracer
        assert there is not None
        seen.append(tracer)
        tracer.entered = there.memory.reset_peak
        run = Run(job["config"], tune, torch.device("cuda"), tracer, session.names, inputs=inputs)
        kernels = stood_in() if liger_asked(tune) else contextlib.nullcontext()
        with standins.stood_in(tracer, card=True), loop.on_a_card(), kernels, unsloth.stood_in(tune):
            run.go()
    record = tracer.record.finish(weight_shapes=frozenset(session.names.weight_shapes))
    record.allocations = [_categorized(record, a, job["config"], tune) for a in record.allocations]
    record.facts = {
        "torch": torch.__version__, "gpu": gpu.name, "attention": sorted(there.attention.seen),
        "matmul_dtypes": dict(tracer.matmul_dtypes), "paged_bytes": tracer.paged_bytes,
        "micro_batches": run.micro_batches, "work": run.work.rows(), "counts": run.counts,
        "shared": run.shared, "notes": sorted({*there.notes, *tracer.values.notes(), *tracer.ranges}),
        **session.marks.facts(), **(inputs.facts() if inputs else {}),
    }  # fmt: skip
    return record


def _categorized(record: Trace, a: Allocation, written: dict[str, Any], tune: FineTune) -> Allocation:
    """Return an allocation with the category of adapters and logits, and of temporaries outside of steps."""
    if a.category == "weights" and "lora_" in a.name:
        return a._replace(category="adapters")
    if a.category not in ("activations", "temporaries", "weight_copies"):
        return a
    phase = record.phase_at(a.allocated_at)
    if tune.world > 1 and len(a.shape) == 1 and a.op in ("empty", "resize_") and phase not in ("load", "merge"):
        # FSDP2 gathers weights into flat buffers of another stream, and sends gradients in a backward pass
        is_sent = a.category == "temporaries" and a.op == "empty" and not a.stream
        return a._replace(category="buckets" if not tune.sharded else "exchanged" if is_sent else "gathered")
    if phase in ("load", "prepare", "save", "merge"):
        return a._replace(category="temporaries")
    text = written.get("text_config")
    vocabulary = int((text if isinstance(text, dict) else written).get("vocab_size") or 0)
    wide = len(a.shape) > 1 and a.shape[-1] == vocabulary and math.prod(a.shape[:-1]) % tune.seq_len == 0
    return a._replace(category="logits") if wide else a
