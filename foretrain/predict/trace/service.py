"""Traces from the cache, under all that decides them (options that shape memory, card, dtype, torch, the code of tracer
and step), or from a worker process. No torch here."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from foretrain.base import processes
from foretrain.base.cache import Cache
from foretrain.base.records import Record
from foretrain.base.signals import ends
from foretrain.base.units import MIB
from foretrain.config.checks import EIGHT_BITS
from foretrain.config.options import RunConfig
from foretrain.config.sharing import sharing_problem
from foretrain.hardware.catalogue import Gpu
from foretrain.predict.memory import SHAPING_OPTIONS
from foretrain.predict.spec import DISTINCT_MICRO_BATCHES, StepSpec
from foretrain.predict.trace import interpreter
from foretrain.predict.trace.record import Trace
from foretrain.predict.trace.repeats import with_all_micro_batches

# The oldest torch with the interfaces that card/guard.py and compiled.py need. Newer ones are tried: each trace proves
# itself.
OLDEST_TORCH = (2, 6)  # compiled: see predict/trace/compiled.py
OLDEST_TO_SHARD = (2, 7)
MOST_KEPT_BYTES = 64 * MIB
TRACES = Cache("traces", compressed=True, most_bytes=MOST_KEPT_BYTES)
ANSWERS = Cache("answers", compressed=True, most_bytes=MOST_KEPT_BYTES)
Answer = TypeVar("Answer", bound=Record)
# Facts of a card that shape a trace.
SHAPING_FACTS = {"name", "compute_capability", "sm_count", "memory_gib", "cuda_memory_gib", "l2_mib"}
# Environment variables that shape a trace: how Inductor measures kernels (autotuning.py).
SHAPING_VARIABLES = ("TORCHINDUCTOR_USE_EXPERIMENTAL_BENCHMARKER", "TORCHINDUCTOR_USE_TORCH_PROFILER_BENCHMARKER")
AT_ONCE = 2  # traces side by side; each takes one core and half a GiB


class TraceUnavailable(RuntimeError):
    """No trace can be made here; the sentence says why. The estimate stands."""


class Traceable(Protocol):
    @property
    def gpu(self) -> Gpu | None: ...

    def job(self) -> dict[str, Any]:
        """Return plain values. "by": the module whose trace(job) traces; memory.py answers "question"."""
        ...

    def key(self) -> str: ...

    def why_not(self) -> str: ...

    def whole(self, trace: Trace) -> Trace: ...


@dataclass(frozen=True)
class Request:
    """What to trace. `pads`: the assumed result of pad_mm's measurements; `keeps`: NCCL keeps DDP's first bucket."""

    spec: StepSpec
    pads: bool = False
    rank: int = 0
    keeps: bool = False

    @property
    def gpu(self) -> Gpu:
        return self.spec.gpu

    def why_not(self) -> str:
        sharing = self.spec.sharing
        if sharing is None:
            return ""
        if self.spec.step != "foretrain":
            return f"{self.spec.step}'s step is traced on one card only"
        if problem := sharing_problem(self.spec.config, sharing):
            return str(problem).rstrip(".")
        return why_not_sharded() if sharing.way.shards_weights else ""

    def normal_config(self) -> RunConfig:
        """Return the config with options that change no trace at their defaults, so that more traces are shared."""
        c = self.spec.config
        values = {option: getattr(c, option) for option in SHAPING_OPTIONS}
        if c.matmul not in EIGHT_BITS:  # sums in fp16 take no other memory
            values["matmul"] = "dtype"
        return RunConfig(
            **values,
            eval_batch_size=c.eval_batch,
            eval_block_size=c.eval_block,
            gradient_accumulation_steps=self.spec.micro_batches_that_count,
            eval_iters=min(2, c.eval_iters),
            grad_clip=1.0 if c.grad_clip else 0.0,
            cuda_graph="on" if self.spec.is_one_graph else "off",
        )

    def job(self) -> dict[str, Any]:
        spec = self.spec
        gpu = shaping_facts(spec.gpu)
        job = {
            "by": "foretrain.predict.trace.self_test", "config": self.normal_config().model_dump(mode="json"),
            "gpu": gpu, "dtype": spec.dtype, "step": spec.step, "compiled": spec.compiled, "pads": self.pads,
        }  # fmt: skip
        if spec.sharing:
            job |= {"by": "foretrain.predict.trace.ranks", "sharing": asdict(spec.sharing)}
            job |= {"rank": self.rank, "keeps": self.keeps}
        return job

    def whole(self, trace: Trace) -> Trace:
        if self.spec.is_one_graph:
            return trace
        return with_all_micro_batches(trace, DISTINCT_MICRO_BATCHES, self.spec.config.gradient_accumulation_steps)

    def key(self) -> str:
        return key_of(self.job())


def shaping_facts(gpu: Gpu) -> dict[str, Any]:
    return gpu.model_dump(mode="json", include=SHAPING_FACTS)


def key_of(job: Mapping[str, Any], **more: Any) -> str:
    """Return the hash of a job and of what carries it out: torch, Python, our code, and `more`."""
    by = interpreter.now()
    variables = {name: os.environ[name] for name in SHAPING_VARIABLES if name in os.environ}
    what = {**job, "torch": by.torch, "code": code_digest(), "python": by.python, **variables, **more}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


@cache
def code_digest() -> str:
    package = Path(__file__).parents[2]
    files = [*sorted((package / "predict").rglob("*.py")), *sorted((package / "model").rglob("*.py"))]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _parsed(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def why_not() -> str:
    """Return '' where traces can be tried, or the reason why not."""
    version = interpreter.now().torch
    if not version:
        return "exact tracing needs torch (pip install 'foretrain[train]')"
    if not sys.platform.startswith("linux"):
        return f"exact tracing works on Linux; this is {sys.platform}"
    if _parsed(version) < OLDEST_TORCH:
        return f"exact tracing needs torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer; this is {version}"
    return ""


def why_not_sharded() -> str:
    version, need = interpreter.now().torch, ".".join(map(str, OLDEST_TO_SHARD))
    if _parsed(version) >= OLDEST_TO_SHARD:
        return ""
    return f"FSDP2 is traced with torch {need} or newer, which runs it on a CPU, too; this is {version}"


def traces(
    requests: Sequence[Traceable],
    listen: Callable[[str], None] = lambda text: None,
    ready: Callable[[int, Trace], None] = lambda number, trace: None,
) -> list[Trace]:
    """Return a trace for each request, made side by side where not cached; `ready` gets each as soon as it is made.
    Raises TraceUnavailable with a sentence."""
    for request in requests:
        if request.gpu is not None and request.gpu.kind != "cuda":
            raise TraceUnavailable(f"traces are made for CUDA cards; {request.gpu.name} is none")
    keys = [request.key() for request in requests]
    whole: dict[int, Trace] = {}

    def there(key: str, trace: Trace) -> None:
        for number, request in enumerate(requests):
            if keys[number] == key:
                whole[number] = request.whole(trace)
                ready(number, whole[number])

    asked = dict(zip(keys, requests, strict=True))
    kept = {key: trace for key in asked if (trace := _read(TRACES.path(key))) is not None}
    if wanted := {key: request for key, request in asked.items() if key not in kept}:
        if reason := why_not() or next(filter(None, (request.why_not() for request in wanted.values())), ""):
            raise TraceUnavailable(reason)
        _make(wanted, listen, there)
    for key, trace in kept.items():
        there(key, trace)
    return [whole[number] for number in range(len(requests))]


def _read(path: Path) -> Trace | None:
    try:
        return Trace.from_json(TRACES.value(path))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def remembered(what: dict[str, Any], kind: type[Answer], make: Callable[[], Answer]) -> Answer:
    return recalled(what, kind) or keep(what, make())


def recalled(what: dict[str, Any], kind: type[Answer]) -> Answer | None:
    return ANSWERS.record(_answer_path(what), kind)


def keep(what: dict[str, Any], answer: Answer) -> Answer:
    ANSWERS.keep(_answer_path(what), answer.model_dump_json())
    return answer


def _answer_path(what: dict[str, Any]) -> Path:
    return ANSWERS.path({**what, "code": code_digest()})


@contextlib.contextmanager
def _deferred_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGHUP while workers and files go first, unless others ignore or handle them."""
    received: list[int] = []
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    main = threading.current_thread() is threading.main_thread()
    taken = {number: signal.getsignal(number) for number in numbers if main and ends(number)}
    for number in taken:
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def _make(wanted: dict[str, Traceable], listen: Callable[[str], None], there: Callable[[str, Trace], None]) -> None:
    """Trace by `AT_ONCE` worker processes; all stop when one fails or this process ends. `there` gets (key, trace)."""
    with _deferred_signals() as received, tempfile.TemporaryDirectory(prefix="foretrain-") as folder:
        outs, found = {key: Path(folder) / key for key in wanted}, set[str]()
        started = time.monotonic()
        host = start_worker([(request, outs[key]) for key, request in wanted.items()], Path(folder))
        try:
            while len(found) < len(wanted) and not received:
                ended = host.poll()
                for key, out in outs.items():
                    code = _exit_code(out)
                    if key not in found and (code is not None or ended is not None):
                        found.add(key)
                        there(key, _finish(ended or 0 if code is None else code, out, TRACES.path(key)))
                listen(f"{len(found)}/{len(wanted)} · {time.monotonic() - started:.0f} s")
                time.sleep(0.02)
        finally:
            processes.end(host)  # its workers are in its group


