"""The runs to try: small to as large as the card carries, every way of training that moves memory. No torch."""

import contextlib
import datetime
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain.base.errors import UserError
from foretrain.base.files import not_written, replace_text
from foretrain.base.installation import installed, installed_torch
from foretrain.base.processes import Child, ProcessExit
from foretrain.hardware.card import Cards
from foretrain.hardware.catalogue import Gpu, detect
from foretrain.hardware.cpu import available_memory_bytes, cpu_device
from foretrain.hardware.devices import Context
from foretrain.measure.verify_record import (
    Case,
    Machine,
    Measured,
    Outcome,
    Phase,
    Predicted,
    Reason,
    Verification,
    Versions,
    read,
)
from foretrain.predict.allocator.replay import replay
from foretrain.predict.memory import RunMemory, estimated
from foretrain.predict.plan import timing
from foretrain.predict.trace import service
from foretrain.predict.trace.forecast import requests_for
from foretrain.predict.trace.service import Request, TraceUnavailable, code_digest

ROOM = 0.9  # of the free memory: a case is shrunk until it is expected to need no more
MOST_SEQUENCES = 512  # of a micro-batch, where the largest one that fits is looked for

_CHARACTERS = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 64, "vocab_size": 65}
_30M = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 512, "batch_size": 8, "gradient_accumulation_steps": 4}
_124M = {"n_layer": 12, "n_head": 12, "n_embd": 768, "batch_size": 4, "gradient_accumulation_steps": 5}
_350M = {"n_layer": 24, "n_head": 16, "n_embd": 1024, "batch_size": 1}
_ONE = {"gradient_accumulation_steps": 1}
_SAVING = {"activation_checkpointing": True, "loss_chunk_size": 2048}


def _case(name: str, options: dict[str, Any], dtype: str, step: str = "foretrain", *, compiled: bool = False) -> Case:
    # RunConfig's default accumulates 40 times.
    return Case(name=name, options={**_ONE, **options}, dtype=dtype, step=step, compiled=compiled)  # type: ignore[arg-type]


# On a card, small ones first. Vocabularies that are not divisible by 8 are eager or in fp32: a measurement on the card
# decides how a compiled step pads them otherwise, and a plan gives a range.
ON_A_CARD = (
    _case("characters", _CHARACTERS, "bfloat16"),
    _case("characters dropout", {**_CHARACTERS, "dropout": 0.2}, "float16", "nanogpt"),
    _case("characters", _CHARACTERS, "float32", compiled=True),
    _case("30M", _30M, "float32"),
    _case("30M", _30M, "float16"),
    _case("30M", _30M, "float16", "nanogpt"),
    _case("30M", _30M, "float16", "nanogpt", compiled=True),
    _case("30M vocabulary 50257", {**_30M, "vocab_size": 50257}, "bfloat16", "nanogpt"),
    _case("30M own evaluation", {**_30M, "eval_batch_size": 16}, "bfloat16"),
    _case("30M evaluation only", {**_30M, "eval_only": True}, "bfloat16"),
    _case("124M", _124M, "bfloat16"),
    _case("124M", _124M, "bfloat16", "nanogpt"),
    _case("124M", _124M, "bfloat16", compiled=True),
    _case("124M", _124M, "bfloat16", "nanogpt", compiled=True),
    _case("124M no accumulation", {**_124M, **_ONE}, "float16", "nanogpt"),
    _case("124M dropout and bias", {**_124M, "dropout": 0.1, "bias": True}, "bfloat16"),
    _case("124M chunked loss", {**_124M, "batch_size": 8, "loss_chunk_size": 2048}, "bfloat16"),
    _case("124M checkpointing", {**_124M, "batch_size": 8, "activation_checkpointing": True}, "bfloat16"),
    _case("124M checkpointing", {**_124M, "activation_checkpointing": True}, "bfloat16", compiled=True),
    _case("124M adamw8bit", {**_124M, "optimizer": "adamw8bit"}, "bfloat16"),
    _case("124M modern, Muon", {**_124M, "recipe": "modern", "optimizer": "muon"}, "bfloat16"),
)
# Their micro-batch is the largest that is expected to fit.
FILLING = (
    _case("124M largest micro-batch", {**_124M, **_ONE}, "bfloat16"),
    _case("124M largest micro-batch", {**_124M, **_ONE}, "bfloat16", "nanogpt", compiled=True),
    _case("350M largest micro-batch", {**_350M, **_SAVING}, "bfloat16"),
)

_SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 256, "batch_size": 8, "vocab_size": 4096}
# On a CPU: eager, and done in a minute or two. There is no trace of a CPU's memory, only the estimate.
ON_A_CPU = (
    _case("small", _SMALL, "float32"),
    _case("small", _SMALL, "float32", "nanogpt"),
    _case("small accumulation", {**_SMALL, "batch_size": 4, "gradient_accumulation_steps": 4}, "float32"),
    _case("small dropout and bias", {**_SMALL, "dropout": 0.1, "bias": True}, "float32"),
    _case("small checkpointing", {**_SMALL, "activation_checkpointing": True}, "float32"),
    _case("small chunked loss", {**_SMALL, "vocab_size": 50304, "loss_chunk_size": 512}, "float32"),
    _case("small adamw8bit", {**_SMALL, "optimizer": "adamw8bit"}, "float32"),
    _case("30M", {**_30M, "batch_size": 2, **_ONE}, "float32"),
)


def cases_for(gpu: Gpu, free_bytes: int | None) -> tuple[Case, ...]:
    """Return the cases of a device with so much free memory; a micro-batch is halved until it should fit."""
    if gpu.kind == "cpu":
        return tuple(_fitting(case, gpu, free_bytes) for case in ON_A_CPU)
    return tuple(
        make(_in_a_dtype_of(gpu, case), gpu, free_bytes)
        for cases, make in ((ON_A_CARD, _fitting), (FILLING, _filling))
        for case in cases
    )


def is_ours(case: Case, gpu: Gpu) -> bool:
    """Return whether this version has the case, whatever its micro-batch: results may come from anywhere."""

    def without_batch(each: Case) -> Case:
        kept = {name: value for name, value in each.options.items() if name not in ("batch_size", "eval_batch_size")}
        return each.model_copy(update={"options": kept})

    own = ON_A_CPU if gpu.kind == "cpu" else (*ON_A_CARD, *FILLING)
    return without_batch(case) in [without_batch(_in_a_dtype_of(gpu, each)) for each in own]


def needed_bytes(case: Case, gpu: Gpu) -> int:
    return estimated(case.spec(gpu)).memory.needed_bytes


def _in_a_dtype_of(gpu: Gpu, case: Case) -> Case:
    return case if gpu.supports_bf16 or case.dtype != "bfloat16" else case.model_copy(update={"dtype": "float16"})


def _batch(case: Case) -> int:
    return case.config.batch_size


