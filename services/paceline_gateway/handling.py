"""How much of its time the gateway has something to answer for users."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from paceline.usage import Usage

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Handling:
    """Counts a request from its arrival until its answer begins: streams then last for hours."""

    def __init__(self, app: ASGIApp, *, usage: Usage) -> None:
        self._app = app
        self._usage = usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with ExitStack() as handling:
            handling.enter_context(self._usage.handle())

            async def answer(message: Message) -> None:
                handling.close()
                await send(message)

            await self._app(scope, receive, answer)
