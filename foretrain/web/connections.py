"""Which connections the page keeps: those that have sent the token, and a few others, of which the oldest goes first.

Every program on this machine can open the port, and half a request costs it nothing. So a connection that has not yet
shown the token has little time for the head of a request, and when there are too many of them, the one that has waited
longest is cut off. A browser sends its request at once; whoever knows the token is never cut off for others.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from foretrain.web import guard

HEAD_TIMEOUT_S = 5.0
MAX_UNPROVEN = 32
MAX_CONNECTIONS = 128  # in all; unproven ones alone never come near


def protocol(token: str) -> type[H11Protocol]:
    """The class of a server's connections. `token`: what proves that one is the user's."""
    unproven: dict[Any, None] = {}  # the oldest first

    class Connection(H11Protocol):
        """One connection, with a clock for the head of its next request."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            """Start the clock, and cut off the oldest of too many that have not shown the token."""
            super().connection_made(transport)
            self._clock: asyncio.TimerHandle | None = None
            unproven[self] = None
            self._wait()
            if len(unproven) > MAX_UNPROVEN:
                next(iter(unproven)).cut_off()

        def cut_off(self) -> None:
            """Close it without waiting for what it does not read."""
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
            """Nothing is left to wait for."""
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
