"""One gate in front of every route: Host and Origin must be ours, as another site's page can send requests here and
lead its name to 127.0.0.1 (DNS rebinding), and all but the page's files needs the token in a header; no cookie."""

import asyncio
import hmac
import json
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from foretrain.base.messages import say

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Pairs = Iterable[tuple[bytes, bytes]]

TOKEN_HEADER = "x-foretrain-token"
MAX_BODY_BYTES = 256 * 1024
BODY_TIMEOUT_S = 10.0
STATUS = {
    "host": 421, "origin": 403, "site": 403, "token": 401, "method": 405, "too_large": 413, "too_slow": 408,
    "not_json": 415,
}  # fmt: skip
HEADERS = {
    # Scripts, styles and pictures from here only, and no text can become markup (trusted types).
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "cache-control": "no-store",
}


class Refused(Exception):
    """A request that is not answered; the id says why."""


def hosts_of(port: int) -> frozenset[str]:
    names = ("127.0.0.1", "localhost", "[::1]")
    return frozenset(f"{name}:{port}" for name in names) | (frozenset(names) if port == 80 else frozenset())


def proves(headers: Pairs, token: bytes) -> bool:
    given = (_Headers(headers).only(TOKEN_HEADER) or "").encode("utf-8", "replace")
    return hmac.compare_digest(given, token)


class Guard:
    """ASGI middleware. `open_paths`: the page's own files, which hold nothing of the user's, and need no token."""

    def __init__(self, app: App, port: int, token: str, open_paths: frozenset[str]) -> None:
        self._app, self._token, self._open = app, token.encode(), open_paths
        self._hosts = hosts_of(port)
        self._origins = frozenset(f"http://{host}" for host in self._hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with a refusal; safe headers on either."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no web sockets here
            await send({"type": "websocket.close", "code": 1008})
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name.lower() for name, _ in message["headers"]}
                extra = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in own]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        try:
            self._check(scope)
            body = await _body(scope, receive) if scope["method"] == "POST" else b""
        except Refused as refusal:
            await _answer(str(refusal), with_headers)
            return
        await self._app(scope, _replay(body, receive), with_headers)

    def _check(self, scope: Scope) -> None:
        headers = _Headers(scope["headers"])
        if headers.only("host") not in self._hosts:
            raise Refused("host")
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise Refused("method")
        writes, is_open = scope["method"] == "POST", scope["path"] in self._open
        origin = headers.only("origin")
        if (writes or headers.count("origin")) and origin not in self._origins:
            raise Refused("origin")
        if not self._site_is_ours(headers, is_open and not writes):
            raise Refused("site")
        if not is_open and not proves(scope["headers"], self._token):
            raise Refused("token")
        kind = (headers.only("content-type") or "").partition(";")[0].strip().lower()
        if writes and kind != "application/json":
            raise Refused("not_json")

    @staticmethod
    def _site_is_ours(headers: "_Headers", is_page: bool) -> bool:
        """Return whether our page asks; only the page itself may be opened by another site's link."""
        site = headers.only("sec-fetch-site")
        if not headers.count("sec-fetch-site") or site in ("same-origin", "none"):
            return True
        opened = headers.only("sec-fetch-mode") == "navigate" and headers.only("sec-fetch-dest") == "document"
        return is_page and opened and site in ("same-site", "cross-site")


class _Headers:
    """The request's headers; one that is there twice counts as none, since two readers could take different ones."""

    def __init__(self, pairs: Pairs) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            self._values.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))

    def count(self, name: str) -> int:
        return len(self._values.get(name, ()))

    def only(self, name: str) -> str | None:
        values = self._values.get(name, ())
        return values[0] if len(values) == 1 else None


async def _body(scope: Scope, receive: Receive) -> bytes:
    length = _Headers(scope["headers"]).only("content-length")
    if length is not None and not (re.fullmatch(r"[0-9]{1,9}", length) and int(length) <= MAX_BODY_BYTES):
        raise Refused("too_large")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _received(receive)
    except TimeoutError:
        raise Refused("too_slow") from None


async def _received(receive: Receive) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused("too_slow")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise Refused("too_large")
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def _answer(id: str, send: Send) -> None:
    text = json.dumps({"schema": "foretrain.error/1", "id": f"refused.{id}", "message": say(f"refused.{id}")}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
    if id in ("too_large", "too_slow"):
        headers.append((b"connection", b"close"))  # what is left of the body is not waited for
    await send({"type": "http.response.start", "status": STATUS[id], "headers": headers})
    await send({"type": "http.response.body", "body": text})
