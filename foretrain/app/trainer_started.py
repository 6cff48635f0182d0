"""The beginning of a Trainer's run: its record, and the folder that it is written to."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from foretrain.base.redaction import redacted
from foretrain.config.finetune.live import LEARNING
from foretrain.hardware.cpu import cpu_device
from foretrain.monitoring import trainer_record
from foretrain.monitoring.trainer_record import Setting, TrainerRunRecord
from foretrain.training.store import RunDirectory, base_path, create, now

FOLDER = "foretrain"  # in the Trainer's output_dir
PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes")


def run_directory(folder: str, arguments: Any, *, resumed: bool) -> RunDirectory:
    """The run's directory, its lock held: the newest one where a run goes on, else a new one; nothing is written over.

    Raises UserError where there can be none.
    """
    base = folder or str(Path(arguments.output_dir) / FOLDER)
    if resumed:
        for path in sorted(_numbered(base_path(base)), key=_number, reverse=True):
            directory = RunDirectory(path)
            directory.acquire()
            return directory
    return create(base)


def _numbered(base: Path) -> list[Path]:
    """The run directories under this name and name-2, name-3, …"""
    return [path for path in (base, *base.parent.glob(f"{base.name}-*")) if trainer_record.is_one(path)]


def _number(path: Path) -> int:
    end = path.name.rpartition("-")[2]
    return int(end) if end.isascii() and end.isdigit() else 1


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.mps.get_name() if device.type == "mps" else cpu_device().name


def new_record(trainer: Any, arguments: Any, state: Any, model: Any, device: torch.device) -> TrainerRunRecord:
    """What is known of the run before its first step."""
    name = str(getattr(arguments, "run_name", None) or Path(arguments.output_dir).resolve().name)
    name = Path(name).name or "run"
    parameters = list(model.parameters())
    written = arguments.to_dict()
    settings = {key: _plain(written[key]) for key in LEARNING if written.get(key) is not None}
    return TrainerRunRecord(
        id=name, name=redacted([name])[0], status="running", started_at=now(),
        trainer=type(trainer).__name__ if trainer is not None else "Trainer", versions=dict(_versions()),
        device=_name_of(device), kind=device.type,
        cards=max(1, int(getattr(arguments, "world_size", 1) or 1), int(getattr(arguments, "n_gpu", 1) or 1)),
        settings=settings, n_params=sum(p.numel() for p in parameters),
        n_trained=sum(p.numel() for p in parameters if p.requires_grad),
        max_steps=int(state.max_steps or 0) or None, steps_done=int(state.global_step or 0),
    )  # fmt: skip


def _plain(value: Any) -> Setting:
    return value if isinstance(value, bool | int | float | str) else str(value)


def _versions() -> Mapping[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