def _exit_code(out: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(out.with_suffix(".status").read_text())
    return None


def write_jobs(jobs: Sequence[tuple[Traceable, Path]], folder: Path) -> Path:
    """Write the jobs of worker.py and their output files. A file can neither block nor be blocked by a pipe."""
    job_file = folder / "jobs"
    what = [{**request.job(), "out": str(out)} for request, out in jobs]
    job_file.write_text(json.dumps({"jobs": what, "at_once": AT_ONCE}))
    return job_file


def start_worker(jobs: Sequence[tuple[Traceable, Path]], folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCH_WARM_POOL": "0"}
    environment["HF_HUB_OFFLINE"] = "1"  # nothing is fetched for a trace
    command, more = interpreter.now().worker()
    with write_jobs(jobs, folder).open("rb") as stdin, (folder / "host.log").open("wb") as log:
        return subprocess.Popen(
            command, stdin=stdin, stdout=log, stderr=log, env={**environment, **more}, cwd=folder,
            start_new_session=True,
        )  # fmt: skip


def _finish(code: int, out: Path, keep: Path) -> Trace:
    try:
        text = out.read_text("utf-8")
        data = json.loads(text)
    except (OSError, ValueError):
        reason = _last_line([out.with_suffix(".log"), out.parent / "host.log"], code)
        raise TraceUnavailable(f"the trace failed: {reason}") from None
    if "reason" in data:
        raise TraceUnavailable(f"the trace failed: {data['reason']}")
    TRACES.keep(keep, text)
    found = Trace.from_json(data)
    with contextlib.suppress(OSError):
        found.answer = out.with_suffix(".answer").read_text("utf-8")
    return found


def _last_line(logs: Sequence[Path], code: int) -> str:
    lines: list[str] = []
    for log in logs:
        if not lines:
            with contextlib.suppress(OSError):
                lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return f"{lines[-1][:300] if lines else 'no output'} (exit {code})"
