"""The page against hostile requests: every route, found by enumeration, meets every kind of them.

A route that is added is in this matrix by itself; one that needs no token must be named in OPEN below.
"""

import asyncio
import json
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from pydantic import ValidationError

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from foretrain.analysis.live import ObservedRun, lock_is_held
from foretrain.base.errors import UserError
from foretrain.web import calls, guard, routes
from foretrain.web.form import Form, line_of
from foretrain.web.runs import Curve
from tests.kit.page import EVIL_NAME, GOOD, ORIGIN, PORT, POSTED, TOKEN, traversals, write_run

# The page's own files: they hold nothing of the user's, and must load before the page can send its token.
OPEN = {"/", "/advice.js", "/api.js", "/chart.css", "/chart.js", "/compare.js", "/form.js", "/icon.svg", "/language.js", "/main.js",
        "/pictures.js", "/planner.js", "/runs.js", "/state.js", "/style.css", "/transport.js", "/ui.js"}  # fmt: skip


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starlette:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "evil", EVIL_NAME)
    return routes.create_app(PORT, TOKEN, [tmp_path / "runs"])


@pytest.fixture
def client(app: Starlette) -> Iterator[TestClient]:
    with TestClient(app, base_url=ORIGIN) as made:
        yield made


def routes_of(app: Starlette) -> list[tuple[str, str]]:
    found = []
    for route in app.routes:
        assert isinstance(route, Route), "only plain routes are checked here"
        path = re.sub(r"\{\w+\}", "0123456789abcdef", route.path)
        found += [(method, path) for method in sorted(route.methods or ()) if method != "HEAD"]
    assert len(found) > 15
    return found


def ask(client: TestClient, method: str, path: str, **changed: str | None) -> Any:
    headers = {**GOOD, **(POSTED if method == "POST" else {})}
    names = {name.replace("_", "-"): value for name, value in changed.items()}
    headers = {**headers, **names}
    return client.request(
        method, path, headers={k: v for k, v in headers.items() if v is not None},
        content=b"{}" if method == "POST" else None,
    )  # fmt: skip


