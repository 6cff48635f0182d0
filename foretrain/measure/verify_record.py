"""Verifications on one machine: case by case predicted and measured, in a JSON file that may be a stranger's."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from foretrain.base.errors import UserError
from foretrain.base.files import read_text
from foretrain.base.records import Record
from foretrain.config.checks import launched
from foretrain.config.options import RunConfig
from foretrain.hardware.catalogue import Dtype, Gpu
from foretrain.predict.spec import StepName, StepSpec

SCHEMA = "foretrain.verify/1"
CONTRIBUTED = "benchmarks/contributed"  # the project's collection
MOST_CASES = 100
Size = Annotated[int, Field(ge=0, le=2**50)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
# Neither control characters nor marks of direction: these texts reach terminals and pages.
_TEXT = r"^[^\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]*$"
Text = Annotated[str, Field(max_length=200, pattern=_TEXT)]
Name = Annotated[str, Field(max_length=39, pattern=r"^([A-Za-z0-9](-?[A-Za-z0-9])*)?$")]  # as GitHub has them
Day = Annotated[str, Field(pattern=r"^20\d\d-[01]\d-[0-3]\d$")]

Quantity = Literal["allocated", "reserved", "process", "estimate", "time"]
QUANTITIES: tuple[Quantity, ...] = ("allocated", "reserved", "process", "estimate", "time")
Status = Literal["waiting", "measured", "out_of_memory", "failed", "skipped"]


class Case(Record):
    name: Text
    options: dict[Text, bool | int | float | Text]
    dtype: Dtype
    step: StepName
    compiled: bool = False

    @property
    def label(self) -> str:
        whose = {"foretrain": "foretrain", "nanogpt": "nanoGPT"}[self.step]
        short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[self.dtype]
        return f"{self.name} {short} {'compiled' if self.compiled else 'eager'} {whose}"

    @property
    def config(self) -> RunConfig:
        """Raises ConfigError or ValidationError for unknown options. A case without a graph option has none."""
        return launched(self.options)

    def spec(self, gpu: Gpu) -> StepSpec:
        return StepSpec.of(self.config, gpu, self.step, dtype=self.dtype, compiled=self.compiled)


class Phase(Record):
    phase: Text
    predicted_allocated_bytes: Size
    measured_allocated_bytes: Size
    predicted_reserved_bytes: Size | None = None
    measured_reserved_bytes: Size | None = None


class Predicted(Record):
    """Peaks by `source`, the process's need and a step's seconds with ranges; `estimate_allocated_bytes`: not
    `--exact`.
    """

    source: Literal["traced", "estimated"]
    allocated_bytes: Size | None = None
    reserved_bytes: Size | None = None
    process_bytes: Size
    process_low_bytes: Size
    process_high_bytes: Size
    estimate_allocated_bytes: Size | None = None
    step_s: Seconds | None = None
    step_low_s: Seconds | None = None
    step_high_s: Seconds | None = None


class Measured(Record):
    """torch's peaks over the predicted phases; the process's memory by NVML at its end (of a CPU: its peak); the median
    of `steps` steps. `context_bytes`: of the process beside what is reserved.
    """

    allocated_bytes: Size | None = None
    reserved_bytes: Size | None = None
    process_bytes: Size | None = None
    context_bytes: Size | None = None
    step_s: Seconds | None = None
    steps: Annotated[int, Field(ge=0, le=10_000)] = 0


class Reason(Record):
    id: Literal["memory", "no_compile", "timeout", "ended", "error", "out_of_memory"]
    values: dict[Text, int | float | Text] = Field(default_factory=dict)


class Outcome(Record):
    """The result of one case. `waiting`: not tried yet; `skipped`: could not be; `busy`: its time tells little."""

    case: Case
    status: Status = "waiting"
    reason: Reason | None = None
    predicted: Predicted | None = None
    measured: Measured | None = None
    phases: tuple[Phase, ...] = ()
    used_by_others_bytes: Size = 0
    busy: bool = False
    took_s: Annotated[float, Field(ge=0, le=1e6)] = 0.0

    def error(self, quantity: Quantity) -> float | None:
        found = self.pair(quantity)
        return found[0] / found[1] - 1 if found else None

    def inside(self, quantity: Quantity) -> bool | None:
        p, found = self.predicted, self.pair(quantity)
        if p is None or found is None or quantity not in ("process", "time"):
            return None
        low, high = (
            (p.process_low_bytes, p.process_high_bytes) if quantity == "process" else (p.step_low_s, p.step_high_s)
        )
        return None if low is None or high is None else low <= found[1] <= high

    def pair(self, quantity: Quantity) -> tuple[float, float] | None:
        p, m = self.predicted, self.measured
        if p is None or m is None or (quantity == "time" and self.busy):
            return None
        sides = {
            "allocated": (p.allocated_bytes, m.allocated_bytes), "reserved": (p.reserved_bytes, m.reserved_bytes),
            "process": (p.process_bytes, m.process_bytes), "time": (p.step_s, m.step_s),
            "estimate": (p.estimate_allocated_bytes, m.allocated_bytes),
        }  # fmt: skip
        predicted, measured = sides[quantity]
        return (predicted, measured) if predicted is not None and measured else None


class Machine(Record):
    device: Text
    kind: Literal["cuda", "cpu"]
    memory_bytes: Size | None = None
    sm_count: Annotated[int, Field(ge=1, le=10_000)] | None = None
    compute_capability: Text = ""
    driver: Text = ""
    system: Text = ""


class Versions(Record):
    foretrain: Text
    code: Text
    python: Text
    torch: Text
    cuda: Text = ""
    triton: Text = ""


class Summary(Record):
    """Errors of a quantity's predictions. `worst` is signed. `inside`: how many were in the stated range."""

    quantity: Quantity
    cases: int
    median: float
    worst: float
    worst_case: Text
    inside: int | None = None


