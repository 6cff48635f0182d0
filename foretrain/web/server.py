"""`foretrain serve`: the page on 127.0.0.1, its token, its link."""

import asyncio
import contextlib
import html
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from foretrain.base.errors import UserError
from foretrain.web import guard
from foretrain.web.routes import create_app

# Which connections the page keeps: those that have sent the token, and a few others, of which the oldest goes first.
#
# Every program on this machine can open the port, and half a request costs it nothing. So a connection that has not
# yet shown the token has little time for the head of a request, and when there are too many of them, the one that has
# waited longest is cut off. A browser sends its request at once; whoever knows the token is never cut off for others.

HEAD_TIMEOUT_S = 5.0
# So few are accepted between two looks at what they have sent that none is cut off before it was read once.
BACKLOG = 64
MAX_UNPROVEN = 2 * BACKLOG
MAX_CONNECTIONS = 256  # in all; unproven ones, with those that are being cut off, alone never come near


def protocol(token: str) -> type[H11Protocol]:
    unproven: dict[Any, None] = {}  # the oldest first

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:
            """Start the clock, and cut off the oldest of too many that have not shown the token."""
            super().connection_made(transport)
            self._clock: asyncio.TimerHandle | None = None
            unproven[self] = None
            self._wait()
            if len(unproven) > MAX_UNPROVEN:
                next(iter(unproven)).cut_off()

        def cut_off(self) -> None:
            unproven.pop(self, None)
            self.transport.abort()

        def handle_events(self) -> None:
            """A request whose head has come stops the clock; one that has begun starts it."""
            super().handle_events()
            if self.headers is not None and guard.proves(self.headers, token.encode()):
                unproven.pop(self, None)
            if self.conn.their_state is not h11.IDLE:
                self._stop()
            elif self.conn.trailing_data[0] and self._clock is None:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            unproven.pop(self, None)
            self._stop()
            super().connection_lost(exc)

        def _wait(self) -> None:
            self._clock = self.loop.call_later(HEAD_TIMEOUT_S, self.cut_off)

        def _stop(self) -> None:
            if self._clock is not None:
                self._clock.cancel()
                self._clock = None

    return Connection


HOST, DEFAULT_PORT = "127.0.0.1", 8765


@dataclass(frozen=True)
class Served:
    server: uvicorn.Server
    listening: socket.socket
    port: int
    token: str

    @property
    def link(self) -> str:
        """The address with the token behind #, where it is sent to nobody and stands in no log."""
        return f"http://{HOST}:{self.port}/#token={self.token}"

    def run(self) -> None:
        """Answer until Ctrl-C or SIGTERM, which uvicorn hears and sends on, also before it listens."""

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
        create_app(found, token, roots, language), http=protocol(token), ws="none", loop="asyncio",
        log_level="error", access_log=False, server_header=False, date_header=False, proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS, timeout_keep_alive=20, timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=16 * 1024, backlog=BACKLOG,
    )  # fmt: skip
    return Served(uvicorn.Server(config), listening, found, token)


def listen(port: int, *, or_any: bool) -> socket.socket:
    # TCP by name, or asyncio leaves Nagle's algorithm on (base_events._set_nodelay), and each answer, sent as head and
    # body, waits 40 ms for the delayed acknowledgement of its head.
    candidate = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if os.name == "posix":  # elsewhere this would let two servers share a port
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sys.platform == "linux":  # only those that have sent something are accepted: the head can be read at once
        candidate.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 1)
    try:
        candidate.bind((HOST, port))
        candidate.listen(BACKLOG)
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
    """Make a file, of this user alone and gone in the end, that leads a browser to the link: all see a command line."""
    with tempfile.TemporaryDirectory(prefix="foretrain-") as folder:
        path = Path(folder) / "open.html"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            target = html.escape(link, quote=True)
            file.write(f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url={target}">')
        yield path
