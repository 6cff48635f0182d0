"""The routes of the page: its files, and a small JSON interface that knows nothing of how it is drawn."""

import gzip
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from foretrain.base import bugs
from foretrain.base.errors import UserError
from foretrain.base.messages import say
from foretrain.predict.trace import service
from foretrain.web import answers, calls, child, comparison, runs
from foretrain.web.answers import SCHEMA, Made, answered
from foretrain.web.form import Form, line_of
from foretrain.web.guard import App, Guard, Receive, Scope, Send
from foretrain.web.language import Speaking

WAIT_S = 1.0
_KEPT = 4


class Job:
    """One form that a process works on. `work`: what of child.WORK."""

    def __init__(self, work: str, form: Form) -> None:
        self.id, self.work, self._begun = secrets.token_hex(8), work, time.monotonic()
        self._child = child.Child(work, form.model_dump(mode="json"))
        self.stop = self._child.stop

    def told(self, wait_s: float) -> Made:
        """Return the answer, waited for so long; else 202 and how far it is. Raises UserError where there is none."""
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
        return self._begun("advice", form).told(WAIT_S)

    def trace(self, form: Form) -> Made:
        """Begin to trace a form. Raises UserError for what cannot be planned, and where nothing can be traced here."""
        calls.to_trace(form)
        if reason := why_not():
            raise UserError("environment.no_trace", reason=reason)
        return self._begun("exact", form).told(0.0)

    def _begun(self, work: str, form: Form) -> Job:
        with self._turn:
            self.stop(work)
            job = Job(work, form)
            self._jobs = dict([*list(self._jobs.items())[1 - _KEPT :], (job.id, job)])
            return job

    def get(self, id: str) -> Job | None:
        return self._jobs.get(id)

    def stop(self, work: str = "") -> None:
        """Stop all of this kind of work; of every kind where none is named."""
        for job in self._jobs.values():
            if work in ("", job.work):
                job.stop()


def why_not() -> str:
    """'' where exact answers can be had here, else the sentence that says why not."""
    return service.why_not()


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


class _Handlers:
    def __init__(self, known: runs.Runs) -> None:
        self._runs, self.jobs, self.comparer = known, Jobs(), comparison.Comparer(known)
        self.answering: dict[str, Callable[[bytes], Made]] = {  # a body that is posted to a path
            **calls.POSTED,
            "/api/advice": lambda body: answered(body, Form, self.jobs.advise),
            "/api/exact": lambda body: answered(body, Form, self.jobs.trace),
            "/api/compare": lambda body: answered(body, comparison.Asked, self.comparer.answer),
        }

    async def start(self, request: Request) -> Response:
        found = await _answer(lambda: (200, calls.start(why_not())))
        if not _takes_gzip(request):
            return found
        packed = gzip.compress(found.body, 6, mtime=0)
        return Response(packed, found.status_code, headers=_PACKED, media_type=found.media_type)

    async def posted(self, request: Request) -> Response:
        body = await request.body()
        return await _answer(lambda: self.answering[request.url.path](body))

    async def job(self, request: Request) -> Response:
        job = self.jobs.get(request.path_params["id"])
        return _refusal("missing", 404) if job is None else await _answer(lambda: job.told(WAIT_S))

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
        """What is new in a run since ?after=, a place in its metrics that an earlier answer gave."""
        after = request.query_params.get("after", "")
        seen = int(after) if after.isascii() and after.isdigit() and len(after) < 16 else -1
        curve = self._runs.curve
        return await self._of_run(request, lambda id, run: runs.live_answer(run, curve(id, run), seen))

    async def report(self, request: Request) -> Response:
        """What `foretrain report` makes of one run."""
        return await self._of_run(request, lambda id, run: runs.report(run))

    async def _of_run(self, request: Request, work: Callable[[str, Any], dict[str, Any]]) -> Response:
        id = request.path_params["id"]
        run = await run_in_threadpool(self._runs.get, id)
        return _refusal("missing", 404) if run is None else await _answer(lambda: (200, work(id, run)))

    async def comparisons(self, request: Request) -> Response:
        return await _answer(lambda: (200, runs.comparisons(self._runs)))