class Verification(Record):
    """All cases of one machine. `name`: its contributor; `free_bytes`: what the cases were chosen for."""

    date: Day
    name: Name = ""
    machine: Machine
    versions: Versions
    free_bytes: Size | None = None
    outcomes: Annotated[tuple[Outcome, ...], Field(min_length=1, max_length=MOST_CASES)]

    @model_validator(mode="after")
    def _each_case_once(self) -> "Verification":
        labels = [outcome.case.label for outcome in self.outcomes]
        if len({*labels}) < len(labels):
            raise ValueError("a case is there twice")
        for outcome in self.outcomes:
            if outcome.status == "measured" and (outcome.predicted is None or outcome.measured is None):
                raise ValueError(f"{outcome.case.label} is measured and has no figures")
        return self

    def of(self, *statuses: Status) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status in statuses]

    @property
    def by_quantity(self) -> tuple[Summary, ...]:
        return summaries([(outcome.case.label, outcome) for outcome in self.outcomes])

    def text(self) -> str:
        return json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n"

    def as_json(self) -> dict[str, Any]:
        return {**self.to_json(schema=SCHEMA), "summary": [each.to_json() for each in self.by_quantity]}


def summaries(outcomes: Sequence[tuple[str, Outcome]]) -> tuple[Summary, ...]:
    found = []
    for quantity in QUANTITIES:
        errors = [(label, error) for label, each in outcomes if (error := each.error(quantity)) is not None]
        if errors:
            label, worst = max(errors, key=lambda pair: abs(pair[1]))
            middle = median(abs(error) for _, error in errors)
            ranges = [is_inside for _, each in outcomes if (is_inside := each.inside(quantity)) is not None]
            found.append(
                Summary(
                    quantity=quantity, cases=len(errors), median=middle, worst=worst, worst_case=label[:200],
                    inside=sum(ranges) if ranges else None,
                )
            )  # fmt: skip
    return tuple(found)


def read(path: Path) -> Verification:
    def bad(reason: str) -> UserError:
        return UserError("data.bad_verification", path=str(path), reason=reason)

    try:
        data = json.loads(read_text(path))
    except OSError as error:
        raise bad(error.strerror or "it cannot be read") from None
    except (ValueError, RecursionError):  # UnicodeDecodeError is one, as is a number of too many digits
        raise bad("it is not JSON, or was cut short") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise bad(f'it has no "schema": "{SCHEMA}"')
    return checked({key: value for key, value in data.items() if key not in ("schema", "summary")}, bad)


def checked(data: dict[str, Any], bad: Callable[[str], UserError]) -> Verification:
    """Make the record of JSON values, with valid configs. Raises what `bad` makes of a reason."""
    try:
        found = Verification.model_validate(data)
        for outcome in found.outcomes:
            _ = outcome.case.config
        return found
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise bad(_plain(f"{where}: {first['msg']}" if where else first["msg"])) from None
    except (UserError, RecursionError, OverflowError) as error:
        raise bad(_plain(str(error))) from None


def _plain(text: str) -> str:
    return re.sub(r"[^ -~]+", " ", text).strip()[:160]
