"""The page's answers: the form is the knobs, a plan is what `plan` says, a config goes out and comes back the same."""

import contextlib
import gzip
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient

from foretrain.base import messages
from foretrain.base.errors import ConfigError
from foretrain.base.messages import say
from foretrain.base.quantities import parse_bytes
from foretrain.base.units import format_bytes, format_duration
from foretrain.config.options import OPTIONS, named
from foretrain.config.resolve import from_text, resolve, to_toml
from foretrain.hardware.catalogue import catalogue, find
from foretrain.predict.plan import plan
from foretrain.predict.trace import interpreter
from foretrain.reports import making, plots
from foretrain.reports.html import block_json
from foretrain.reports.views import memory as memory_view
from foretrain.web import calls, child, guard, routes, server
from tests.kit.command import REPO, free_port
from tests.kit.language import ARABIC, BRACKETS, pretending
from tests.kit.page import GOOD, NANOGPT, ORIGIN, PORT, POSTED, TOKEN, client, get, post, serving, write_run  # noqa: F401


def test_the_form_has_every_knob_that_has_an_effect() -> None:
    found = {field["name"]: field for field in calls.fields()}
    wanted = {knob.name: knob for knob in OPTIONS.values() if not knob.inert}
    assert set(found) == set(wanted)
    for name, field in found.items():
        knob = wanted[name]
        assert (field["help"], field["unit"], field["default"], field["type"]) == (
            knob.help,
            knob.unit,
            knob.default,
            knob.type,
        )
        assert messages.has(f"page.group.{field['group']}")
        assert (field["type"] == "choice") == bool(field["choices"])
    shown = [field["basic"] for field in calls.fields()]
    assert sum(shown) > 10
    assert shown == sorted(shown, reverse=True), "the basic ones come first"


@pytest.mark.parametrize("name", named(lambda option: option.slider))
def test_a_slider_stops_only_where_its_knob_may_stand(name: str) -> None:
    stops = calls.stops(OPTIONS[name])
    assert stops == sorted(set(stops))
    assert 5 < len(stops) < 120
    for value in (stops[0], stops[-1]):  # what config.py allows, asked of the config itself
        resolve([f"--{name}={value}", "--decay_lr=false", "--n_head=1", "--activation_checkpointing=true", "--eval_block_size=0"]
                + (["--max_iters=20000"] if name == "warmup_iters" else []) + (["--activation_checkpointing=false"] if name.startswith("activation_m") else []))  # fmt: skip


def test_a_plan_on_the_page_is_the_plan(client: TestClient) -> None:
    asked = {
        "model": "gpt2-124m",
        "values": {"batch_size": "12", "compile": "false"},
        "gpu": "RTX 4090",
        "others": "2GB",
    }
    answer = post(client, "/api/plan", asked)
    expected = plan(
        resolve(["gpt2-124m", "--batch_size=12", "--compile=false"]).config,
        find("4090"),
        used_by_others_bytes=2 * 10**9,
    )
    bars = memory_view.phase_pictures(expected)
    assert answer["pictures"] == json.loads(json.dumps([block_json(one) for one in bars]))
    most = max(phase.needed_expected_bytes for memory in expected.memories for phase in memory.phases)
    for shown, drawn, strip, memory in zip(answer["pictures"], bars, answer["strip"], expected.memories, strict=True):
        assert shown["figure"][2][3][2].startswith("estimated")
        assert drawn.scale_bytes == most  # both pictures have one scale
        total = next(row for row in shown["numbers"]["rows"] if row[0] == say("column.sum"))
        for number, phase in enumerate(memory.phases):
            assert total[number + 1] == format_bytes(phase.needed_expected_bytes)
            sizes = [size for _, size in drawn.bars[number].parts]
            assert sum(sizes) == max(phase.needed_expected_bytes, phase.allocated_bytes)
        assert (drawn.limit_bytes, drawn.card_bytes) == (expected.available_bytes, expected.gpu.memory_bytes)
        assert strip["share"] == pytest.approx(
            strip["limit"] * memory.neediest.needed_expected_bytes / (expected.available_bytes or 0)
        )
    figures = {figure["id"]: figure["value"] for figure in answer["figures"]}
    assert figures["memory_needed"] == format_bytes(expected.memory_of("foretrain").worst.needed_expected_bytes)
    assert {"step", "wall", "speed", "mfu", "energy", "cost"} < set(figures)
    sources = {figure["id"]: figure["source"] for figure in answer["figures"]}
    assert (sources.pop("available"), sources.pop("tokens")) == ("RTX 4090", "config")
    assert all(source.startswith(("estimated", "calibrated")) for source in sources.values())
    assert answer["config"]["batch_size"] == 12


