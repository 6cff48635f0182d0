"""The prediction of a case, by trace or plan.

A program of another project is traced in a forked child, so that it does not affect the next.
"""

import importlib
import json
from pathlib import Path
from typing import Any

from benchmarks.accuracy import checkouts, table
from foretrain.predict.spec import StepSpec


def traced(case: table.Case, folders: list[Path]) -> dict[str, Any]:
    """Return the program's own readings, and the allocator's for each phase. Bytes."""
    import foretrain

    program = importlib.import_module(f"benchmarks.accuracy.programs.{case.program}")
    readings: dict[str, int] = {}
    settings = dict(case.settings)
    compiled, pads = settings.pop("traced_compiled", False), settings.pop("traced_pads", False)

    def code(on: Any) -> None:
        readings.update(program.run(on, settings, folders))

    found = foretrain.trace(code, gpu=case.gpu, compile=compiled, pads=pads, in_process=True)
    predicted: dict[str, Any] = {name: value for name, value in readings.items() if value is not None}
    predicted |= by_phase(found.trace)
    for figure in case.figures:
        if figure.kind == "out of memory":
            limit = float(figure.reads.removeprefix("fits ")) * 2**30
            predicted[figure.reads] = found.fits(int(limit))
    predicted["notes"] = list(found.notes)
    predicted["events"] = len(found.trace.events)
    return without_places(predicted, folders)


def without_places(predicted: dict[str, Any], folders: list[Path]) -> dict[str, Any]:
    """Name files from their checkout on: its place is not part of the result."""
    text = json.dumps(predicted)
    for folder in folders:
        text = text.replace(f"{folder.parent}/", "")
    return json.loads(text)


def by_phase(record: Any) -> dict[str, int]:
    """Return peaks of each phase as requested and as allocated, what is allocated where it begins, and the peaks of
    all.
    """
    from foretrain.predict.allocator.replay import replay

    sizes = [allocation.nbytes for allocation in record.allocations]
    requested: dict[str, int] = {}
    rest: dict[str, int] = {}
    starts: dict[int, list[str]] = {}  # several phases may begin at one event, all but one of them empty
    now = 0
    for phase, start, end in record.spans():
        starts.setdefault(start, []).append(phase)
        requested[phase] = max(requested.get(phase, 0), now)
        for event in record.events[start:end]:
            now += sizes[event] if event >= 0 else -sizes[~event]
            requested[phase] = max(requested[phase], now)

    def watch(position: int, allocator: Any, block: Any) -> None:
        for phase in starts.get(position + 1, ()):
            rest.setdefault(phase, allocator.allocated_bytes)

    played = replay(record, physical=True, watch=watch)
    predicted = {"allocated": played.peak_allocated_bytes, "reserved": played.peak_reserved_bytes}
    for phase in played.phases:
        predicted[f"allocated/{phase.phase}"] = phase.allocated_bytes
        predicted[f"requested/{phase.phase}"] = requested[phase.phase]
        if phase.phase in rest:
            predicted[f"at rest/{phase.phase}"] = rest[phase.phase]
    return predicted


def planned(case: table.Case) -> dict[str, Any]:
    """Return `foretrain plan`'s answer for nanoGPT-like rows: seconds per step, and whether the card holds it."""
    from foretrain.config.resolve import resolve
    from foretrain.hardware.catalogue import find
    from foretrain.predict.memory import predict
    from foretrain.predict.software import parse
    from foretrain.predict.speed.time import step_time

    settings = dict(case.settings)
    trainer, dtype, compiled = settings.pop("trainer"), settings.pop("dtype"), settings.pop("compiled")
    if torch := parse(case.torch):
        settings["torch_version"] = torch
    config = resolve([f"--{name}={value}" for name, value in settings.items()]).config
    gpu = find(case.gpu)
    time = step_time(StepSpec.of(config, gpu, trainer, dtype=dtype, compiled=compiled))
    predicted: dict[str, Any] = {"tokens": config.tokens_per_step}
    if time is not None:
        predicted["step"] = {"low": time.low_s, "expected": time.expected_s, "high": time.high_s}
        predicted["speed"] = {
            "low": config.tokens_per_step / time.high_s,
            "expected": config.tokens_per_step / time.expected_s,
            "high": config.tokens_per_step / time.low_s,
        }
    if any(figure.kind == "out of memory" for figure in case.figures):
        memory = predict(StepSpec.of(config, gpu, trainer, dtype=dtype, compiled=compiled))
        predicted["allocated"] = memory.worst.allocated_bytes
        for figure in case.figures:
            if figure.kind == "out of memory":
                predicted[figure.reads] = (
                    memory.worst.allocated_bytes <= float(figure.reads.removeprefix("fits ")) * 2**30
                )
    return predicted


def prediction_of(case: table.Case, folder: Path | None) -> dict[str, Any]:
    from foretrain.predict.trace.forked import CAN_FORK, in_child

    try:
        folders = [checkouts.find(repository, folder) for repository in case.checkouts]
        if case.program == "plan":
            return {"said": planned(case)}
        alone = CAN_FORK and bool(folders)
        return {"said": in_child(lambda: traced(case, folders)) if alone else traced(case, folders)}
    except checkouts.Missing as missing:
        return {"why": str(missing)}
    except Exception as error:
        return {"why": f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}