def with_batch(case: Case, size: int) -> Case:
    options = {**case.options, "batch_size": size}
    if own := case.config.eval_batch_size:
        options["eval_batch_size"] = max(1, own * size // _batch(case))
    return case.model_copy(update={"options": options})


def _room(gpu: Gpu, free_bytes: int | None) -> Callable[[Case], bool]:
    return lambda case: free_bytes is None or needed_bytes(case, gpu) <= ROOM * free_bytes


def _fitting(case: Case, gpu: Gpu, free_bytes: int | None) -> Case:
    fits = _room(gpu, free_bytes)
    while not fits(case) and _batch(case) > 1:
        case = with_batch(case, _batch(case) // 2)
    return case


def _filling(case: Case, gpu: Gpu, free_bytes: int | None) -> Case:
    fits = _room(gpu, free_bytes)
    low, high = 1, 2
    if free_bytes is None:
        return case
    while high <= MOST_SEQUENCES and fits(with_batch(case, high)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(with_batch(case, middle)) else (low, middle)
    return with_batch(case, low)


Peaks = dict[str, tuple[int, int | None]]  # phase -> allocated and reserved bytes


def requests(case: Case, gpu: Gpu) -> list[Request]:
    if gpu.kind != "cuda":
        return []
    return requests_for(case.spec(gpu))


def trace_all(cases: Sequence[Case], gpu: Gpu, listen: Callable[[str], None]) -> None:
    with contextlib.suppress(TraceUnavailable):
        service.traces([request for case in cases for request in requests(case, gpu)], listen)


def predict(case: Case, gpu: Gpu) -> tuple[Predicted, Peaks]:
    """Return (figures, peaks by phase): traced where a trace can be made, else estimated."""
    spec = case.spec(gpu)
    memory = estimated(spec).memory
    peaks, source = _traced(case, gpu), "traced"
    if peaks is None:
        peaks, source = _estimated(memory), "estimated"
    cuda = gpu.kind == "cuda"
    reserved = max((size for _, size in peaks.values() if size is not None), default=None)
    context = memory.context
    need, low, high = _process(memory, context, reserved if cuda else None)
    found = timing(spec)
    step = None if found is None or spec.config.eval_only else found.step_s
    return Predicted(
        source=source,
        allocated_bytes=max(size for size, _ in peaks.values()) if cuda else None,
        reserved_bytes=reserved if cuda else None,
        process_bytes=need, process_low_bytes=low, process_high_bytes=high,
        estimate_allocated_bytes=max(size for size, _ in _estimated(memory).values()) if cuda else None,
        step_s=step and step.expected_s, step_low_s=step and step.low_s, step_high_s=step and step.high_s,
    ), peaks  # fmt: skip


def _process(memory: RunMemory, context: Context, reserved: int | None) -> tuple[int, int, int]:
    if reserved is not None:
        return tuple(reserved + size for size in (context.expected_bytes, context.low_bytes, context.high_bytes))  # type: ignore[return-value]
    most = max((p for p in memory.phases if p.phase != "resume"), key=lambda p: p.needed_expected_bytes)
    return most.needed_expected_bytes, most.needed_low_bytes, most.needed_high_bytes


def _traced(case: Case, gpu: Gpu) -> Peaks | None:
    """Return of two traces, which pad a vocabulary differently, the one with more reserved, as in a plan."""
    try:
        found = [replay(trace) for trace in service.traces(requests(case, gpu))]
    except TraceUnavailable:
        return None
    if not found:
        return None
    worst = max(found, key=lambda run: run.peak_reserved_bytes)
    return {phase.phase: (phase.allocated_bytes, phase.reserved_bytes) for phase in worst.phases}


def _estimated(memory: RunMemory) -> Peaks:
    return {p.phase: (p.allocated_bytes, p.reserved_bytes) for p in memory.phases if p.phase != "resume"}


def without_calibration(gpu: Gpu) -> Gpu:
    """Return the card as the catalogue has it: a contribution tests that."""
    return gpu.model_copy(update={"calibration": None})


DEVICE_S = 120.0  # in which torch must have named the card
EAGER_S, COMPILED_S = 240.0, 900.0  # after which a case is ended
SETTLE_S = 5.0  # for a card to free the last process's memory and its utilisation to fall
BUSY = 0.2  # share of the card's last moments, or of a CPU's time, by others: beyond it a time tells little
# A case's usual time, its trace included: guesses until a card has shown it, only for "about … minutes".
USUAL_EAGER_S, USUAL_COMPILED_S = 15.0, 60.0
Listener = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Target:
    """The device: for plans, by torch's name, and in NVML. `index`: NVML's."""

    gpu: Gpu
    device: str
    machine: Machine
    versions: Versions
    index: int | None = 0
    no_compile: str = ""
    cards: Cards | None = None

    def now(self) -> tuple[int | None, int, bool]:
        if self.gpu.kind == "cpu":
            return available_memory_bytes(), 0, False
        sample = self.cards.one(self.index, []) if self.cards else None
        if sample is None or sample.used_bytes is None or self.machine.memory_bytes is None:
            return None, 0, False
        used = sample.used_bytes
        return max(0, self.machine.memory_bytes - used), used, (sample.busy or 0.0) > BUSY


# A run has the default allocator; these change what is measured, and a trace does not know them.
_NOT_PASSED_ON = (
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_LAUNCH_BLOCKING",
    "TORCH_COMPILE_DISABLE",
)  # fmt: skip


class Timeout(Exception):
    pass


class Ended(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def ask(job: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Return the answer of measure/verify_step.py to a job, within seconds. Raises Timeout, Ended."""
    with tempfile.TemporaryDirectory(prefix="foretrain-verify-") as folder:
        child = Child("foretrain.measure.verify_step", without=_NOT_PASSED_ON, cwd=folder)
        try:
            child.send(job)
            found = child.receive(limit_s)
        finally:
            child.end()
    if found is None:
        raise Timeout
    if isinstance(found, ProcessExit):
        raise Ended(found.code)
    return found.value


def target(device: str) -> Target:
    """Find the device of this machine. Raises UserError 'environment.verify_…' where none can be used."""
    try:
        seen = ask({"what": "device", "device": device}, DEVICE_S)
    except (Timeout, Ended):
        raise UserError("environment.verify_torch", torch=installed_torch()) from None
    system = f"{platform.system()} {platform.machine()}"
    versions = Versions(
        foretrain=own_version(), code=code_digest()[:12],
        **{key: str(seen.get(key, "")) for key in ("python", "torch", "cuda", "triton")},
    )  # fmt: skip
    if device == "cpu":
        gpu = without_calibration(cpu_device())
        machine = Machine(device=gpu.name, kind="cpu", memory_bytes=gpu.memory_bytes, system=system)
        return Target(gpu, device, machine, versions)
    if not seen["count"]:
        raise UserError("environment.verify_no_card", torch=versions.torch, cuda=versions.cuda or "–")
    if "name" not in seen:
        raise UserError("environment.no_such_gpu", wanted=device, count=seen["count"])
    cards = Cards()
    number, ids = int(device.partition(":")[2] or 0), {key: seen.get(key, "") for key in ("uuid", "bus_id")}
    index = cards.index_of(number, **ids)
    driver = next((facts.driver for facts in cards.facts if facts.index == index), "")
    machine = Machine(
        device=seen["name"], kind="cuda", memory_bytes=seen["memory_bytes"], sm_count=seen["sm_count"],
        compute_capability=seen["capability"], driver=driver, system=system,
    )  # fmt: skip
    return Target(_gpu(number, ids, seen), device, machine, versions, index, seen["obstacle"], cards)


def own_version() -> str:
    return installed("foretrain") or "source"


def _gpu(number: int, ids: dict[str, str], seen: dict[str, Any]) -> Gpu:
    """Return the catalogue's card with its true memory; one that it lacks has no speed, so no time is predicted."""
    try:
        found = detect(number, **ids)
        if found is not None:
            return without_calibration(found.gpu)
    except UserError:
        pass
    return Gpu(
        name=seen["name"], compute_capability=seen["capability"], sm_count=seen["sm_count"],
        cuda_memory_gib=seen["memory_bytes"] / 2**30, source="CUDA device properties",
    )  # fmt: skip


def begin(path: Path, where: Target, name: str, listen: Listener) -> Verification:
    """Read earlier results, or all cases of this device, still to do. Raises UserError."""
    found = None
    if path.exists():
        try:
            found = read(path)
        except UserError as error:
            listen("damaged", {"problem": str(error), "path": str(_set_aside(path, "damaged"))})
        else:
            same = (found.machine, found.versions) == (where.machine, where.versions)
            if not same or not all(is_ours(outcome.case, where.gpu) for outcome in found.outcomes):
                listen("other", {"path": str(_set_aside(path, "before"))})
                found = None
    if found is None:
        free, *_ = where.now()
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        found = Verification(
            date=today, machine=where.machine, versions=where.versions, free_bytes=free,
            outcomes=tuple(Outcome(case=case) for case in cases_for(where.gpu, free)),
        )  # fmt: skip
    if name:
        found = found.model_copy(update={"name": name})
    keep(found, path)
    return found


def _set_aside(path: Path, why: str) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.stem}.{why}-{number}{path.suffix}")).exists():
        number += 1
    try:
        return path.rename(aside)
    except OSError as error:
        raise not_written(aside, error) from None


def keep(found: Verification, path: Path) -> None:
    try:
        replace_text(path, found.text())
    except OSError as error:
        raise not_written(path, error) from None


def chosen(found: Verification, only: str) -> list[int]:
    """Return the places of the cases whose label has this text. Raises UserError where there is none."""
    places = [i for i, each in enumerate(found.outcomes) if only.lower() in each.case.label.lower()]
    if not places:
        raise UserError("usage.verify_only", text=only[:40], labels=[each.case.label for each in found.outcomes])
    return places


def to_do(found: Verification, only: str, *, again: bool) -> list[int]:
    open_ = ("waiting", "skipped")
    return [i for i in chosen(found, only) if again or found.outcomes[i].status in open_]


def about_s(cases: Sequence[Case]) -> float:
    return sum(USUAL_COMPILED_S if case.compiled else USUAL_EAGER_S for case in cases)


def work(found: Verification, places: Sequence[int], where: Target, path: Path, listen: Listener) -> Verification:
    """Run these cases and write the file after each; an exception (a signal, a full disk) loses only one."""
    cases = [found.outcomes[i].case for i in places]
    trace_all(cases, where.gpu, lambda state: listen("tracing", {"state": state}))
    began = time.monotonic()
    for number, place in enumerate(places, 1):
        case = cases[number - 1]
        pace = (time.monotonic() - began) / about_s(cases[: number - 1]) if number > 1 else 1.0
        listen(
            "case", {"number": number, "count": len(places), "case": case, "left": pace * about_s(cases[number - 1 :])}
        )
        outcome = try_case(case, where)
        outcomes = (*found.outcomes[:place], outcome, *found.outcomes[place + 1 :])
        found = found.model_copy(update={"outcomes": outcomes})
        keep(found, path)
        listen("done", {"number": number, "count": len(places), "outcome": outcome})
    return found


def try_case(case: Case, where: Target) -> Outcome:
    began = time.monotonic()
    here: dict[str, Any] = {"case": case}
    if case.compiled and where.no_compile:
        return Outcome(**here, status="skipped", reason=_why("no_compile", problem=where.no_compile[:160]))
    predicted, peaks = predict(case, where.gpu)
    free, used_by_others, busy = _settled(where, predicted.process_bytes)
    here |= {"predicted": predicted, "used_by_others_bytes": used_by_others, "busy": busy}
    room = free if free is not None else where.machine.memory_bytes
    if room is not None and predicted.process_bytes > room:
        reason = _why("memory", needed=predicted.process_bytes, free=room)
        return Outcome(**here, status="skipped", reason=reason)
    job = {"what": "case", "device": where.device, "case": case.to_json()}
    limit_s = COMPILED_S if case.compiled else EAGER_S
    try:
        answer = ask(job, limit_s)
    except Timeout:
        ended: dict[str, Any] = {"status": "failed", "reason": _why("timeout", limit=limit_s)}
    except Ended as error:
        ended = {"status": "failed", "reason": _why("ended", code=error.code)}
    else:
        ended = _read_answer(answer, predicted, peaks, room)
        here["busy"] = busy or (answer.get("others_share") or 0.0) > BUSY
    return Outcome(**here, **ended, took_s=time.monotonic() - began)


def _settled(where: Target, needed_bytes: int) -> tuple[int | None, int, bool]:
    """Poll `where.now()` for seconds while there is too little memory, or the card works, as NVML lags a second."""
    end = time.monotonic() + SETTLE_S
    while True:
        free, used_by_others, busy = where.now()
        if (not busy and (free is None or free >= needed_bytes)) or time.monotonic() >= end:
            return free, used_by_others, busy
        time.sleep(0.2)


def _why(id: str, **values: Any) -> Reason:
    return Reason(id=id, values=values)  # type: ignore[arg-type]


def _read_answer(answer: dict[str, Any], predicted: Predicted, peaks: Peaks, room: int | None) -> dict[str, Any]:
    if "error" in answer:
        return {"status": "failed", "reason": _why("error", problem=answer["error"])}
    if "out_of_memory" in answer:
        values = {**answer["out_of_memory"], "needed": predicted.process_bytes, "free": room or 0}
        return {"status": "out_of_memory", "reason": _why("out_of_memory", **values)}
    real = {name: answer["phases"][name] for name in peaks if name in answer["phases"]}
    highest = {
        key: max((phase[key] for phase in real.values()), default=None) for key in ("allocated_bytes", "reserved_bytes")
    }
    others = {key: answer.get(key) for key in ("process_bytes", "context_bytes", "step_s")}
    phases = tuple(
        Phase(
            phase=name, predicted_allocated_bytes=peaks[name][0], predicted_reserved_bytes=peaks[name][1],
            measured_allocated_bytes=phase["allocated_bytes"], measured_reserved_bytes=phase["reserved_bytes"],
        )
        for name, phase in real.items()
    )  # fmt: skip
    return {"status": "measured", "measured": Measured(**highest, **others, steps=answer["steps"]), "phases": phases}
