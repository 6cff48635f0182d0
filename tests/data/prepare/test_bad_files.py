"""Bad files, and a server that lies: one clear sentence each, in little memory, or exactly the right tokens."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from foretrain.base.errors import ExitCode, UserError
from foretrain.data.prepare import opened as remote
from foretrain.data.prepare import vocabulary
from foretrain.data.prepare.estimate import peak_bytes
from foretrain.data.prepare.formats import documents
from foretrain.data.prepare.opened import Format, OpenFile, Place
from foretrain.data.prepare.pool import Reader
from foretrain.data.prepare.reader import Position
from foretrain.data.prepare.sources import expand, not_utf8
from tests.kit import bad_files
from tests.kit import prepare as kit
from tests.kit.command import foretrain, refused

FORMAT = Format("text", "file", 16 * 2**20, False)


def read(path: Path, format: Format = FORMAT) -> tuple[int, UserError | None]:
    """(documents read, the error that ended it)."""
    opened, count = OpenFile(expand([str(path)]).files[0]), 0
    try:
        for document in documents(opened, format, Place()):
            count += document.text is not None
        opened.close()
    except UserError as error:
        return count, error
    finally:
        opened.abandon()
    return count, None


def test_every_bad_file_is_one_sentence() -> None:
    found = bad_files.write_all(Path("bad"))
    assert sum(path.suffix == ".parquet" for path in found) >= 50
    assert Path("bad/bomb.parquet").stat().st_size < 1000
    for path, ids in found.items():
        count, error = read(path)
        assert error is not None or ids is None, f"{path} was read, {count} documents"
        if error is not None:
            assert error.id in (
                bad_files.CORRUPT | {"data.source_no_column", "data.source_bomb"} if ids is None else ids
            ), (path, error)
            assert error.exit_code == ExitCode.DATA
            text = str(error)
            assert str(path) in text
            assert "\n" not in text
            assert "{" not in text
            assert len(text) < 420


def in_reader(path: Path) -> tuple[UserError | None, int]:
    """(the error, peak bytes) of reading a file in a reader process."""
    reader = Reader(kit.options(path).job(expand([str(path)]), Position()))
    peak = 0
    try:
        while True:
            peak = max(peak, peak_bytes(reader.child.process.pid) if reader.child.process.poll() is None else 0)
            frame = reader.next(0.01)
            if frame is not None and frame[0]["type"] == "end":
                return None, peak
    except UserError as error:
        return error, peak
    finally:
        reader.end()


@pytest.mark.fault("a Parquet bomb", row="B.4", sees="one sentence", safe="the machine: memory stays bounded")
def test_the_bomb_takes_little_memory() -> None:
    """701 bytes that decode to 100 GB."""
    Path("bomb.parquet").write_bytes(bad_files.bomb())
    error, peak = in_reader(Path("bomb.parquet"))
    assert error.id == "data.source_bomb"
    assert 2**25 < peak < 700 * 2**20


@pytest.mark.slow
def test_memory_stays_bounded_on_every_bad_file() -> None:
    """In the reader process, against a good file; also a page of 0.9 GB of cells none of which is too long."""
    Path("good.parquet").write_bytes(bad_files.parquet_bytes())
    Path("page.parquet").write_bytes(bad_files.huge_page())
    assert Path("page.parquet").stat().st_size < 200_000
    none, base = in_reader(Path("good.parquet"))
    assert none is None
    found = {Path("page.parquet"): {"data.source_memory"}, **bad_files.write_all(Path("bad"))}
    for path, ids in found.items():
        error, peak = in_reader(path)
        assert ids is None or (error is not None and error.id in ids), (path, error)
        assert peak - base < 2**30, path


def test_bad_records_are_left_out_and_counted_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    kit.in_one_process(monkeypatch)
    lines = ['{"text": "one"}', "{torn", '{"text": null}', '{"text": "' + "x" * 2000 + '"}', '{"text": "\\ud800 two"}']
    Path("a.jsonl").write_bytes(
        "\n".join(lines).encode() + b'\n{"text": "thr\xffee"}\n' + b"z" * 90_000_000 + b'\n{"text": "4"}'
    )
    made = kit.run("a.jsonl", skip_bad=True, max_document_bytes=1000, val_share=0)
    counts = made.index.counts
    assert (counts.bad, counts.empty, counts.replaced_utf8) == (3, 1, 2)
    text = bytes(kit.tokens_of("out", "train").astype("uint8")).decode().split("\0")
    assert text == ["one", "\ufffd two", "thr\ufffdee", "4", ""]
    with pytest.raises(UserError, match=r"a.jsonl, line 2: .*--skip-bad"):
        kit.run("a.jsonl", out="o2")


def test_a_source_without_text(monkeypatch: pytest.MonkeyPatch) -> None:
    kit.in_one_process(monkeypatch)
    kit.write_jsonl(Path("a.jsonl"), ["", "  ", None])
    with pytest.raises(UserError, match="no text"):
        kit.run("a.jsonl")


def test_bad_file_is_refused_before_its_tokenizer_is_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network GPT-2's vocabulary cannot be had; the file's own problem is told all the same, and first."""

    def missing(wanted: str) -> None:
        raise UserError("environment.no_vocabulary", name=wanted, reason="ConnectionError")

    monkeypatch.setattr(vocabulary, "_find", missing)
    Path("empty.txt").write_bytes(b"")
    found = foretrain("prepare", "empty.txt", "--out", "o")
    assert (found.returncode, "empty.txt: is empty." in found.stderr) == (7, True)
    assert "vocabulary" not in found.stderr
    Path("latin.txt").write_bytes("café au lait".encode("latin-1"))
    found = foretrain("prepare", "latin.txt", "--out", "o", code=4)
    assert "latin.txt: is not UTF-8 text (byte 3 is 0xe9)" in found.stderr.split("vocabulary")[0]
    Path("good.txt").write_bytes(b"x" * 65535 + "é".encode())  # a letter that the part that is looked at cuts
    assert not not_utf8(["good.txt", "missing.txt", "-", "a.parquet", "."])


