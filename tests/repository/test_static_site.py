"""The planner as a static site: its answers are the server's, to the byte of JSON, and nothing leaves the browser.

The proofs in Chromium are slow ones; they are skipped where there is no browser, or where Pyodide cannot be fetched."""

import contextlib
import importlib.util
import json
import random
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient

from foretrain.base import messages
from foretrain.base.messages import say
from foretrain.config.presets import PRESETS, models
from foretrain.config.resolve import resolve
from foretrain.hardware.catalogue import catalogue
from foretrain.web import calls, form, routes
from tests.kit.browser import answered, files_served, in_chromium, needs
from tests.kit.browser import browser as chromium
from tests.kit.command import REPO
from tests.kit.finetune_files import AXOLOTL, LLAMA_FACTORY
from tests.kit.page import GOOD, NANOGPT, ORIGIN, PORT, POSTED, TOKEN

SITE = REPO / "static_site"
PAIRS = 220
ASK = """async asked => {
  const { send } = await import(new URL("transport.js", document.baseURI));
  const answers = [];
  for (const [path, body] of asked) answers.push(await send("POST", path, JSON.stringify(body)));
  return answers;
}"""
__all__ = ["chromium"]  # a fixture that holds here, too


def drawn(random: random.Random) -> dict[str, Any]:
    """A form as somebody might leave it: a preset or none, a card, some knobs at some of their stops or choices."""
    chosen = random.sample(
        [f for f in calls.fields() if f["stops"] or f["choices"] or f["type"] == "bool"], random.randint(0, 6)
    )
    values = {}
    for field in chosen:
        options = field["stops"] or field["choices"] or ["true", "false"]
        values[field["name"]] = str(random.choice(options))
    return {
        "model": random.choice(["", *PRESETS]), "gpu": random.choice(list(catalogue())), "values": values,
        "others": random.choice(["", "", "2GB", "1.5GiB", "700MB", "2 chairs"]), "cards": [],
    }  # fmt: skip


def tunings() -> list[tuple[str, dict[str, Any]]]:
    """The same of fine-tuning: forms as somebody might leave them, wrong ones among them; texts that are pasted."""
    drawing, small = random.Random(11), ["smollm2-135m", "qwen3-0.6b", "gemma-3-270m", "pythia-160m", "gpt2"]
    kind, config = {"kind": "fine-tuning"}, json.dumps(dict(models()["qwen3-0.6b"].config))
    asked: list[tuple[str, dict[str, Any]]] = [("/api/form", kind)]
    for _ in range(14):
        chosen = drawing.sample(calls.fields("fine-tuning"), drawing.randint(1, 7))
        values = {f["name"]: str(drawing.choice(f["stops"] or f["choices"] or ["true", "2"])) for f in chosen}
        card, others = drawing.choice(list(catalogue())), drawing.choice(["", "2GB", "2 chairs"])
        named = {"model": drawing.choice(small), "values": values, "gpu": card, "others": others}
        asked.append(("/api/plan", {**kind, **named}))
    over = {**kind, "model": "smollm2-135m", "values": {"seq_len": "4096"}, "gpu": "RTX 3060 12GB"}
    values = {"method": "qlora", "batch_size": "1"}
    asked += [
        ("/api/plan", {**kind, "model": "mine", "config": config, "values": values}),
        ("/api/plan", {**kind, "model": "/etc/passwd"}),
        ("/api/cards", {**kind, "model": "gpt2", "cards": ["RTX 4090", "RTX 3060 12GB"]}),
        ("/api/read", {**kind, "name": "config.json", "text": config}),
        ("/api/advice", over),
    ]
    for text in (AXOLOTL, LLAMA_FACTORY, "a: &x [1]\nb: *x\nbase_model: !!python/name:os.system x"):
        asked.append(("/api/read", {**kind, "name": "run.yaml", "text": text}))
    text = {"kind": "generation", "model": "qwen3-8b", "values": {"weights": "q8_0"}}
    asked += [(f"/api/{what}", text) for what in ("plan", "advice", "cards")]
    return asked


