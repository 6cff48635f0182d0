"""The routes of the page: its files, and a small JSON interface that knows nothing of how it is drawn."""

import gzip
import secrets
import shlex
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StrictStr
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from foretrain.analysis.forecast_check import plan_of
from foretrain.base import bugs, messages
from foretrain.base.errors import UserError
from foretrain.base.messages import printable, say
from foretrain.base.records import Record
from foretrain.comparison.compare import compare
from foretrain.comparison.loss_axes import gather
from foretrain.comparison.sources import runs as source
from foretrain.comparison.sources.request import SourceRequest
from foretrain.comparison.subject import Subject
from foretrain.predict.trace import service
from foretrain.reports.html import document_json
from foretrain.reports.views import compare as compare_view
from foretrain.runs.record import RunRecord, TrainedRun, TrainerRun
from foretrain.web import answers, calls, child, runs
from foretrain.web.answers import SCHEMA, Made, answered
from foretrain.web.form import Form, line_of
from foretrain.web.guard import App, Guard, Receive, Scope, Send
from foretrain.web.runs import ObservedRun, Runs, label_json, row


def made(chosen: Sequence[tuple[str, ObservedRun | None]]) -> dict[str, Any]:
    """Return the `runs` in the order of `chosen` (None: no such id), their comparison or `problem`, and `command`."""
    states, subjects = [], []
    for id, run in chosen:
        state, subject = _read(id, run)
        states.append(state)
        subjects += [subject] if subject else []
    answer = {"schema": SCHEMA, "runs": states, "document": None, "problem": "", "command": ""}
    if len(subjects) < 2:
        return {**answer, "problem": say("page.beside.too_few")}
    try:
        found = compare(subjects)
        facts = gather(subjects, found, ObservedRun)
    except UserError as error:
        return {**answer, "problem": printable(str(error))}
    except OSError as error:  # went away between two readings
        return {**answer, "problem": _unreadable(str(error.filename or ""), error)}
    document = compare_view.report(found, facts.losses, dict(facts.verdicts), facts.checks, facts.sources)
    command = shlex.join(["foretrain", "report", *(subject.path for subject in subjects)])
    return {**answer, "document": document_json(document), "command": printable(command)}


def of_paths(asked: list[tuple[str, str | None]]) -> dict[str, Any]:
    """`made` of ids and folders of runs, in a process of its own (child.py)."""
    return made([(id, ObservedRun(Path(path)) if path else None) for id, path in asked])


def _read(id: str, run: ObservedRun | None) -> tuple[dict[str, Any], Subject | None]:
    if run is None:
        return {"id": id, "name": "", "path": "", "notes": [], "problem": say("page.beside.gone")}, None
    state = {"id": id, **label_json(run, run.id), "notes": [], "problem": ""}
    try:
        record = run.any_record()
        if isinstance(record, TrainerRun):
            state |= label_json(run, record.name)
        subject = source.of(SourceRequest(path=str(run.path), label=state["name"]), run)
    except UserError as error:
        return {**state, "problem": printable(str(error))}, None
    except OSError as error:
        return {**state, "problem": _unreadable(str(run.path), error)}, None
    return {**row(id, run, record), **state, "notes": _notes(run, record)}, subject


def _unreadable(path: str, error: OSError) -> str:
    reason = error.strerror or str(error)
    return printable(str(UserError("data.log_unreadable", path=path, reason=reason)))


def _notes(run: ObservedRun, record: RunRecord) -> list[str]:
    notes = [] if record.status == "finished" else [say("page.beside.so_far")]
    try:
        if isinstance(record, TrainedRun):
            plan_of(run.path, record)
    except UserError as error:
        notes.append(printable(str(error)))
    return notes


# Which runs are asked to be compared, and where that is done: small ones in a thread, large ones in a process.
#
# The metrics of a long run, parsed, take many times their size, and seconds in which sliders would stand still.

MOST = 4  # stand side by side in a table that can be read
LARGE_BYTES = 512 * 1024
TIMEOUT_S = 180.0


class Asked(Record):
    """Runs by the ids that the list of runs gave; the others are held against the first."""

    runs: Annotated[tuple[Annotated[StrictStr, Field(max_length=64)], ...], Field(min_length=2, max_length=MOST)]


