"""`foretrain serve`: the page on 127.0.0.1, its token, its link."""

import contextlib
import html
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from foretrain.base.errors import UserError
from foretrain.web import connections
from foretrain.web.routes import create_app

HOST, DEFAULT_PORT = "127.0.0.1", 8765


@dataclass(frozen=True)
class Served:
    """A server that listens but does not answer yet."""

    server: uvicorn.Server
    listening: socket.socket
    port: int
    token: str

    @property
    def link(self) -> str:
        """The address with the token behind #, where it is sent to nobody and stands in no log."""
        return f"http://{HOST}:{self.port}/#token={self.token}"

    def run(self) -> None:
        """Answer until Ctrl-C or SIGTERM, which are how a page ends and no errors: uvicorn hears them, then sends them
        on to what is set here. One that comes before uvicorn listens to them ends it too."""

        def end(number: int, frame: object) -> None:
            self.server.should_exit = True

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        self.server.run(sockets=[self.listening])


def prepare(port: int | None, roots: list[Path], language: str | None = None) -> Served:
    """Listen on this port, or, where none was asked for, on the usual one or a free one. Raises UserError."""
    listening = listen(DEFAULT_PORT if port is None else port, or_any=port is None)
    found, token = listening.getsockname()[1], secrets.token_urlsafe(32)
    config = uvicorn.Config(
        create_app(found, token, roots, language), http=connections.protocol(token), ws="none", loop="asyncio",
        log_level="error", access_log=False, server_header=False, date_header=False, proxy_headers=False,
        limit_concurrency=connections.MAX_CONNECTIONS, timeout_keep_alive=20, timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=16 * 1024,
    )  # fmt: skip
    return Served(uvicorn.Server(config), listening, found, token)


def listen(port: int, *, or_any: bool) -> socket.socket:
    """A socket that listens on this port; with `or_any` on a free one where it is taken. Raises UserError."""
    # TCP by name, or asyncio leaves Nagle's algorithm on (base_events._set_nodelay), and each answer, sent as head and
    # body, waits 40 ms for the delayed acknowledgement of its head.
    candidate = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if os.name == "posix":  # elsewhere this would let two servers share a port
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        candidate.bind((HOST, port))
        candidate.listen(128)
    except OSError as error:
        candidate.close()
        if or_any:
            return listen(0, or_any=False)
        reason = error.strerror or str(error)
        raise UserError("environment.cannot_listen", port=port, reason=reason) from None
    candidate.set_inheritable(False)
    return candidate


@contextlib.contextmanager
def opener(link: str) -> Iterator[Any]:
    """A file that only this user can read and that leads a browser to the link: the token would be seen by all in a
    command line. It is gone in the end."""
    with tempfile.TemporaryDirectory(prefix="foretrain-") as folder:
        path = Path(folder) / "open.html"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            target = html.escape(link, quote=True)
            file.write(f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url={target}">')
        yield path