def questions() -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of everything that the page asks: mostly plans, and some of the rest, wrong ones among them."""
    drawing = random.Random(9)
    asked: list[tuple[str, dict[str, Any]]] = [("/api/plan", drawn(drawing)) for _ in range(PAIRS)]
    asked += [("/api/toml", drawn(drawing)) for _ in range(10)]
    for _ in range(10):
        asked.append(("/api/cards", {**drawn(drawing), "cards": drawing.sample(list(catalogue()), 3)}))
    for goal, step in ((None, "foretrain"), ("fit", "nanogpt"), ("speed", "foretrain"), ("cost", "foretrain")):
        asked.append(("/api/advice", {"model": "gpt2-350m", "gpu": "RTX 3060 12GB", "goal": goal, "trainer": step}))
    asked += [
        ("/api/read", {"name": "mine.py", "text": NANOGPT}),
        ("/api/read", {"name": "", "text": "preset = 'gpt2-350m'"}),
    ]
    asked += [
        ("/api/read", {"name": "evil.py", "text": "import os\nn_layer = os.getpid()"}),
        ("/api/plan", {"gpu": "RTX 9999"}),
        ("/api/plan", {"gpu": "RTX 4090", "count": "2"}),
        ("/api/plan", {"gpu": "RTX 4090", "count": "two"}),
        ("/api/advice", {"gpu": "RTX 4090", "count": "4", "goal": "speed"}),
    ]
    return [*asked, *tunings(), ("/api/plan", {"values": {"n_layers": "7"}}), ("/api/plan", {"no_such": 1})]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(routes.create_app(PORT, TOKEN, [tmp_path]), base_url=ORIGIN) as made:
        yield made


def servers(client: TestClient, path: str, body: dict[str, Any]) -> list[Any]:
    answer = client.post(path, headers={**GOOD, **POSTED}, json=body)
    while answer.status_code == 202:  # advice that takes long
        answer = client.get(f"/api/jobs/{answer.json()['job']}", headers=GOOD)
    return [answer.status_code, answer.json()]


def test_without_http_the_answers_are_the_same(client: TestClient) -> None:
    for path, body in questions()[:12] + questions()[-5:]:
        assert json.loads(calls.post(path, json.dumps(body), "en")) == servers(client, path, body)


def test_the_planner_asks_nothing_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "NO_MACHINE", True)
    start = json.loads(calls.begin("en"))
    assert [device["id"] for device in calls.devices()] == list(catalogue())
    assert (start["no_runs"], start["no_exact"]) == (say("page.site.no_runs"), say("page.site.no_exact"))
    for name in (form.HERE, form.CPU):
        status, answer = json.loads(calls.post("/api/plan", json.dumps({"gpu": name}), "en"))
        assert (status, answer["id"]) == (422, "page.no_machine")


def test_what_is_not_in_the_browser_is_not_needed() -> None:
    code = """
import sys
sys.path.insert(0, "static_site")
from build import ROOMS_LEFT_OUT
rooms = [f"foretrain.{'data.' if room == 'prepare' else ''}{room}" for room in ROOMS_LEFT_OUT]
for name in ("click", "rich", "pynvml", "filelock", "starlette", "uvicorn", "torch", "numpy", *rooms):
    sys.modules[name] = None  # its import fails
from foretrain.web import calls, form
form.NO_MACHINE = True
calls.begin("en")
for path in ("plan", "advice", "cards", "toml"):
    assert calls.post(f"/api/{path}", "{}", "en").startswith("[200,"), path
