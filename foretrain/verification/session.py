"""A verification from its first case to its last: what is done is kept after each, and the next start continues."""

import datetime
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain.base.durable import replace_text
from foretrain.base.errors import UserError
from foretrain.base.installation import installed, installed_torch
from foretrain.hardware.card import Cards
from foretrain.hardware.catalogue import Gpu, detect
from foretrain.hardware.cpu import available_memory_bytes, cpu_device
from foretrain.predict.trace.service import code_digest
from foretrain.verification import child, expected
from foretrain.verification.cases import cases_for, is_ours
from foretrain.verification.record import (
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

DEVICE_S = 120.0  # in which torch must have said what card this is
EAGER_S, COMPILED_S = 240.0, 900.0  # after which a case is ended
SETTLE_S = 5.0  # in which a card has freed what the process before took, and its utilisation has fallen
BUSY = 0.2  # share of the card's last moments, or of a CPU's time, that others used: beyond it a time says little
# What a case usually takes, its trace included: guesses until a card has said it, only for "about … minutes".
USUAL_EAGER_S, USUAL_COMPILED_S = 15.0, 60.0
Listener = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Target:
    """The device: as it is planned for, what torch calls it, and NVML's view of it. `index`: NVML's."""

    gpu: Gpu
    device: str
    machine: Machine
    versions: Versions
    index: int | None = 0
    no_compile: str = ""
    cards: Cards | None = None

    def now(self) -> tuple[int | None, int, bool]:
        """(free bytes, used by other programs, whether these are using it) at this moment."""
        if self.gpu.kind == "cpu":
            return available_memory_bytes(), 0, False
        sample = self.cards.one(self.index, []) if self.cards else None
        if sample is None or sample.used_bytes is None or self.machine.memory_bytes is None:
            return None, 0, False
        used = sample.used_bytes
        return max(0, self.machine.memory_bytes - used), used, (sample.busy or 0.0) > BUSY


def target(device: str) -> Target:
    """The device of this machine. Raises UserError 'environment.verify_…' where there is none that can be used."""
    try:
        seen = child.ask({"what": "device", "device": device}, DEVICE_S)
    except (child.Timeout, child.Ended):
        raise UserError("environment.verify_torch", torch=installed_torch()) from None
    system = f"{platform.system()} {platform.machine()}"
    versions = Versions(
        foretrain=own_version(), code=code_digest()[:12],
        **{key: str(seen.get(key, "")) for key in ("python", "torch", "cuda", "triton")},
    )  # fmt: skip
    if device == "cpu":
        gpu = expected.without_calibration(cpu_device())
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
    """foretrain's version; `source` where it runs from a checkout that is not installed."""
    return installed("foretrain") or "source"


def _gpu(number: int, ids: dict[str, str], seen: dict[str, Any]) -> Gpu:
    """The catalogue's card with its true memory; one that the catalogue lacks has no speed, so that no time is
    predicted."""
    try:
        found = detect(number, **ids)
        if found is not None:
            return expected.without_calibration(found.gpu)
    except UserError:
        pass
    return Gpu(
        name=seen["name"], compute_capability=seen["capability"], sm_count=seen["sm_count"],
        memory_gib=seen["memory_bytes"] / 2**30, source="CUDA device properties",
    )  # fmt: skip


def begin(path: Path, where: Target, name: str, listen: Listener) -> Verification:
    """What was done before, or all cases of this device, still to do. What cannot be continued is set aside, never
    written over. Raises UserError where the file cannot be written."""
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
    """The free name that a file has now."""
    number = 1
    while (aside := path.with_name(f"{path.stem}.{why}-{number}{path.suffix}")).exists():
        number += 1
    try:
        return path.rename(aside)
    except OSError as error:
        raise UserError("environment.cannot_write", path=str(aside), reason=error.strerror or "") from None


def keep(found: Verification, path: Path) -> None:
    """Write it, whole or not at all. Raises UserError."""
    try:
        replace_text(path, found.text())
    except OSError as error:
        if error.errno == 28:
            raise UserError("disk.full_output") from None
        raise UserError("environment.cannot_write", path=str(path), reason=error.strerror or "") from None


def chosen(found: Verification, only: str) -> list[int]:
    """The places of the cases whose label has this text. Raises UserError where there is none."""
    places = [i for i, each in enumerate(found.outcomes) if only.lower() in each.case.label.lower()]
    if not places:
        raise UserError("usage.verify_only", text=only[:40], labels=[each.case.label for each in found.outcomes])
    return places


def to_do(found: Verification, only: str, *, again: bool) -> list[int]:
    """The places of the cases that are to be run: those not tried yet; with `again` all that were chosen."""
    open_ = ("waiting", "skipped")
    return [i for i in chosen(found, only) if again or found.outcomes[i].status in open_]


def about_s(cases: Sequence[Case]) -> float:
    """How long so many cases usually take."""
    return sum(USUAL_COMPILED_S if case.compiled else USUAL_EAGER_S for case in cases)


def work(found: Verification, places: Sequence[int], where: Target, path: Path, listen: Listener) -> Verification:
    """Run these cases and keep the file after each; `listen` hears 'tracing', 'case' and 'done'. What ends this with an
    exception (a signal, a full disk) loses no more than the case in hand."""
    cases = [found.outcomes[i].case for i in places]
    expected.trace_all(cases, where.gpu, lambda state: listen("tracing", {"state": state}))
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
    """One case: predicted, then measured, unless it cannot be."""
    began = time.monotonic()
    here: dict[str, Any] = {"case": case}
    if case.compiled and where.no_compile:
        return Outcome(**here, status="skipped", reason=_why("no_compile", problem=where.no_compile[:160]))
    predicted, peaks = expected.predict(case, where.gpu)
    free, used_by_others, busy = _settled(where, predicted.process_bytes)
    here |= {"predicted": predicted, "used_by_others_bytes": used_by_others, "busy": busy}
    room = free if free is not None else where.machine.memory_bytes
    if room is not None and predicted.process_bytes > room:
        reason = _why("memory", needed=predicted.process_bytes, free=room)
        return Outcome(**here, status="skipped", reason=reason)
    job = {"what": "case", "device": where.device, "case": case.to_json()}
    limit_s = COMPILED_S if case.compiled else EAGER_S
    try:
        answer = child.ask(job, limit_s)
    except child.Timeout:
        ended: dict[str, Any] = {"status": "failed", "reason": _why("timeout", limit=limit_s)}
    except child.Ended as error:
        ended = {"status": "failed", "reason": _why("ended", code=error.code)}
    else:
        ended = _read_answer(answer, predicted, peaks, room)
        here["busy"] = busy or (answer.get("others_share") or 0.0) > BUSY
    return Outcome(**here, **ended, took_s=time.monotonic() - began)


def _settled(where: Target, needed_bytes: int) -> tuple[int | None, int, bool]:
    """`where.now()`, asked again for seconds while there is too little, or the card works: the process before may just
    have ended, and NVML's utilisation is of the last second."""
    end = time.monotonic() + SETTLE_S
    while True:
        free, used_by_others, busy = where.now()
        if (not busy and (free is None or free >= needed_bytes)) or time.monotonic() >= end:
            return free, used_by_others, busy
        time.sleep(0.2)


def _why(id: str, **values: Any) -> Reason:
    return Reason(id=id, values=values)  # type: ignore[arg-type]


def _read_answer(
    answer: dict[str, Any], predicted: Predicted, peaks: expected.Peaks, room: int | None
) -> dict[str, Any]:
    """Status and figures of what a process wrote."""
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
