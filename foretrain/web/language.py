"""In which language the page is answered (its switch, --lang, the browser, English), and the texts that it says."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from foretrain.base import messages
from foretrain.base.messages import texts

HEADER = "x-foretrain-language"
_ANSWERED = ("page.now.", "page.picture.")  # texts of the page that only come inside answers

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


class Speaking:
    def __init__(self, app: App, language: str | None = None) -> None:
        self._app, self._language = app, language

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass the request on, and speak its language while it is answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with messages.speaking(asked(scope, self._language)):
            await self._app(scope, receive, send)


def asked(scope: Scope, language: str | None) -> str:
    given = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
    switched = messages.matching(given.get(HEADER.encode(), "")[:40])
    return switched or language or messages.preferred(given.get(b"accept-language", "")) or messages.ENGLISH


def spoken() -> dict[str, Any]:
    """What the page needs to speak: its texts as {id: text}, the language that they are in, and those there are."""
    language = messages.current()
    every = texts(language.id).items()
    said = {id: text for id, text in every if id.startswith("page.") and not id.startswith(_ANSWERED)}
    return {
        "texts": {id: messages.isolated(text) for id, text in said.items()}, "language": language.id,
        "direction": language.direction,
        "languages": [{"id": one.id, "name": one.name} for one in messages.languages().values()],
    }  # fmt: skip