def test_a_tile_has_the_range_of_its_figure(client: TestClient) -> None:
    answer = post(client, "/api/plan", {"model": "gpt2-124m", "gpu": "RTX 4070", "values": {"price_per_hour": "0.3"}})
    found = plan(resolve(["gpt2-124m", "--price_per_hour=0.3"]).config, find("4070"))
    timing, worst = found.timing_of("foretrain"), found.memory_of("foretrain").worst
    total = timing.total_s
    ranges = {figure["id"]: figure["range"] for figure in answer["figures"]}
    assert ranges["wall"] == f"{format_duration(total.low_s)} – {format_duration(total.high_s)}"
    assert (
        ranges["memory_needed"] == f"{format_bytes(worst.needed_low_bytes)} – {format_bytes(worst.needed_high_bytes)}"
    )
    assert all(ranges[id] for id in ("step", "speed", "mfu", "energy", "cost"))
    low, high = (float(end.split()[0].replace(",", "")) for end in ranges["speed"].split(" – "))
    assert low < timing.tokens_per_s < high


def test_lines_have_the_colours_of_reports(client: TestClient) -> None:
    style = client.get("/chart.css").text
    first = style[: style.index("@media")]
    assert re.findall(r"--line-\d: (#\w+);", first) == list(plots.LINES)


def groups(answer: dict[str, Any]) -> dict[str, list[int]]:
    rows = answer["pictures"][0]["numbers"]["rows"]
    return {name: [0 if cell == "–" else parse_bytes(cell) for cell in cells] for name, *cells in rows}


def test_reserved_bytes_are_not_what_an_evaluation_needs(client: TestClient) -> None:
    shown = groups(post(client, "/api/plan", {"model": "gpt2-124m", "gpu": "RTX 4070"}))
    found = plan(resolve(["gpt2-124m"]).config, find("4070")).memory_of("foretrain")
    phases = [phase.phase for phase in found.phases]
    kept, overhead = (dict(zip(phases, shown[say(f"group.{id}")], strict=True)) for id in ("kept", "overhead"))
    assert [id for id, size in kept.items() if size] == ["evaluate_steady"]
    assert kept["evaluate_steady"] > overhead["evaluate_steady"]
    assert overhead["evaluate_steady"] == overhead["steady_step"]


def test_on_a_cpu_the_rest_is_python_and_torch(client: TestClient) -> None:
    shown = groups(post(client, "/api/plan", {"model": "gpt2-30m", "gpu": "cpu"}))
    assert min(shown["Python and torch"]) > 0
    assert say("group.overhead") not in shown


def test_no_script_of_the_page_formats_a_number() -> None:
    """Every text comes from the server: of one number there are no two spellings."""
    for path, (content, _) in routes.files().items():
        if path.endswith(".js"):
            text = content.decode() if path != "/chart.js" else content.decode().replace("toFixed(1)", "")  # pixels
            found = re.findall(r"toFixed|toPrecision|toLocaleString|\b[KMGT]iB\b", text)
            assert not found, (path, found)


def test_every_wrong_value_is_said_at_its_field(client: TestClient) -> None:
    answer = post(client, "/api/plan", {"values": {"n_head": "7", "batch_size": "0", "dtype": "int4"}}, 422)
    assert {problem["key"] for problem in answer["problems"]} >= {"batch_size", "dtype"}
    near = post(client, "/api/plan", {"values": {"n_layers": "7"}}, 422)
    assert "n_layer" in near["message"]
    for bad in (
        {"gpu": "RTX 9999"},
        {"gpu": "RTX 4070,RTX 4090"},
        {"others": "2 chairs"},
        {"others": "900GB"},
        {"model": "gpt9"},
    ):
        assert post(client, "/api/plan", bad, 422)["problems"][0]["message"]