# -- Hugging Face ------------------------------------------------------------------------------------------

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The requests of the hub that reading a dataset makes, over local files; `faults` are used up one by one."""

    files: dict[str, bytes] = {}  # noqa: RUF012
    faults: list[str] = []  # noqa: RUF012
    sent = 0
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    def _entry(self, name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(self.files[name]), "oid": "0" * 40}

    def do_POST(self) -> None:
        body = unquote(self.rfile.read(int(self.headers["content-length"])).decode())
        if self.path.startswith("/api/datasets/me/texts/paths-info/"):
            self._json([self._entry(name) for name in self.files if name in body])
        else:
            self.send_error(404)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/datasets/me/texts/tree/"):
            folder = path.partition(SHA)[2].strip("/")
            self._json([self._entry(name) for name in self.files if name.startswith(folder)])
        elif path.startswith("/api/datasets/me/texts"):
            self._json({"id": "me/texts", "sha": SHA, "private": False, "downloads": 0, "tags": [], "likes": 0})
        elif path.startswith(f"/datasets/me/texts/resolve/{SHA}/"):
            self._file(self.files[path.partition(SHA)[2].strip("/")])
        else:
            self.send_error(404)

    def _file(self, data: bytes) -> None:
        first, last = (int(x) for x in self.headers["range"].removeprefix("bytes=").split("-"))
        piece = data[first : last + 1]
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "500":
            self.send_error(500)
            return
        self.send_response(206)
        self.send_header("content-length", str(len(piece)))
        total = len(data) + (7 if fault == "size" else 0)
        self.send_header("content-range", f"bytes {first}-{last}/{total}")
        self.end_headers()
        if fault == "cut":
            self.wfile.write(piece[: len(piece) // 2])
            self.close_connection = True
        else:
            self.wfile.write(piece)
        type(self).sent += len(piece)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, own_directory: Path) -> Iterator[type[Hub]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("foretrain.data.prepare.opened._FIRST_WAIT_S", 0.01)
    rows = kit.texts(300)
    names = {"sample/a.parquet": rows[:200], "sample/b.jsonl.gz": rows[200:], "other/c.jsonl": rows[:9]}
    Hub.files = {name: kit.write_kind(Path(Path(name).name), part).read_bytes() for name, part in names.items()}
    Hub.files["README.md"] = b"# texts"
    Hub.faults, Hub.sent = [], 0
    yield Hub
    server.shutdown()
    server.server_close()


def test_a_dataset_at_hugging_face(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the same files here: through cuts, errors and wrong sizes; nothing is kept on disk."""
    url = "hf://datasets/me/texts/sample"
    listed = expand([url])
    assert [file.path for file in listed.files] == [
        f"hf://datasets/me/texts@{SHA}/sample/a.parquet", f"hf://datasets/me/texts@{SHA}/sample/b.jsonl.gz",
    ]  # fmt: skip
    assert len(expand(["hf://datasets/me/texts"]).files) == 3
    assert [f.path[-7:] for f in expand(["hf://datasets/me/texts/*/*.jsonl"]).files] == ["c.jsonl"]
    kit.in_one_process(monkeypatch)
    hub.faults = ["cut", "500", "size", "", "cut", "cut"]
    made = kit.run(url)
    assert not hub.faults
    expected = kit.expected(kit.texts(300), lambda row: row.encode(), 0)
    assert kit.tokens_of("out", "train").tolist() == expected["train"]
    assert made.index.source.source_bytes == sum(
        len(hub.files[f"sample/{name}"]) for name in ("a.parquet", "b.jsonl.gz")
    )


def test_a_server_that_never_answers_right(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults = ["size"] * 50
    with refused("data.source_download", code=ExitCode.DATA, match="the same command continues"):
        list(
            documents(
                OpenFile(expand(["hf://datasets/me/texts/other/c.jsonl", "hf://datasets/me/texts/other"]).files[0]),
                FORMAT,
                Place(),
            )
        )
    assert len(hub.faults) == 50 - remote._ATTEMPTS
    for url in ("hf://datasets/me", "hf://models/me/texts"):
        with refused("usage.hf_url"):
            expand([url])
    with refused("data.source_remote"):
        expand(["hf://datasets/you/texts"])
