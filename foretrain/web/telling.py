"""What the page answers where foretrain itself has a bug: a sentence, as the command line says it, and status 500."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

from foretrain.base import bugs
from foretrain.web import answers

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


class Telling:
    """ASGI middleware: no traceback, neither in the answer nor in the terminal."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
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
            await JSONResponse(answers.error_json(bugs.told(error)), 500)(scope, receive, send)
