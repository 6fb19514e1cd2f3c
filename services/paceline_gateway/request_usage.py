"""Measures how much of its time the gateway is handling requests."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from paceline.platform.telemetry.usage import Usage

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class RequestUsage:
    """Middleware that counts a request until its response begins: streams then last for hours."""

    def __init__(self, app: ASGIApp, *, usage: Usage) -> None:
        self._app = app
        self._usage = usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with ExitStack() as handling:
            handling.enter_context(self._usage.handle())

            async def send_and_stop(message: Message) -> None:
                handling.close()
                await send(message)

            await self._app(scope, receive, send_and_stop)