EVIL = {
    "another host": {"host": "evil.example"},
    "rebound host": {"host": f"evil.example:{PORT}"},
    "another port": {"host": "127.0.0.1:1"},
    "no port": {"host": "127.0.0.1"},
    "user before the host": {"host": f"127.0.0.1:{PORT}@evil.example"},
    "no host": {"host": ""},
    "another origin": {"origin": "https://evil.example"},
    "origin null": {"origin": "null"},
    "origin empty": {"origin": ""},
    "origin on another port": {"origin": "http://127.0.0.1:1"},
    "origin by https": {"origin": f"https://127.0.0.1:{PORT}"},
    "origin that begins like ours": {"origin": f"{ORIGIN}.evil.example"},
    "cross-site fetch": {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"},
    "same-site fetch": {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"},
    "in a frame": {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
    "odd site": {"sec-fetch-site": "SAME-ORIGIN, cross-site"},
}  # fmt: skip


@pytest.mark.fault("another web site asks the local page", row="B.6", sees="it is refused", safe="everything")
@pytest.mark.parametrize("kind", EVIL)
def test_no_route_answers_another_site(app: Starlette, client: TestClient, kind: str) -> None:
    for method, path in routes_of(app):
        answer = ask(client, method, path, **EVIL[kind])
        assert answer.status_code in (403, 421), (kind, method, path, answer.status_code)
        assert answer.json()["id"].startswith("refused."), path


@pytest.mark.parametrize("token", [None, "", "old", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "é" * 9])
def test_no_route_but_the_page_itself_answers_without_the_token(
    app: Starlette, client: TestClient, token: str | None
) -> None:
    raw = token if token is None else token.encode()
    for method, path in routes_of(app):
        answer = ask(client, method, path, **{guard.TOKEN_HEADER: raw})  # type: ignore[arg-type]
        assert answer.status_code == (200 if path in OPEN else 401), (method, path)
        if path in OPEN:
            assert method == "GET"
    assert {path for _, path in routes_of(app) if "api/" not in path} == OPEN


def test_what_changes_something_needs_origin_and_json(app: Starlette, client: TestClient) -> None:
    for method, path in routes_of(app):
        if method == "POST":
            assert ask(client, "POST", path, origin=None).status_code == 403, path
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None):
                assert ask(client, "POST", path, content_type=kind).status_code == 415, (path, kind)


def test_methods_are_few_and_reading_changes_nothing(app: Starlette, client: TestClient) -> None:
    known = routes_of(app)
    for path in {path for _, path in known}:
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"):
            if (method, path) not in known:
                answer = client.request(method, path, headers={**GOOD, **POSTED})
                assert answer.status_code == 405, (method, path)
    assert {path for method, path in known if method == "POST"} == {
        "/api/plan", "/api/cards", "/api/read", "/api/toml", "/api/advice", "/api/compare", "/api/exact",
        "/api/form", "/api/jobs/0123456789abcdef/stop"
    } & {path for _, path in known}  # fmt: skip


def test_every_answer_has_safe_headers_and_none_for_other_sites(app: Starlette, client: TestClient) -> None:
    answers = [ask(client, method, path) for method, path in routes_of(app)]
    answers += [ask(client, "GET", "/nowhere"), ask(client, "GET", "/", host="evil.example"), ask(client, "PUT", "/")]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert "set-cookie" not in answer.headers


def test_only_the_page_may_be_opened_by_a_link_from_elsewhere(app: Starlette, client: TestClient) -> None:
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    for method, path in routes_of(app):
        assert (ask(client, method, path, **link).status_code == 200) == (path in OPEN), path


def test_a_header_that_is_there_twice_is_none(client: TestClient) -> None:
    for double in ("host", "origin", guard.TOKEN_HEADER):
        headers = [*{**GOOD, **POSTED}.items(), (double, "evil.example")]
        assert client.post("/api/plan", headers=headers, content=b"{}").status_code in (401, 403, 421)


async def answer_to(app: Starlette, target: str) -> tuple[int, str]:
    """(status, body) of a GET as uvicorn would hand it on: no client in between that tidies the path."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    path, _, query = target.partition("?")
    headers = [(k.encode(), v.encode()) for k, v in GOOD.items()]
    scope = {"type": "http", "method": "GET", "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(),
             "headers": headers, "root_path": "", "scheme": "http", "server": ("127.0.0.1", PORT)}  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:]).decode("utf-8", "replace")


@pytest.mark.fault("a path that leads out of the runs", row="B.6", sees="404", safe="every other file")
def test_no_path_leads_out_of_what_is_listed(app: Starlette, tmp_path: Path) -> None:
    secret = "the secret of another folder"
    (tmp_path / "run.json").write_text(secret)
    known = {path for _, path in routes_of(app)}

    async def work() -> int:
        asked = 0
        for text in traversals():
            for address in (
                f"/{text}",
                f"/api/runs/{text}",
                f"/api/runs/{text}/live",
                f"/api/runs/{text}/report",
                f"/api/jobs/{text}",
            ):
                status, body = await answer_to(app, address)
                assert status in (404, 405) or address.partition("?")[0] in known, address
                assert secret not in body
                assert "root:" not in body
                asked += 1
        return asked

    assert asyncio.run(work()) > 800


def test_no_value_of_the_form_is_taken_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("etc/passwd", "run.json", "evil"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("n_layer = 3")
    for text in traversals():
        named = [{"kind": kind, "model": text} for kind in ("pretraining", "fine-tuning", "generation")]
        for values in (*named, {"values": {"init_from": "/" + text}}, {"gpu": text}):
            with pytest.raises((UserError, ValidationError)):
                calls.plan(Form.model_validate(values))
        with pytest.raises(UserError):
            calls.read(calls.Pasted(name=text[:200], text=f"init_from = {'/' + text!r}"))


def test_datasets_are_looked_up_and_never_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset outside data/ is not found, whatever way its name is written; one inside is."""
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "outside", tmp_path / "data" / "inside"):
        folder.mkdir(parents=True)
        for split in ("train", "val"):
            (folder / f"{split}.bin").write_bytes(b"\0\0" * 999)
    (tmp_path / "data" / "link").symlink_to(tmp_path / "outside")

    def tokens(name: str, count: str = "1") -> int | None:
        (found,) = line_of(Form(values={"dataset": name}, count=count)).request().forecasts()
        plan = found.plan
        return (plan.one_card if count != "1" else plan).work.dataset_tokens

    assert tokens("inside") == tokens("inside", "2") == 999
    for name in (
        str(tmp_path / "outside"),
        "../outside",
        "data/../outside",
        "./inside/../../outside",
        "link",
        "inside/",
    ):
        assert tokens(name) is None, name
        assert tokens(name, "2") is None, name


def test_links_and_pipes_are_no_runs(tmp_path: Path) -> None:
    import os

    write_run(tmp_path / "elsewhere" / "real")
    roots = tmp_path / "runs"
    write_run(roots / "good")
    (roots / "linked").symlink_to(tmp_path / "elsewhere" / "real")
    (roots / "linked-folder").symlink_to(tmp_path / "elsewhere")
    write_run(roots / "linked-file")
    (roots / "linked-file" / "sample.txt").symlink_to("/etc/passwd")
    write_run(roots / "pipe")
    (roots / "pipe" / "events.jsonl").unlink()
    os.mkfifo(roots / "pipe" / "events.jsonl")
    known = routes.runs.Runs([roots]).all()
    assert [run.path.name for run in known.values()] == ["good"]


def test_huge_and_endless_bodies_are_cut_off(app: Starlette, client: TestClient) -> None:
    for method, path in routes_of(app):
        if method != "POST":
            continue
        headers = {**GOOD, **POSTED}
        answer = client.post(path, headers=headers, content=b"x" * (guard.MAX_BODY_BYTES + 1))
        assert answer.status_code == 413, path
        for length in ("9" * 30, "-1", "1e9", "٣"):
            lying = {**headers, "content-length": length.encode()}
            assert client.post(path, headers=lying, content=b"{}").status_code == 413, (path, length)  # type: ignore[arg-type]

        def endless() -> Iterator[bytes]:
            for _ in range(10_000):
                yield b"x" * 1024

        assert client.post(path, headers=headers, content=endless()).status_code == 413, path


def test_a_body_that_does_not_come_is_not_waited_for(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_TIMEOUT_S", 0.05)
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(3600)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(k.encode(), v.encode()) for k, v in {**GOOD, **POSTED}.items()]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/api/plan",
        "headers": headers,
        "query_string": b"",
        "root_path": "",
    }
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 5))
    assert sent[0]["status"] == 408