def test_a_pasted_config_is_parsed_and_never_run(client: TestClient, tmp_path: Path) -> None:
    answer = post(client, "/api/read", {"name": "train_mine.py", "text": NANOGPT})
    assert answer["values"]["n_embd"] == 384
    assert answer["name"] == "train_mine"
    assert post(client, "/api/plan", {"values": answer["values"]})["config"]["dropout"] == 0.2
    toml = post(client, "/api/read", {"name": "", "text": "preset = 'gpt2-350m'\n[batch]\nbatch_size = 2\n"})
    assert (toml["values"]["n_layer"], toml["values"]["batch_size"]) == (24, 2)
    evil = f"__import__('pathlib').Path({str(tmp_path / 'ran')!r}).write_text('x')\nn_layer = open('/etc/passwd')"
    refused = post(client, "/api/read", {"name": "evil.py", "text": evil}, 422)
    assert "evil.py:" in refused["problems"][0]["message"]
    assert not (tmp_path / "ran").exists()
    assert post(client, "/api/read", {"name": "x.toml", "text": "n_layer = [" + "[" * 5000}, 422)["problems"]


def test_from_text_reads_what_resolve_reads(tmp_path: Path) -> None:
    for name, text in (("a.py", NANOGPT), ("b.toml", to_toml(resolve(["gpt2-40m", "--compile=false"]).config))):
        (tmp_path / name).write_text(text)
        expected = resolve([str(tmp_path / name)])
        for given in (name, ""):  # also told by its content alone
            assert from_text(text, given).config == expected.config, (name, given)
        assert from_text(text, name).name == expected.name
    for wrong in ("x" * 70_000, "init_from = '/etc/passwd'", "n_layer = -1", "\0"):
        with pytest.raises(ConfigError):
            from_text(wrong, "w.py")


def test_the_downloaded_config_is_the_one_that_was_planned(client: TestClient, tmp_path: Path) -> None:
    asked = {"model": "gpt2-40m", "values": {"n_layer": "7", "currency": 'a"\\b', "recipe": "modern"}}
    answer = post(client, "/api/toml", asked)
    (tmp_path / answer["name"]).write_text(answer["text"])
    shown = post(client, "/api/plan", asked)["config"]
    assert resolve([str(tmp_path / answer["name"])]).config.model_dump(mode="json") == shown
    assert shown["optimizer"] == "muon"


def test_cards_are_compared(client: TestClient) -> None:
    answer = post(
        client, "/api/cards", {"model": "gpt2-124m", "cards": ["RTX 3060 12GB", "RTX 4090"], "gpu": "RTX 4090"}
    )
    assert [row[0] for row in answer["sections"][0]["blocks"][0]["rows"]] == ["RTX 3060 12GB", "RTX 4090"]
    post(client, "/api/cards", {"cards": ["no such"]}, 422)


def test_advice_can_be_applied_and_then_holds(client: TestClient) -> None:
    asked = {
        "model": "gpt2-30m",
        "values": {"batch_size": "128", "gradient_accumulation_steps": "8"},
        "gpu": "RTX 3060 12GB",
        "others": "1GB",
    }
    assert "does not fit" in post(client, "/api/plan", asked)["strip"][0]["text"]
    answer = post(client, "/api/advice", {**asked, "goal": "fit"})
    assert len(answer["changes"]) == len(answer["sections"][answer["list"]]["blocks"][0]["rows"]) > 2
    for change in answer["changes"][:3]:
        values = {key: str(value) for key, value in change["set"]["values"].items()}
        then = post(client, "/api/plan", {**asked, **change["set"], "values": {**asked["values"], **values}})
        assert then["strip"][0]["tone"] == "good", change["text"]
    post(client, "/api/advice", {"goal": "wealth"}, 400)