class Comparer:
    """Compares runs of a server, whose files are only read; of large ones one comparison at a time, the newest wins."""

    def __init__(self, known: Runs) -> None:
        self._known, self._turn = known, threading.Lock()
        self._child: child.Child | None = None

    def answer(self, asked: Asked) -> Made:
        """What the page shows of these runs. Raises UserError where the process ends without an answer."""
        found = self._known.all()
        chosen = [(id, found.get(id)) for id in asked.runs]
        if sum(_size(run) for _, run in chosen if run) <= LARGE_BYTES:
            return 200, made(chosen)
        self.stop()
        with self._turn:
            working = self._child = child.Child(
                "comparison", [[id, str(run.path) if run else None] for id, run in chosen]
            )
            if not working.finished(TIMEOUT_S):
                working.stop()
                raise UserError("page.failed", reason=f"{TIMEOUT_S:.0f} s")
            if working.failure:
                raise UserError("page.failed", reason=working.failure)
            status, answer = working.answer
            return status, answer

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()


def _size(run: ObservedRun) -> int:
    try:
        return (run.path / "metrics.jsonl").stat().st_size
    except OSError:
        return 0


WAIT_S = 1.0
_KEPT = 4


class Job:
    """One form that a process works on. `work`: what of child.WORK."""

    def __init__(self, work: str, form: Form) -> None:
        self.id, self.work, self._begun = secrets.token_hex(8), work, time.monotonic()
        self._child = child.Child(work, form.model_dump(mode="json"))
        self.stop = self._child.stop

    def result(self, wait_s: float) -> Made:
        """Return the answer, waited for so long; else 202 and how far it is. Raises UserError."""
        if not self._child.finished(wait_s):
            seconds, progress = int(time.monotonic() - self._begun), self._child.progress
            return 202, {"schema": SCHEMA, "job": self.id, "seconds": seconds, "progress": progress}
        if self._child.failure:
            raise UserError("page.failed", reason=self._child.failure)
        status, answer = self._child.answer
        return status, answer


class Jobs:
    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._jobs: dict[str, Job] = {}

    def advise(self, form: Form) -> Made:
        """Begin to look for changes. Raises UserError for what cannot be asked."""
        line_of(form).request()
        return self._begun("advice", form).result(WAIT_S)

    def trace(self, form: Form) -> Made:
        """Begin to trace a form. Raises UserError for what cannot be planned, and where nothing can be traced here."""
        calls.to_trace(form)
        if reason := service.why_not():
            raise UserError("environment.no_trace", reason=reason)
        return self._begun("exact", form).result(0.0)

    def _begun(self, work: str, form: Form) -> Job:
        with self._turn:
            self.stop(work)
            job = Job(work, form)
            self._jobs = dict([*list(self._jobs.items())[1 - _KEPT :], (job.id, job)])
            return job

    def get(self, id: str) -> Job | None:
        return self._jobs.get(id)

    def stop(self, work: str = "") -> None:
        for job in self._jobs.values():
            if work in ("", job.work):
                job.stop()


_PACKED = {"content-encoding": "gzip", "vary": "accept-encoding"}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@cache
def files() -> dict[str, tuple[bytes, str]]:
    """The page's own files by path: their bytes and type. Nothing else is ever served from disk."""
    package = resources.files("foretrain")
    found = {
        "/chart.js": (package / "reports" / "chart.js", "text/javascript"),
        "/chart.css": (package / "reports" / "chart.css", "text/css"),
    }
    for file in (package / "web" / "static").iterdir():
        kind = _TYPES.get(Path(file.name).suffix)
        if kind is not None:
            found["/" if file.name == "index.html" else f"/{file.name}"] = (file, kind)
    return {path: (file.read_bytes(), f"{kind}; charset=utf-8") for path, (file, kind) in found.items()}