def test_web_sockets_are_refused(app: Starlette) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app({"type": "websocket", "path": "/", "headers": []}, send, send))  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]


BODIES = [b"", b"null", b"[]", b"1", b'"x"', b"{", b"\xff\xfe", b"[" * 20_000, b'{"values": 1}', b'{"model": null}',
          b'{"values": {"../x": 1}}', b'{"values": {"n_layer": [1]}}', b'{"values": {"n_layer": {}}}', b'{"unknown": 1}',
          b'{"gpu": "' + b"x" * 5000 + b'"}', b'{"text": 5}', b'{"values": {"n_layer": NaN}}', b'{"cards": ["a", 1]}',
          b'{"values": {"n_layer": 1e999}}', b'{"values": {"--n_layer": 1}}']  # fmt: skip


def test_bodies_that_are_no_requests_get_a_sentence(app: Starlette, client: TestClient) -> None:
    for method, path in routes_of(app):
        if method == "POST" and not path.endswith("/stop"):
            for body in BODIES:
                answer = client.post(path, headers={**GOOD, **POSTED}, content=body)
                assert answer.status_code in (400, 422), (path, body[:40], answer.status_code)
                assert answer.json()["problems"][0]["message"], (path, body[:40])


@pytest.mark.fault("a run whose name is HTML", row="B.6", sees="its name as text", safe="everything")
def test_what_a_run_says_of_itself_stays_text(client: TestClient) -> None:
    """A run's name comes as JSON, without what commands a terminal, and the page makes text nodes of all of it."""
    listed = client.get("/api/runs", headers=GOOD)
    assert listed.headers["content-type"].startswith("application/json")
    run = listed.json()["runs"][0]
    assert run["name"].startswith("<img src=x onerror=alert(1)>")
    whole = client.get(f"/api/runs/{run['id']}", headers=GOOD)
    report = client.get(f"/api/runs/{run['id']}/report", headers=GOOD)
    assert whole.status_code == report.status_code == 200
    for text in (listed.text, whole.text, report.text):
        assert "\\u001b" not in text
        assert "\x1b" not in text
    scripts = {path: content.decode() for path, (content, _) in routes.files().items() if path.endswith(".js")}
    assert len(scripts) > 5
    for path, script in scripts.items():
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "srcdoc",
            "DOMParser",
            'setTimeout("',
        ):
            assert way not in script, (path, way)
    assert "<script>" not in routes.files()["/"][0].decode()
    assert "style=" not in routes.files()["/"][0].decode()