def test_long_advice_is_worked_on_while_the_page_answers(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deep model took up to 16 s of the server's own process."""
    asked = {"model": "gpt2-40m", "gpu": "RTX 4070"}
    monkeypatch.setattr(routes, "WAIT_S", 0.0)
    begun = post(client, "/api/advice", asked, 202)
    post(client, "/api/plan", asked)
    monkeypatch.setattr(routes, "WAIT_S", 600.0)
    assert get(client, f"/api/jobs/{begun['job']}") == json.loads(json.dumps(calls.advise(asked)))
    monkeypatch.setattr(routes, "WAIT_S", 0.0)
    first, second = (post(client, "/api/advice", asked, 202)["job"] for _ in range(2))  # the newest wins
    assert "stopped" in get(client, f"/api/jobs/{first}", 422)["message"]
    plain = child.start
    monkeypatch.setattr(child, "start", lambda work: plain("no such"))
    monkeypatch.setattr(routes, "WAIT_S", 600.0)
    assert "exit 1" in post(client, "/api/advice", asked, 422)["message"]
    assert "stopped" in get(client, f"/api/jobs/{second}", 422)["message"]
    get(client, "/api/jobs/0123456789abcdef", 404)


def test_the_batch_that_fits_can_be_asked_for(client: TestClient) -> None:
    answer = post(client, "/api/plan", {"model": "gpt2-124m", "values": {"batch_size": "auto"}})
    assert answer["config"]["batch_size"] > 1
    assert answer["config"]["batch_size"] * answer["config"]["gradient_accumulation_steps"] == 512


def test_runs_are_shown_with_their_forecast(client: TestClient) -> None:
    run = get(client, "/api/runs")["runs"][0]
    assert (run["name"], run["status"], run["of"]) == ("baby", "finished", 12)
    page = get(client, f"/api/runs/{run['id']}")
    loss, step_time = (one["numbers"]["rows"] for one in page["pictures"])
    assert [row[1] for row in loss] == ["1", "11", "0"]
    assert [row[2] for row in step_time] == ["500 ms", "500 ms"]
    assert {one["id"]: one["value"] for one in page["now"]}["step"] == "500 ms"
    assert page["events"][0]["text"] == "saved baby"
    report = get(client, f"/api/runs/{run['id']}/report")
    assert [section["title"] for section in report["document"]["sections"]] == titles(Path(run["path"]))
    assert get(client, f"/api/runs/{run['id']}/live?after={page['next']}")["pictures"] is None
    assert get(client, f"/api/runs/{run['id']}/live?after=-5")["pictures"] == page["pictures"]
    against = get(client, "/api/comparisons")["runs"][0]["rows"]
    assert against[0]["measured"] == "500 ms"
    assert get(client, "/api/comparisons")["runs"][0]["path"] == run["path"]
    speeds = {key: run[key] for key in ("speed", "mfu", "progress")}
    assert speeds["progress"] == "step 12 of 12"
    for other in (page, get(client, f"/api/runs/{run['id']}/live?after=0")):
        assert {key: other[key] for key in speeds} == speeds
    get(client, "/api/runs/ffffffffffffffff", 404)


def titles(run: Path) -> list[str]:
    return [section.title.text() for section in making.run(run).sections]


def test_a_run_that_trains_is_shown_as_far_as_it_is(client: TestClient, tmp_path: Path) -> None:
    """From its first moment on: without a line, with half a line, with steps and no evaluation."""
    folder = tmp_path / "runs" / "live"
    none = dict.fromkeys(("val_loss", "step_s", "tokens_per_s"))
    live = write_run(folder, "live", status="running", steps_done=0, wall_s=0.0, **none)
    live.acquire()
    line = {"kind": "step", "loss": 4.0, "grad_norm": 1.0, "learning_rate": 1e-3, "step_s": 0.5, "tokens_per_s": 9.0,
            "mfu": None, "memory_bytes": None, "elapsed_s": 1.0, "eta_s": 1.0}  # fmt: skip
    steps = "".join(json.dumps({**line, "step": step}) + "\n" for step in range(30))
    for text in ("", steps[: len(steps) // 30 + 20], steps, None):
        metrics = folder / "metrics.jsonl"
        metrics.unlink() if text is None else metrics.write_text(text)
        run = next(run for run in get(client, "/api/runs")["runs"] if run["name"] == "live")
        page = get(client, f"/api/runs/{run['id']}")
        report = get(client, f"/api/runs/{page['id']}/report")
        assert (page["status"], report["problem"]) == ("running", "")
        assert [section["title"] for section in report["document"]["sections"]] == titles(folder)
        blocks = [block for section in report["document"]["sections"] for block in section["blocks"]]
        assert ({"kind": "paragraph", "text": say("report.no_losses"), "tone": "plain"} in blocks) == (
            text in ("", None)
        )


def test_a_damaged_run_is_said_and_the_others_shown(client: TestClient, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "broken")
    (tmp_path / "runs" / "broken" / "run.json").write_text("{")
    write_run(tmp_path / "runs" / "half")
    (tmp_path / "runs" / "half" / "plan.json").write_text("[]")
    found = get(client, "/api/runs")
    assert len(found["runs"]) == 2
    assert len(found["unreadable"]) == 1
    half = next(run for run in found["runs"] if run["path"].endswith("half"))
    assert get(client, f"/api/runs/{half['id']}")["pictures"]
    assert get(client, f"/api/runs/{half['id']}/report")["problem"]


def test_exact_without_torch_is_one_sentence(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "installed_torch", lambda: "")
    assert "torch" in get(client, "/api/start")["no_exact"]
    assert "torch" in post(client, "/api/exact", {}, 422)["message"]


def tracing() -> list[str]:
    """Processes of the tracer that this one started and that live, where the system lists them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text("utf-8", "replace").rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.append((path.parent / "cmdline").read_text("utf-8", "replace"))
    return [words for words in found if "web.child\0exact" in words]


def test_a_trace_can_be_stopped_and_leaves_no_process(client: TestClient) -> None:
    if routes.service.why_not():
        pytest.skip("nothing can be traced here")
    asked = {"model": "baby", "values": {"n_embd": "120", "seed": "7"}}
    job = post(client, "/api/exact", asked, 202)["job"]
    post(client, f"/api/jobs/{job}/stop", {})
    assert not tracing()
    assert "stopped" in get(client, f"/api/jobs/{job}", 422)["message"]
    again = post(client, "/api/exact", {**asked, "gpu": "cpu"}, 202)["job"]  # no card: the estimate stands
    assert not get(client, f"/api/jobs/{again}")["exact"]


def test_texts_of_the_scripts_exist_and_none_is_missing() -> None:
    scripts = "".join(p.read_text("utf-8") for p in (REPO / "foretrain/web/static").glob("*.js"))
    said = set(re.findall(r"\bt\((?:\w+ \? )?\"([a-z_.]+)\"", scripts))
    assert len(said) > 50
    for id in said:
        assert messages.has(id), id
    for id in ("status", "host", "token"):
        assert messages.has(f"refused.{id}") or id == "status"
    for id in guard.STATUS:
        assert messages.has(f"refused.{id}"), id


def test_the_first_load_is_small(client: TestClient) -> None:
    """All that a browser fetches until the first answer stands there, as it goes over the wire: all files but those of
    the parts that are loaded when they are looked at (test_browser.py sees that they are not fetched)."""
    sizes, later = {}, {"/compare.js", "/runs.js"}
    main = routes.files()["/main.js"][0].decode()
    assert set(re.findall(r'import\("\.(/\w+\.js)"\)', main)) == later
    for path, (content, _) in routes.files().items():
        answer = client.get(path, headers={**GOOD, "accept-encoding": "gzip"})
        assert answer.content == content
        sizes[path] = int(answer.headers["content-length"])
        assert client.get(path, headers={**GOOD, "accept-encoding": "identity"}).content == content
    start = client.get("/api/start", headers={**GOOD, "accept-encoding": "gzip"})
    assert start.json() == client.get("/api/start", headers={**GOOD, "accept-encoding": "identity"}).json()
    sizes["/api/start"] = int(start.headers["content-length"])
    sizes["/api/form"] = len(gzip.compress(client.post("/api/form", headers={**GOOD, **POSTED}, json={}).content))
    sizes["/api/plan"] = len(client.post("/api/plan", headers={**GOOD, **POSTED}, json={}).content)
    assert sum(size for path, size in sizes.items() if path not in later) < 150_000, sizes


def test_every_card_can_be_chosen(client: TestClient) -> None:
    listed = {device["id"] for device in post(client, "/api/form", {})["devices"]}
    assert listed >= {*catalogue(), "cpu"}


def test_serve_listens_here_only_without_torch_and_ends_cleanly(tmp_path: Path) -> None:
    import urllib.request

    with serving(tmp_path, "--port", str(free_port())) as (said, process):
        port, token = said["port"], said["url"].partition("#token=")[2]
        assert len(token) > 40
        headers = {guard.TOKEN_HEADER: token, "Origin": f"http://127.0.0.1:{port}", "Content-Type": "application/json"}
        for body in (b"{}", b'{"model": "gpt2-350m"}'):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/api/plan", data=body, headers=headers)
            with urllib.request.urlopen(request, timeout=600) as answer:
                assert json.load(answer)["figures"]
        if Path("/proc/self/status").exists():
            status = Path(f"/proc/{process.pid}/status").read_text()
            resident = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])  # type: ignore[index]
            assert resident < 100 * 1024
            assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
            listening = [
                line.split()[1]
                for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
                if line.split()[3] == "0A"
            ]
            assert f"0100007F:{port:04X}" in listening
            assert f"00000000:{port:04X}" not in listening
        assert token not in Path(f"/proc/{process.pid}/cmdline").read_text() if Path("/proc/self").exists() else True
    assert process.returncode == 0


def test_serve_says_what_is_wrong(tmp_path: Path) -> None:
    from tests.kit.command import foretrain

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = foretrain("serve", "--port", str(port))
        assert (result.returncode, str(port) in result.stderr) == (4, True)
        with server.listen(port, or_any=True) as another:
            assert another.getsockname()[1] != port
    assert foretrain("serve", "--runs", "nowhere").returncode == 7


def test_the_link_is_printed_as_it_is_typed(tmp_path: Path) -> None:
    """Whoever copies the line gets no unseen mark behind the token, in a language from right to left either."""
    command = [sys.executable, "-m", "foretrain", "serve", "--port", str(free_port()), "--lang", "ar"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
        finally:
            process.terminate()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#token=[\w-]+\n", line, re.ASCII)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_server_has_begun_ends_it(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = server.prepare(free_port(), [tmp_path])
    begin, overslept = served.server.run, threading.Event()

    def begin_late(sockets: Any) -> None:
        signal.raise_signal(number)
        begin(sockets=sockets)

    def give_up() -> None:
        overslept.set()
        served.server.should_exit = True

    monkeypatch.setattr(served.server, "run", begin_late)
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    guard = threading.Timer(60, give_up)
    guard.start()
    try:
        served.run()
    finally:
        guard.cancel()
        for each, handler in before.items():
            signal.signal(each, handler)
    assert not overslept.is_set()


@contextlib.contextmanager
def answering(folder: Path) -> Iterator[server.Served]:
    served = server.prepare(free_port(), [folder])
    thread = threading.Thread(target=lambda: served.server.run(sockets=[served.listening]), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        served.server.should_exit = True
        thread.join(10)


def connected(served: server.Served, request: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", served.port), 30)
    made.sendall(request)
    return made


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def test_a_connection_that_sends_nothing_whole_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 0.3)
    with answering(tmp_path) as served:
        page = f"GET /icon.svg HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n\r\n".encode()
        half = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
        with connected(served, half) as slow:
            assert is_closed(slow)
        with connected(served, page) as later:  # half a request after a whole one
            assert later.recv(10**6).startswith(b"HTTP/1.1 200")
            later.sendall(half)
            while more := b"" if is_closed(later) else later.recv(10**6):
                assert b"200" not in more
        with connected(served) as large, contextlib.suppress(OSError):
            large.sendall(b"GET / HTTP/1.1\r\n" + b"X-Large: " + b"x" * 10**6)
            assert large.recv(100)[:12] in (b"HTTP/1.1 400", b"")
        with connected(served, page) as good:
            assert good.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "asked",
    [
        lambda n: {"batch_size": n + 1, "n_layer": 2 + n % 3},
        lambda n: {"recipe": ("nanogpt", "modern", "llama")[n % 3], "n_embd": 64 * (1 + n % 5), "compile": n % 2 == 0},
    ],
)
def test_fifty_requests_at_once_are_answered_as_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Any
) -> None:
    """All connections are open before the first request is sent; none of them is cut off."""
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 600.0)  # however long a busy machine takes to open them
    with answering(tmp_path) as served, contextlib.ExitStack() as opened:
        origin = f"http://127.0.0.1:{served.port}"
        headers = {**POSTED, "origin": origin, guard.TOKEN_HEADER: served.token}

        def connection() -> http.client.HTTPConnection:
            made = http.client.HTTPConnection("127.0.0.1", served.port, timeout=600)
            opened.callback(made.close)
            made.connect()
            return made

        def request(n: int, made: http.client.HTTPConnection) -> None:
            small = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32, "bias": False, "dropout": 0.0}
            values = {"model": "baby", "gpu": "RTX 4070", "values": {**small, **asked(n)}}
            made.request("POST", "/api/plan", json.dumps(values), headers)

        def answer(made: http.client.HTTPConnection) -> tuple[int, bytes]:
            got = made.getresponse()
            return got.status, got.read()

        all_of_them = [connection() for _ in range(50)]
        for n, made in enumerate(all_of_them):
            request(n, made)
        at_once = [answer(made) for made in all_of_them]
        assert {status for status, _ in at_once} == {200}
        for n in range(50):
            request(n, all_of_them[0])
            assert answer(all_of_them[0]) == at_once[n]


def test_half_sent_requests_shut_nobody_out(tmp_path: Path) -> None:
    """Any program on this machine can open connections; 70 that wait held all of the page's for 15 s."""
    with answering(tmp_path) as served, contextlib.ExitStack() as opened:
        host = f"Host: 127.0.0.1:{served.port}\r\n"
        own = f"GET /api/runs HTTP/1.1\r\n{host}{guard.TOKEN_HEADER}: {served.token}\r\n\r\n".encode()
        mine = opened.enter_context(connected(served, own))
        assert mine.recv(100).startswith(b"HTTP/1.1 200")
        half = f"GET /chart.js HTTP/1.1\r\n{host}X-Slow: ".encode()
        body = f"POST /api/plan HTTP/1.1\r\n{host}Content-Length: 1000\r\n\r\n{{".encode()
        unread = f"GET /chart.js HTTP/1.1\r\n{host}\r\n".encode() * 40
        for request in (half, body, unread):
            waiting = [opened.enter_context(connected(served, request)) for _ in range(140)]
            with connected(served, own) as good:
                assert good.recv(100).startswith(b"HTTP/1.1 200"), request
            assert waiting
        mine.sendall(own)  # and who has shown the token was not cut off
        text = b""
        while text.count(b"HTTP/1.1 200") < 1:
            text += (found := mine.recv(10**6))
            assert found


def test_file_that_opens_the_browser_is_private_and_goes_away() -> None:
    link = "http://127.0.0.1:1/#token=a&b"
    with server.opener(link) as path:
        assert path.stat().st_mode & 0o077 == 0 or os.name != "posix"
        assert path.parent.stat().st_mode & 0o077 == 0 or os.name != "posix"
        assert "token=a&amp;b" in path.read_text()
    assert not path.exists()


def test_serve_takes_a_language_before_the_browsers(tmp_path: Path) -> None:
    def spoken(language: str | None, **headers: str) -> dict[str, Any]:
        with TestClient(routes.create_app(PORT, TOKEN, [tmp_path], language), base_url=ORIGIN) as made:
            return made.get("/api/start", headers={**GOOD, **headers}).json()

    with pretending():
        assert spoken(None)["language"] == "en"
        assert spoken(ARABIC)["language"] == ARABIC
        assert spoken(ARABIC, **{"accept-language": BRACKETS})["language"] == ARABIC
        assert spoken(ARABIC, **{"x-foretrain-language": BRACKETS})["language"] == BRACKETS
        start = spoken(None, **{"x-foretrain-language": "../../etc", "accept-language": f"xx, {BRACKETS};q=0.5"})
        assert (start["language"], start["direction"], start["texts"]["page.runs"]) == (BRACKETS, "ltr", "⟦Runs⟧")
        assert {one["id"] for one in start["languages"]} == set(messages.languages())
        with TestClient(routes.create_app(PORT, TOKEN, [tmp_path]), base_url=ORIGIN) as made:  # refusals, too
            refused = made.get("/api/start", headers={**GOOD, guard.TOKEN_HEADER: "no", "accept-language": BRACKETS})
            assert refused.json()["message"].startswith("⟦Open the newest link")