def create_app(port: int, token: str, roots: list[Path], language: str | None = None) -> Starlette:
    """The whole application behind its guard. `roots`: where runs are looked for. `language`: before the browser's."""
    handlers = _Handlers(runs.Runs(roots))
    routes = [
        *(Route(path, _file, methods=["GET"]) for path in files()),
        Route("/api/start", handlers.start, methods=["GET"]),
        *(Route(path, handlers.posted, methods=["POST"]) for path in handlers.answering),
        Route("/api/jobs/{id}", handlers.job, methods=["GET"]),
        Route("/api/jobs/{id}/stop", handlers.stop, methods=["POST"]),
        Route("/api/runs", handlers.runs, methods=["GET"]),
        Route("/api/runs/{id}", handlers.run, methods=["GET"]),
        Route("/api/runs/{id}/live", handlers.live, methods=["GET"]),
        Route("/api/runs/{id}/report", handlers.report, methods=["GET"]),
        Route("/api/comparisons", handlers.comparisons, methods=["GET"]),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        handlers.comparer.stop()
        await run_in_threadpool(handlers.jobs.stop)

    guard = Middleware(Guard, port=port, token=token, open_paths=frozenset(files()))
    speaking = Middleware(Speaking, language=language)
    refusals = {404: _missing, 405: _no_method}
    layers = [speaking, Middleware(Telling), guard]
    app = Starlette(routes=routes, middleware=layers, lifespan=lifespan, exception_handlers=refusals)
    app.router.redirect_slashes = False  # an address is right or wrong
    return app


@cache
def _packed(path: str) -> bytes:
    return gzip.compress(files()[path][0], 9, mtime=0)


def _takes_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


async def _file(request: Request) -> Response:
    content, kind = files()[request.url.path]
    if not _takes_gzip(request):
        return Response(content, media_type=kind)
    return Response(_packed(request.url.path), media_type=kind, headers=_PACKED)


async def _missing(request: Request, error: Exception) -> Response:
    return _refusal("missing", 404)


async def _no_method(request: Request, error: Exception) -> Response:
    return _refusal("method", 405)


def _refusal(id: str, status: int) -> Response:
    message = say(f"refused.{id}")
    return JSONResponse({"schema": "foretrain.error/1", "id": f"refused.{id}", "message": message}, status)


async def _answer(work: Callable[[], Made]) -> Response:
    try:
        status, value = await run_in_threadpool(work)
    except UserError as error:
        status, value = 422, answers.error_json(error)
    return JSONResponse(value, status)


class Telling:
    """ASGI middleware: a bug of foretrain is answered in a sentence with status 500, without a traceback anywhere."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; what nobody expected is answered in a sentence, where nothing was answered yet."""
        begun = False

        async def sending(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            if bugs.wants_traceback() or scope["type"] != "http" or begun:
                raise
            await JSONResponse(answers.error_json(bugs.unexpected_error(error)), 500)(scope, receive, send)


class Speaking:
    def __init__(self, app: App, language: str | None = None) -> None:
        self._app, self._language = app, language

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and speak its language while it is answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with messages.speaking(language_of(scope, self._language)):
            await self._app(scope, receive, send)


def language_of(scope: Scope, language: str | None) -> str:
    given = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
    switched = messages.matching(given.get(b"x-foretrain-language", "")[:40])
    return switched or language or messages.preferred(given.get(b"accept-language", "")) or messages.ENGLISH


class _Handlers:
    def __init__(self, known: runs.Runs) -> None:
        self._runs, self.jobs, self.comparer = known, Jobs(), Comparer(known)
        self.answering: dict[str, Callable[[bytes], Made]] = {  # a body that is posted to a path
            **calls.POSTED,
            "/api/advice": lambda body: answered(body, Form, self.jobs.advise),
            "/api/exact": lambda body: answered(body, Form, self.jobs.trace),
            "/api/compare": lambda body: answered(body, Asked, self.comparer.answer),
        }

    async def start(self, request: Request) -> Response:
        found = await _answer(lambda: (200, calls.start(service.why_not())))
        if not _takes_gzip(request):
            return found
        packed = gzip.compress(found.body, 6, mtime=0)
        return Response(packed, found.status_code, headers=_PACKED, media_type=found.media_type)

    async def posted(self, request: Request) -> Response:
        body = await request.body()
        return await _answer(lambda: self.answering[request.url.path](body))

    async def job(self, request: Request) -> Response:
        job = self.jobs.get(request.path_params["id"])
        return _refusal("missing", 404) if job is None else await _answer(lambda: job.result(WAIT_S))

    async def stop(self, request: Request) -> Response:
        job = self.jobs.get(request.path_params["id"])
        if job is None:
            return _refusal("missing", 404)
        await run_in_threadpool(job.stop)
        return JSONResponse({"schema": answers.SCHEMA})

    async def runs(self, request: Request) -> Response:
        return await _answer(lambda: (200, self._runs.listed()))

    async def run(self, request: Request) -> Response:
        return await self._of_run(request, lambda id, run: runs.page(id, run, self._runs.curve(id, run)))

    async def live(self, request: Request) -> Response:
        after = request.query_params.get("after", "")
        seen = int(after) if after.isascii() and after.isdigit() and len(after) < 16 else -1
        curve = self._runs.curve
        return await self._of_run(request, lambda id, run: runs.live_answer(run, curve(id, run), seen))

    async def report(self, request: Request) -> Response:
        return await self._of_run(request, lambda id, run: runs.report(run))

    async def _of_run(self, request: Request, work: Callable[[str, Any], dict[str, Any]]) -> Response:
        id = request.path_params["id"]
        run = await run_in_threadpool(self._runs.get, id)
        return _refusal("missing", 404) if run is None else await _answer(lambda: (200, work(id, run)))

    async def comparisons(self, request: Request) -> Response:
        return await _answer(lambda: (200, runs.comparisons(self._runs)))