def test_the_token_is_in_no_answer_and_no_file(app: Starlette, client: TestClient, tmp_path: Path) -> None:
    for method, path in routes_of(app):
        assert TOKEN not in ask(client, method, path).text
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert TOKEN not in file.read_text("utf-8", "replace"), file


def test_values_of_the_form_cannot_become_other_options(client: TestClient) -> None:
    """Whatever stands in a value stays the value of its knob: no second word, no file."""
    for text in ("12 --n_head=1", "12\n--n_head=1", "=1", "--n_head=1", "config.toml", "@file", "$(id)", "`id`"):
        body = json.dumps({"values": {"n_layer": text}})
        answer = client.post("/api/plan", headers={**GOOD, **POSTED}, content=body)
        assert answer.status_code == 422, text
        assert {problem["key"] for problem in answer.json()["problems"]} == {"n_layer"}, text
    evil = string.printable
    answer = client.post("/api/plan", headers={**GOOD, **POSTED}, content=json.dumps({"values": {"currency": evil}}))
    assert answer.status_code == 422


# -- a run is only looked at -------------------------------------------------------------------------------


def test_looking_at_a_run_changes_nothing_of_it(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "runs" / "live", status="running")
    directory.acquire()
    try:
        before = {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in directory.path.iterdir()}
        known = routes.runs.Runs([tmp_path / "runs"])
        (id,) = known.all()
        run = known.get(id)
        assert run is not None
        curve = known.curve(id, run)
        assert routes.runs.page(id, run, curve)["status"] == "running"
        assert routes.runs.live_answer(run, curve, 0)["status"] == "running"
        assert known.curve(id, run) is curve
        assert known.listed()["runs"][0]["steps"] == 12
        assert routes.runs.comparisons(known)["runs"]
        assert before == {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in directory.path.iterdir()}
    finally:
        directory.release()


def test_a_held_lock_is_seen_without_touching_it(tmp_path: Path) -> None:
    import os
    import time

    if not Path("/proc/locks").exists():
        pytest.skip("this system lists no locks")
    directory = write_run(tmp_path / "run", status="running")
    long_ago = time.time() - 3600
    directory.acquire()
    for name in ("run.json", "metrics.jsonl"):
        os.utime(directory.path / name, (long_ago, long_ago))
    if not lock_is_held(directory.path / "run.lock"):
        directory.release()
        pytest.skip("this kernel does not show its locks here")
    assert ObservedRun(directory.path).read_record().status == "running"
    directory.release()
    assert not lock_is_held(directory.path / "run.lock")
    assert ObservedRun(directory.path).read_record().status == "killed"


def test_a_long_curve_is_thinned_and_followed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(20_000):
            file.write(
                json.dumps({"kind": "step", "step": step, "loss": 1.0, "step_s": float("nan") if step % 2 else 1.0})
                + "\n"
            )
            if step % 1000 == 0:
                file.write(json.dumps({"kind": "evaluation", "step": step, "train_loss": 1.0, "val_loss": 2.0}) + "\n")
        file.write('{"kind": "step", "step": 20000, "lo')  # being written
    curve = Curve(path)
    lines = curve.lines()
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert 600 <= len(steps) <= 2401
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == list(range(0, 20_000, 1000))
    assert json.dumps(lines, allow_nan=False)
    seen = curve.end_bytes
    assert curve.lines() == lines
    assert curve.end_bytes == seen < path.stat().st_size
    more = [f'{{"kind": "step", "step": {20_001 + i}, "loss": 0.4}}\n' for i in range(40)]
    with path.open("a") as file:
        file.write("".join(['ss": 0.5}\nnot json\n', *more]))
    assert curve.lines() == Curve(path).lines()  # read on, it is as if read anew
    assert curve.end_bytes == path.stat().st_size
    assert [line["step"] for line in curve.lines() if line["kind"] == "step"][
        -1
    ] == 20_040  # the newest is never left out
    path.write_text('{"kind": "step", "step": 5, "loss": 0.4}\n')  # a resumed run forgets what it does again
    assert [line["step"] for line in curve.lines()] == [5]
