"""Client of SGLang's HTTP API: one method per call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, NoReturn

import aiohttp

from paceline.errors import (
    AuthenticationError,
    DeadlineError,
    InvalidError,
    NotFoundError,
    PacelineError,
    PermissionDeniedError,
    UnavailableError,
)

PROBE_TIMEOUT_S = 5.0
CONTROL_TIMEOUT_S = 60.0
UPDATE_TIMEOUT_S = 600.0
# SGLang closes a connection that was idle for 5 s. One that is kept as long here can close
# under a request, and a POST is not sent again.
_KEEPALIVE_S = 2.0
_ERRORS: dict[int, type[PacelineError]] = {
    400: InvalidError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    422: InvalidError,
}


class SglangClient:
    """Client of one server. A refusal raises `InvalidError`, no answer `UnavailableError`."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=PROBE_TIMEOUT_S),
            headers=headers,
        )

    async def close(self) -> None:
        """Close all connections; the server aborts their requests."""
        await self._session.close()

    async def server_info(self) -> dict[str, Any]:
        """The server's arguments, state and version."""
        return await self._get("/server_info", timeout_s=CONTROL_TIMEOUT_S)

    async def model_info(self) -> dict[str, Any]:
        """Model path, weight version and more."""
        return await self._get("/model_info", timeout_s=PROBE_TIMEOUT_S)

    async def ready(self) -> bool:
        """Whether the server takes requests; old servers must generate a token to tell."""
        try:
            await self._get("/ready", timeout_s=PROBE_TIMEOUT_S)
        except NotFoundError:
            return await self.healthy(timeout_s=CONTROL_TIMEOUT_S)
        except PacelineError:
            return False
        return True

    async def healthy(self, *, timeout_s: float) -> bool:
        """Whether the server can generate a token; takes at least a second."""
        try:
            await self._get("/health_generate", timeout_s=timeout_s)
        except PacelineError:
            return False
        return True

    async def generate(self, body: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Generate a complete answer."""
        return await self._post("/generate", body, timeout_s=timeout_s)

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Stream the events of an answer."""
        try:
            async with self._session.post(
                f"{self.url}/generate", json={**body, "stream": True}
            ) as reply:
                if reply.status != 200:
                    _raise_for(reply.status, await reply.read())
                async for event in _events(reply.content):
                    if event.get("error"):
                        _raise_for(400, json.dumps(event).encode())
                    yield event
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(f"sglang at {self.url}: {_text(error)}") from error

    async def abort(self, rid: str) -> None:
        """Abort all requests whose ids begin with `rid`; they keep the tokens they have."""
        await self._post("/abort_request", {"rid": rid}, timeout_s=CONTROL_TIMEOUT_S)

    async def pause(self, mode: str) -> None:
        """`in_place` stops between steps, `retract` also empties the cache, `abort` ends all."""
        await self._post("/pause_generation", {"mode": mode}, timeout_s=UPDATE_TIMEOUT_S)

    async def resume(self) -> None:
        """Continue after a pause."""
        await self._post("/continue_generation", {}, timeout_s=CONTROL_TIMEOUT_S)

    async def flush_cache(self) -> None:
        """Drop all cached prefixes; refused while requests run."""
        await self._post("/flush_cache", {}, timeout_s=CONTROL_TIMEOUT_S)

    async def begin_update(self) -> None:
        """Open a session of weight updates."""
        await self._post(
            "/begin_weight_update", {"selector": "target"}, timeout_s=CONTROL_TIMEOUT_S
        )

    async def end_update(self) -> None:
        """Close the session of weight updates."""
        await self._post("/end_weight_update", {}, timeout_s=UPDATE_TIMEOUT_S)

    async def update_from_tensor(self, body: Mapping[str, Any]) -> None:
        """Load weights that are in the request, or in shared memory that it points to."""
        await self._update("/update_weights_from_tensor", body)

    async def update_from_disk(self, body: Mapping[str, Any]) -> None:
        """Load weights from a folder."""
        await self._update("/update_weights_from_disk", body)

    async def update_from_distributed(self, body: Mapping[str, Any]) -> None:
        """Load weights that rank 0 of a process group broadcasts during this call."""
        await self._update("/update_weights_from_distributed", body)

    async def join_group(self, body: Mapping[str, Any]) -> None:
        """Join a process group; returns when all ranks have joined."""
        await self._update("/init_weights_update_group", body)

    async def leave_group(self, name: str) -> None:
        """Leave a process group."""
        await self._update("/destroy_weights_update_group", {"group_name": name})

    async def checksums(self) -> list[dict[str, str]]:
        """Checksums of each rank's tensors, by SGLang's names."""
        reply = await self._post(
            "/weights_checker", {"action": "checksum"}, timeout_s=UPDATE_TIMEOUT_S
        )
        return [dict(rank.get("checksums", {})) for rank in reply.get("ranks") or []]

    async def _update(self, path: str, body: Mapping[str, Any]) -> None:
        reply = await self._post(path, body, timeout_s=UPDATE_TIMEOUT_S)
        if reply.get("success") is False:
            raise InvalidError(f"sglang: {path}: {reply.get('message') or 'failed'}")

    async def _get(self, path: str, *, timeout_s: float) -> dict[str, Any]:
        return await self._call("GET", path, None, timeout_s=timeout_s)

    async def _post(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float
    ) -> dict[str, Any]:
        return await self._call("POST", path, body, timeout_s=timeout_s)

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> dict[str, Any]:
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, f"{self.url}{path}", json=body) as reply,
            ):
                data = await reply.read()
        except TimeoutError as error:
            text = f"sglang at {self.url}: {path} did not answer within {timeout_s:g} s"
            raise DeadlineError(text) from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(f"sglang at {self.url}: {_text(error)}") from error
        if reply.status != 200:
            _raise_for(reply.status, data, path)
        return _object(data)


def error_text(data: bytes) -> str:
    """The message of an error, in any of SGLang's four formats.

    `{"success": false, "message"}`, `{"error": {"message"}}`, `{"error": "text"}` and
    `{"object": "error", "message"}`; anything else is quoted.
    """
    content = _object(data)
    error = content.get("error")
    if isinstance(error, Mapping):
        error = error.get("message")
    found = error or content.get("message") or content.get("detail")
    return str(found) if found else data.decode(errors="replace").strip()[:500]


def _raise_for(status: int, data: bytes, path: str = "/generate") -> NoReturn:
    kind = _ERRORS.get(status, UnavailableError)
    raise kind(f"sglang: {path}: {error_text(data) or f'status {status}'}")


def _object(data: bytes) -> dict[str, Any]:
    """The JSON object in an answer; empty if it is plain text or null."""
    try:
        content: Any = json.loads(data)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Events of `data:` lines of any length; ends after `[DONE]`."""
    buffer = b""
    async for block in content.iter_any():
        buffer += block
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                return
            if data:
                yield json.loads(data)
    raise aiohttp.ClientPayloadError("the answer is incomplete")


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
