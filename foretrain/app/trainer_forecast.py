"""The forecast of a Trainer that is about to train, on the device that it trains on."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foretrain.app.exact import traced
from foretrain.base.bugs import redacted
from foretrain.base.errors import UserError
from foretrain.base.installation import installed
from foretrain.base.records import Note
from foretrain.base.units import GIB
from foretrain.config.finetune import live
from foretrain.config.finetune.live import LEARNING, WHERE, LiveRun, read_live
from foretrain.config.finetune.options import FineTune
from foretrain.hardware import devices
from foretrain.hardware.catalogue import Gpu, match
from foretrain.hardware.cpu import cpu_device
from foretrain.hardware.devices import Context
from foretrain.predict.finetune.plan import FineTunePlan, plan
from foretrain.predict.finetune.traced import unknown
from foretrain.predict.finetuning import of_plan
from foretrain.runs.folder import RunDirectory, base_path, create, now
from foretrain.runs.record import Setting, TrainerRun, source_of

TILED_LOSS = "trl.kernels.chunked_logprob"  # an older TRL has whole logits, as the Trainer
NEAR = 0.01  # of a count of parameters: farther off it is another model than the forecast's


def device_of(device: torch.device) -> tuple[Gpu, int]:
    """Return (the device, bytes that other programs hold there). Raises UserError for an unknown card."""
    if device.type == "cpu":
        return devices.device_named("cpu"), 0
    if device.type != "cuda":
        raise UserError("usage.finetune_needs_cuda", gpu=device.type)
    free, total = torch.cuda.mem_get_info(device)
    seen = torch.cuda.get_device_properties(device)
    gpu = match(seen.name, total / GIB, seen.multi_processor_count)
    ours = torch.cuda.memory_reserved(device) + Context.of(gpu).expected_bytes
    return gpu, max(0, total - free - ours)


def live_run(
    trainer: Any, model: Any, arguments: Any, state: Any, *, seq_len: int, padded: bool, batch_size: int = 0
) -> LiveRun:
    """Read the run from the Trainer's objects; `trainer` may be None."""
    base = live.base_of(model)
    four_bit = live.four_bit_of(base)
    kinds = [kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")]
    return LiveRun(
        model_class=type(base).__name__, config=live.config_of(base), arguments=arguments.to_dict(),
        dtype=live.dtype_of(base, four_bit),
        attention=live.attention_of(base), seq_len=seq_len, padded=padded,
        packing=joins_rows(trainer) if kinds else bool(getattr(arguments, "packing", False)),
        max_steps=int(state.max_steps or 0),
        batch_size=batch_size or int(arguments.per_device_train_batch_size),
        eval_batches=_eval_batches(trainer, arguments),
        keeps_logits=bool(getattr(trainer, "compute_metrics", None)) and not arguments.prediction_loss_only,
        checkpointing=live.checkpoints(base), unsloth=live.by_unsloth(model),
        offloads=live.offloads(model), adapter=live.adapter_of(model), four_bit=four_bit,
        loop="trl" if kinds and TILED_LOSS in sys.modules else "trainer",
        trl_trainer=next((kind for kind in kinds if kind in live.PLANNED), next(iter(kinds), "")),
        reference=getattr(trainer, "ref_model", None) is not None,
    )  # fmt: skip


def joins_rows(trainer: Any) -> bool:
    """Return whether a batch is one row of all sequences, as TRL's without padding is."""
    return bool(getattr(trainer, "padding_free", False))


def _eval_batches(trainer: Any, arguments: Any) -> int:
    data = getattr(trainer, "eval_dataset", None)
    if data is None or isinstance(data, Mapping) or not hasattr(data, "__len__"):
        return 0
    return max(1, -(-len(data) // int(arguments.per_device_eval_batch_size)))


def forecast(run: LiveRun, device: torch.device, n_params: int, n_trained: int, *, exact: bool) -> FineTunePlan:
    """Forecast a run. `n_params`, `n_trained`: to compare with the forecast's. Raises UserError."""
    source, tune, unplanned = read_live(run)
    gpu, others_bytes = device_of(device)
    if source.facts is None and not exact:  # nobody asked to wait for a trace before the training
        raise unknown(source, "give ForetrainCallback(exact=True)")
    made = plan(source, tune, gpu, used_by_others_bytes=others_bytes, unplanned=unplanned)
    for counted, ours in ((n_params, made.counts.n_params), (n_trained, made.counts.n_trained)):
        if counted and abs(ours / counted - 1) > NEAR:
            raise UserError("usage.callback_other_model", model=source.name, counted=counted, expected=ours)
    if unplanned:
        note = Note(id="finetune_unplanned", values={"where": WHERE, "keys": list(unplanned)})
        made = made.model_copy(update={"notes": (*made.notes, note)})
    if exact and gpu.kind == "cuda":
        try:
            found = traced(of_plan(made, source), lambda state: None).plan
            assert isinstance(found, FineTunePlan)
            made = found
        except UserError as error:  # the estimate stands
            note = Note(id="callback_not_traced", values={"reason": str(error)})
            made = made.model_copy(update={"notes": (*made.notes, note)})
    return made


def settings_of(tune: FineTune) -> dict[str, Setting]:
    found: dict[str, Setting] = tune.model_dump(exclude={"dataset_tokens", "max_steps", "epochs"})
    return {key: value for key, value in found.items() if tune.adapters or not key.startswith("lora_")}


FOLDER = "foretrain"  # in the Trainer's output_dir
PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes")


def run_directory(folder: str, arguments: Any, *, resumed: bool) -> RunDirectory:
    """Return the run's directory with its lock: the newest where a run goes on, else a new one. Raises UserError."""
    base = folder or str(Path(arguments.output_dir) / FOLDER)
    if resumed:
        for path in sorted(_numbered(base_path(base)), key=_number, reverse=True):
            directory = RunDirectory(path)
            directory.acquire()
            return directory
    return create(base)


def _numbered(base: Path) -> list[Path]:
    return [path for path in (base, *base.parent.glob(f"{base.name}-*")) if source_of(path) == "trainer"]


def _number(path: Path) -> int:
    end = path.name.rpartition("-")[2]
    return int(end) if end.isascii() and end.isdigit() else 1


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.mps.get_name() if device.type == "mps" else cpu_device().name


def new_record(trainer: Any, arguments: Any, state: Any, model: Any, device: torch.device) -> TrainerRun:
    name = str(getattr(arguments, "run_name", None) or Path(arguments.output_dir).resolve().name)
    name = Path(name).name or "run"
    parameters = list(model.parameters())
    written = arguments.to_dict()
    settings = {key: _plain(written[key]) for key in LEARNING if written.get(key) is not None}
    versions = {package: version for package in PACKAGES if (version := installed(package))}
    return TrainerRun(
        id=name, name=redacted([name])[0], status="running", started_at=now(),
        trainer=type(trainer).__name__ if trainer is not None else "Trainer", versions=versions,
        device=_name_of(device), kind=device.type,
        cards=max(1, int(getattr(arguments, "world_size", 1) or 1), int(getattr(arguments, "n_gpu", 1) or 1)),
        settings=settings, n_params=sum(p.numel() for p in parameters),
        n_trained=sum(p.numel() for p in parameters if p.requires_grad),
        max_steps=int(state.max_steps or 0) or None, steps_done=int(state.global_step or 0),
    )  # fmt: skip


def _plain(value: Any) -> Setting:
    return value if isinstance(value, bool | int | float | str) else str(value)