assert calls.post("/api/read", '{"text": "n_layer = 3"}', "en").startswith("[200,")
for kind in ("fine-tuning", "generation"):
    for path in ("plan", "advice", "cards"):
        assert calls.post(f"/api/{path}", f'{{"kind": "{kind}", "model": "gpt2"}}', "en").startswith("[200,"), path
    assert calls.post("/api/form", f'{{"kind": "{kind}"}}', "en").startswith("[200,"), kind
text = "base_model: gpt2\\\\nmicro_batch_size: 2"
assert calls.post("/api/read", '{"kind": "fine-tuning", "text": "' + text + '"}', "en").startswith("[200,")
left_out = [name for name in sys.modules if name.startswith(tuple(f"{room}." for room in rooms))]
assert not left_out, left_out
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO)


def test_the_scripts_import_what_there_is() -> None:
    named = [
        found
        for script in ("compile.mjs", "worker.js")
        for found in re.findall(
            r"from (foretrain[\w.]*) import (\w+)", (REPO / "static_site" / script).read_text("utf-8")
        )
    ]
    assert len(named) >= 3
    for module, name in named:
        assert importlib.util.find_spec(f"{module}.{name}"), (module, name)


def test_the_browser_gets_the_versions_that_are_tested_here() -> None:
    pinned = re.findall(r"^([\w-]+)==([\w.]+)", (REPO / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    here = {name.replace("_", "-"): version for name, version in pinned}
    wanted = re.findall(
        r"^([\w-]+)==([\w.]+) --hash=sha256:[0-9a-f]{64}$", (SITE / "requirements.txt").read_text("utf-8"), re.MULTILINE
    )
    assert len(wanted) == 6
    assert {name: here[name] for name, _ in wanted} == dict(wanted)


def test_every_question_that_needs_no_server_is_answered_by_both() -> None:
    """A route that is added to calls.py is asked above, too."""
    assert {path for path, _ in questions()} == set(calls.POSTED)


# In Chromium.


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("host") / "some" / "planner"
    result = subprocess.run(
        [sys.executable, str(SITE / "build.py"), "--out", str(folder), "--cache", str(REPO / "build" / "downloads")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if result.returncode == 4:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def site(built: Path) -> Iterator[str]:
    """Where it is served, under a path of its own."""
    with files_served(built.parent.parent) as link:
        yield f"{link}/some/planner/"


@contextlib.contextmanager
def opened(chromium: Any, link: str, **options: Any) -> Iterator[Any]:
    """A tab at the site; fails on any console message, and on any request that leaves its folder."""
    context = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    page, wrong = context.new_page(), []
    page.set_default_timeout(120_000)
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    base = link.partition("#")[0]
    context.on("request", lambda asked: None if asked.url.startswith((base, "blob:")) else wrong.append(asked.url))
    page.goto(link)
    yield page
    context.close()
    assert not wrong


def ready(page: Any) -> None:
    page.wait_for_selector("#planner-state[data-ready]")


@pytest.mark.slow
@in_chromium
def test_the_sites_answers_are_the_servers(chromium: Any, site: str, client: TestClient) -> None:
    asked = questions()
    with opened(chromium, site) as page:
        ready(page)
        answers = page.evaluate(ASK, asked)
    statuses = []
    for (path, body), answer in zip(asked, answers, strict=True):
        expected = servers(client, path, body)
        assert answer == expected, (path, body)
        statuses.append(expected[0])
    plans = statuses[:PAIRS]
    assert plans.count(200) >= 120
    assert plans.count(422) >= 5


@pytest.mark.slow
@in_chromium
def test_the_page_is_drawn_before_python_is_there(chromium: Any, site: str, client: TestClient) -> None:
    context = chromium.new_context()
    context.route("**/pyodide/**", lambda route: route.abort())
    page = context.new_page()
    page.goto(site)
    answered(page)
    assert page.locator(".figures > div").count() >= 7
    for kind in ("pretraining", "fine-tuning", "generation"):
        made = page.evaluate(f"async () => (await fetch('{kind}-en.json')).json()")
        assert set(made) == {"/api/form", "/api/plan"}
        for path, known in made.items():
            status, answer = servers(client, path, json.loads(known["asked"]))
            if path == "/api/form":  # a server has a CPU
                answer["devices"] = [device for device in answer["devices"] if device["id"] != form.CPU]
            assert known["answer"] == [status, answer], path
    page.wait_for_selector("#planner-state .bad")  # Python did not come: said once, and to every question
    page.get_by_label("batch_size sequences", exact=True).fill("16")
    page.wait_for_selector(".errors .bad")
    assert "did not load" in page.locator(".errors").inner_text()
    context.close()


@pytest.mark.slow
@in_chromium
def test_a_host_that_says_gzip_of_what_is_packed_serves_it_too(chromium: Any, built: Path) -> None:
    """The browser then unpacks the picture before the page has it."""
    with files_served(built, packed="python.picture") as link, opened(chromium, f"{link}/") as page:
        ready(page)
        before = needs(page)
        page.get_by_label("batch_size sequences", exact=True).fill("16")
        answered(page)
        assert needs(page) > 1.3 * before


@pytest.mark.slow
@in_chromium
def test_a_file_that_does_not_come_ends_in_a_sentence(chromium: Any, site: str) -> None:
    context = chromium.new_context()
    context.route("**/site.json", lambda route: route.fulfill(status=404))
    page = context.new_page()
    page.goto(site)
    page.wait_for_selector("#main .bad")
    assert "could not read one of its files (site.json: 404)" in page.locator("#main").inner_text()
    context.close()


@pytest.mark.slow
@in_chromium
def test_all_that_the_page_does_it_does_without_a_server(chromium: Any, site: str, tmp_path: Path) -> None:
    with opened(chromium, site) as page:
        ready(page)
        before = needs(page)
        page.get_by_label("batch_size sequences", exact=True).fill("16")
        answered(page)
        assert needs(page) > 1.3 * before
        page.get_by_text("Your own config").click()
        page.get_by_label("Text of the config").fill(NANOGPT)
        page.get_by_role("button", name="Use it").click()
        page.wait_for_selector("#paste-said .good")
        page.get_by_label("GPU or CPU").select_option("RTX 3090")
        answered(page)
        with page.expect_download() as waiting:
            page.get_by_role("button", name="Download as TOML").click()
        waiting.value.save_as(tmp_path / "downloaded.toml")
        config = resolve([str(tmp_path / "downloaded.toml")]).config
        assert (config.n_embd, config.dropout) == (384, 0.2)
        assert tomllib.loads((tmp_path / "downloaded.toml").read_text())["model"]["n_layer"] == 6
        link, strip = page.url, page.locator(".strip").inner_text()
        page.evaluate("navigator.clipboard.writeText = text => { window.copied = text; return Promise.resolve(); }")
        page.get_by_role("button", name="Copy link").click()
        assert page.evaluate("window.copied") == link
        page.get_by_role("heading", name="Compare cards").click()
        page.get_by_role("button", name="Compare", exact=True).click()
        page.wait_for_selector(".cards table")
        page.get_by_role("heading", name="What to change").click()
        page.get_by_role("button", name="Find changes").click()
        page.locator(".advice button[aria-label^=Apply]").first.click()
        answered(page)
        assert page.locator(".strip").inner_text() != strip
        assert page.get_by_role("button", name="Exact").is_disabled()
        assert say("page.site.no_exact") in page.inner_text("body")
    with opened(chromium, link) as page:  # the link alone says it all
        ready(page)
        answered(page)
        assert page.locator(".strip").inner_text() == strip


@pytest.mark.slow
@in_chromium
def test_fine_tuning_is_planned_without_a_server(chromium: Any, site: str) -> None:
    with opened(chromium, f"{site}#/finetune") as page:
        page.wait_for_selector(".finetune .results[aria-busy=false] .lines dt")  # worked out when the site was built
        assert "Fits." in page.locator(".verdict").inner_text()
        ready(page)
        page.get_by_label("Model", exact=True).select_option("smollm2-135m")
        answered(page)
        before = needs(page)
        page.get_by_label("batch_size sequences", exact=True).fill("32")
        answered(page)
        assert needs(page) > 1.3 * before
        page.get_by_text("Your own model or config").click()
        page.get_by_label("Text of the config").fill(AXOLOTL.replace("NousResearch/Llama-3.2-1B", "gpt2"))
        page.get_by_role("button", name="Use it").click()
        page.wait_for_selector("#paste-said .good")
        assert "context_paralel_size" in page.locator("#paste-said").inner_text()
        answered(page)
        page.get_by_label("method", exact=True).select_option("full")
        page.get_by_label("seq_len tokens", exact=True).fill("1024")
        page.get_by_label("batch_size sequences", exact=True).fill("128")
        page.get_by_label("GPU or CPU").select_option("RTX 3060 12GB")
        answered(page)
        page.get_by_text("What to change").click()
        page.get_by_role("button", name="Find changes").click()
        page.locator(".advice tbody button").first.click()
        answered(page)
        link, strip = page.url, page.locator(".strip").inner_text()
    with opened(chromium, link) as page:  # the link alone says it all
        page.wait_for_selector(".finetune .results[aria-busy=false] .lines dt")
        assert page.locator(".strip").inner_text() == strip


@pytest.mark.slow
@in_chromium
@pytest.mark.parametrize("id", messages.languages())
def test_the_site_speaks_every_language(chromium: Any, site: str, client: TestClient, id: str) -> None:
    asked = questions()[:3]
    with opened(chromium, site, locale=f"{id}-XX") as page:
        answered(page)
        assert page.evaluate("[document.documentElement.lang, document.documentElement.dir]") == [
            id,
            messages.languages()[id].direction,
        ]
        ready(page)
        with messages.speaking(id):
            assert page.locator("#planner-state").inner_text() == say("page.site.ready")
        headers = {**GOOD, **POSTED, "x-foretrain-language": id}
        for path, body in asked:
            expected = client.post(path, headers=headers, json=body)
            assert page.evaluate(ASK, [[path, body]]) == [[expected.status_code, expected.json()]]
        page.locator("#language").select_option("en")
        page.wait_for_selector("html[lang=en]")
        page.get_by_text(say("page.site.ready"), exact=True).wait_for()


@pytest.mark.slow
@in_chromium
def test_runs_are_said_to_be_elsewhere(chromium: Any, site: str) -> None:
    with opened(chromium, f"{site}#/runs") as page:
        page.wait_for_selector("main .box")
        assert page.locator("main").inner_text() == say("page.site.no_runs")
        assert page.get_by_role("link", name="Runs").count() == 0
        ready(page)


@pytest.mark.slow
@in_chromium
def test_neither_the_page_nor_its_worker_can_reach_another_host(chromium: Any, site: str) -> None:
    """Even code that tried to: the site's content security policy holds in the worker, too."""
    heard: list[str] = []

    class Ear(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.path)
            self.send_response(204)
            self.send_header("access-control-allow-origin", "*")
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            pass

    other = HTTPServer(("127.0.0.1", 0), Ear)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    elsewhere = f"http://127.0.0.1:{other.server_port}"
    attempt = "async where => { try { await fetch(where); return 'reached'; } catch (error) { return error.name; } }"
    context = chromium.new_context()
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(site)
    ready(page)
    [worker] = page.workers
    assert page.evaluate(attempt, f"{elsewhere}/page") == "TypeError"
    assert worker.evaluate(attempt, f"{elsewhere}/worker") == "TypeError"
    assert page.evaluate(attempt, f"{site}state.js") == "reached"
    assert worker.evaluate(attempt, f"{site}state.js") == "reached"
    context.close()
    other.shutdown()
    other.server_close()
    assert heard == []
