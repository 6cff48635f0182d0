"""A fine-tuning run in PyTorch's CUDA build on the fake card: a job on standard input, and its answer in a file.

    {"config", "tune", "small", "moved", "out"}

A run is a script as people write one: from_pretrained over a file of weights, peft's adapters, and the Trainer of
transformers with its own collator, evaluation and saving. Nothing of foretrain's traced run is used, so what that does
otherwise shows. Each run is also done at a small size on the CPU: the host must have taken the same branches there.
"""

import contextlib
import json
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    masking_utils,
    set_seed,
)
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from foretrain.config.finetune.options import FineTune
from foretrain.predict.trace.finetune.standins import written_to_host
from tests.cuda_build.branches import Branches
from tests.cuda_build.branches import differences as branch_differences
from tests.cuda_build.measure import MOST_ENTRIES, Still, Watch, history, write

WRITTEN_PARAMETERS = 10**8  # a model with more is not written to disk: what is saved goes to the host and is dropped
SHORT = {"seq_len": 16, "eval_batches": 2}


class Tokens(Dataset[dict[str, Tensor]]):
    """Sequences of random tokens, all of one length; with `padding`, as many of them at the end are masked."""

    def __init__(self, count: int, length: int, vocabulary: int, padding: int) -> None:
        self.ids, self.padding = torch.randint(vocabulary, (count, length)), padding

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index]
        mask, labels = torch.ones_like(ids), ids.clone()
        if self.padding:
            mask[-self.padding :], labels[-self.padding :] = 0, -100
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Phases(TrainerCallback):
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.enter("steady_step" if state.global_step else "first_step")


def checkpoint(written: dict[str, Any], dtype: torch.dtype, folder: Path, *, random: bool) -> int:
    """Write config.json and a file of weights, `random` or all 0, which take no disk; how many parameters there are."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(written))
    values = {key: value for key, value in written.items() if key != "model_type"}
    config = AutoConfig.for_model(written["model_type"], **values)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
    name = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in model.state_dict().items():
        if key not in model.all_tied_weights_keys:
            start, end = end, end + tensor.numel() * dtype.itemsize
            header[key] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
        if random:  # a weight of 0 has no direction, which DoRA divides by
            data = torch.randn(end // dtype.itemsize).mul_(0.02).to(dtype)
            file.seek(8 + len(text))
            file.write(data.view(torch.uint8).numpy().tobytes())
    return sum(parameter.numel() for parameter in model.parameters())


def run(written: dict[str, Any], tune: FineTune, device: str, watch: Watch, folder: Path, *, moved: bool) -> None:
    """The script. `moved`: it brings the model to the card itself; else the Trainer does."""
    set_seed(0)
    published = getattr(torch, "float32" if tune.dtype == "auto" else tune.dtype)
    large = checkpoint(written, published, folder / "model", random=device == "cpu") > WRITTEN_PARAMETERS
    watch.enter("load")
    quantized: dict[str, Any] = {}
    if tune.method == "qlora":
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=tune.double_quant,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
        quantized = {"quantization_config": config, "device_map": {"": device}}
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=published, attn_implementation=tune.attn, **quantized
    )
    if moved and not quantized:
        model.to(device)
    watch.enter("prepare")
    trainer = made(model, tune, device, folder, watch)
    del model
    with written_to_host() if large else contextlib.nullcontext():
        trainer.train()
    if tune.merges:
        watch.enter("merge")
        trained: Any = trainer.model
        trained.merge_and_unload()


def made(model: Any, tune: FineTune, device: str, folder: Path, watch: Watch) -> Trainer:
    kwargs = {"use_reentrant": tune.reentrant}
    lora = peft.LoraConfig(
        r=tune.lora_r, lora_alpha=16, lora_dropout=tune.lora_dropout, task_type="CAUSAL_LM",
        target_modules="all-linear", use_dora=tune.method == "dora",
    )  # fmt: skip
    options: dict[str, Any] = {
        "output_dir": str(folder / "out"), "max_steps": 3, "per_device_train_batch_size": tune.batch_size,
        "per_device_eval_batch_size": tune.eval_batch_size, "gradient_accumulation_steps": tune.grad_accum,
        "gradient_checkpointing": tune.gradient_checkpointing, "gradient_checkpointing_kwargs": kwargs,
        "optim": tune.optim, "bf16": tune.amp == "bf16", "fp16": tune.amp == "fp16",
        "max_grad_norm": tune.max_grad_norm, "eval_strategy": "steps" if tune.evaluate else "no", "eval_steps": 2,
        "save_strategy": "steps", "save_steps": 2, "report_to": [], "disable_tqdm": True, "use_cpu": device == "cpu",
        "logging_steps": 1,
    }  # fmt: skip
    vocabulary = model.get_input_embeddings().weight.shape[0]
    train, evaluate = (
        Tokens(count, tune.seq_len, vocabulary, tune.seq_len // 4 if tune.padded else 0)
        for count in (3 * tune.grad_accum * tune.batch_size, tune.eval_batches * tune.eval_batch_size)
    )
    if tune.method == "qlora":
        model = peft.prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=tune.gradient_checkpointing, gradient_checkpointing_kwargs=kwargs
        )
    trainer = Trainer(
        model=peft.get_peft_model(model, lora) if tune.adapters else model, args=TrainingArguments(**options),
        train_dataset=train, eval_dataset=evaluate, compute_metrics=(lambda found: {}) if tune.keeps_logits else None,
    )  # fmt: skip
    trainer.add_callback(Phases(watch))
    trainer.remove_callback(PrinterCallback)
    for phase, name in (("evaluate", "evaluate"), ("save", "_save_checkpoint")):
        setattr(trainer, name, _entering(watch, phase, getattr(trainer, name)))
    return trainer


def _entering(watch: Watch, phase: str, method: Any) -> Any:
    def entered(*args: Any, **kwargs: Any) -> Any:
        watch.enter(phase)
        return method(*args, **kwargs)

    return entered


@contextlib.contextmanager
def _masks_told(*, full: bool) -> Iterator[None]:
    """Within it transformers hears of a mask whether it is full, once it has asked for the memory to find out: no kernel
    adds it up. On the CPU the same question is answered."""
    original = masking_utils.fast_all
    masking_utils.fast_all = lambda mask: original(mask).fill_(full)
    try:
        yield
    finally:
        masking_utils.fast_all = original


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """A run on the card, and then a small one on the CPU. Raises what it raises."""
    tune = FineTune.model_validate(job["tune"])
    watch = Watch()
    torch.cuda.memory._record_memory_history(context=None, max_entries=MOST_ENTRIES)
    with tempfile.TemporaryDirectory() as folder, _masks_told(full=not tune.padded), Branches() as card:
        run(job["config"], tune, "cuda", watch, Path(folder), moved=job["moved"])
    watch.close()
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    _forget_accelerate()
    branches: list[str] = []
    if tune.method != "qlora":
        short = tune.model_copy(update=SHORT)
        with tempfile.TemporaryDirectory() as folder, Branches() as real:
            run(job["small"], short, "cpu", Still(), Path(folder), moved=True)
        branches = branch_differences(card.record(), real.record())
    return {"phases": watch.phases, "marks": watch.marks, **history(entries), "branches": branches}


def _forget_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    job, started = json.load(sys.stdin), time.monotonic()
    try:
        found = measure(job)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    write(Path(job["out"]), {**found, "seconds": round(time.monotonic() - started, 1)})


if __name__ == "__main__":
    main()
