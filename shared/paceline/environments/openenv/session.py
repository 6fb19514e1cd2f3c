"""One session with an OpenEnv server: a WebSocket over which an episode is played.

The client of the `openenv` distribution would bring its server with it, and FastAPI, FastMCP and
Gradio; the protocol is a JSON object per message.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any, Self, cast

from paceline.errors import InvalidError, PacelineError, UnavailableError
from paceline.errors.extras import installing

try:
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import ConnectionClosed, WebSocketException
except ImportError as error:
    raise InvalidError(f"websockets is needed; {installing('openenv')} ({error})") from None

MAX_BYTES = 1 << 20
_OPEN_S, _CLOSE_S = 10.0, 2.0
_FULL, _WRONG = "CAPACITY_REACHED", "VALIDATION_ERROR"


class OpenEnvError(PacelineError):
    """The server has failed, or has answered what it must not."""


class ActionRefusedError(OpenEnvError):
    """The action does not fit the model of the environment's actions."""


class ServerFullError(UnavailableError):
    """The server has no free session."""


class _Connect(connect):
    """Follows no redirects, which could lead to hosts that are not allowed."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


class OpenEnvSession:
    """Sends one message at a time and awaits its answer; callers bound how long."""

    def __init__(self, connection: ClientConnection, address: str) -> None:
        self._connection = connection
        self._address = address

    @classmethod
    async def open(cls, url: str) -> Self:
        """Connect to `ws://…/ws`.

        Raises:
            UnavailableError: the server cannot be reached.
        """
        try:
            connection = await _Connect(
                url,
                proxy=None,
                compression=None,
                max_size=MAX_BYTES,
                open_timeout=_OPEN_S,
                close_timeout=_CLOSE_S,
                ping_interval=None,  # an environment may compute on the loop of its server
            )
        except (OSError, TimeoutError, WebSocketException) as error:
            raise UnavailableError(f"OpenEnv server {url}: {_describe(error)}") from None
        return cls(connection, url)

    async def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The observation that answers a `reset` or `step`: `observation`, `reward`, `done`.

        Raises:
            ActionRefusedError: `data` does not fit the environment's model.
            ServerFullError: the server has no session for this connection.
            OpenEnvError: anything else goes wrong.
        """
        try:
            with suppress(ConnectionClosed):  # a server that refuses has said why
                await self._connection.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self._connection.recv())
        except (OSError, WebSocketException) as error:
            raise OpenEnvError(f"OpenEnv server {self._address}: {_describe(error)}") from None
        except (ValueError, RecursionError) as error:
            raise OpenEnvError(f"OpenEnv server: unreadable answer: {error}") from None
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise OpenEnvError("OpenEnv server: an answer without data")
        observation = cast("dict[str, Any]", answer["data"])
        if answer.get("type") == "observation":
            return observation
        raise _error(observation)

    async def close(self) -> None:
        """End the session, which frees the server's environment."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._connection.send(json.dumps({"type": "close"}))
                await self._connection.close()
        except (OSError, TimeoutError, WebSocketException):  # it has ended already, or soon will
            self._connection.transport.abort()


def _error(data: dict[str, Any]) -> PacelineError:
    code, text = data.get("code"), str(data.get("message"))
    if code == _FULL:
        return ServerFullError(f"OpenEnv server: {text}")
    if code == _WRONG:
        errors = data.get("errors")
        messages = [_line(error) for error in cast("list[Any]", errors)] if _is_list(errors) else []
        return ActionRefusedError("; ".join(messages) or text)
    return OpenEnvError(f"OpenEnv server: {code}: {text}")


def _line(error: Any) -> str:
    """One error of pydantic: where, and what."""
    if not isinstance(error, dict):
        return str(error)
    detail = cast("dict[str, Any]", error)
    where = detail.get("loc")
    place = ".".join(map(str, cast("list[Any]", where))) if _is_list(where) else ""
    return ": ".join(filter(None, (place, str(detail.get("msg")))))


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__
