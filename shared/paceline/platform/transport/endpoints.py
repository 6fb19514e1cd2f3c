"""Asks outside servers that an operator allows: bounded for each job, with keys kept here."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from paceline.config.sections.endpoints import EndpointSettings
from paceline.errors import InvalidError, PacelineError, UnavailableError
from paceline.platform.fair_queue import FairQueue, QueueOwner
from paceline.platform.proxies import direct_mounts
from paceline.platform.transport.rpc import backoff_s

if TYPE_CHECKING:
    import httpx

MAX_REPLY_BYTES = 1 << 20
_OK = 200
_AGAIN = frozenset({408, 409, 425, 429})  # as are all from 500
_DENIED = frozenset({401, 403, 404})  # the key, what it may do, and the path or the model
_MOST_PAUSE_S = 30.0
_FIRST_PAUSE_S = 0.5
_DETAIL = 200


class RefusedError(InvalidError):
    """A server refuses a request for good; `code`: its own, as `context_length_exceeded`."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class DeniedError(RefusedError):
    """A server refuses the key, or has no such model: it would refuse every other request too."""


class _AgainError(PacelineError):
    """A request failed in a way that may pass; `pause_s`: how long the server wants no other."""

    def __init__(self, message: str, pause_s: float = 0.0) -> None:
        super().__init__(message)
        self.pause_s = pause_s


Pausing = Callable[[str], AbstractContextManager[None]]


def _pausing(_: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(slots=True)
class _Limit:
    """Requests of a job to an endpoint, open or waiting."""

    slots: asyncio.Semaphore
    users: int = 0


@dataclass(slots=True)
class _Endpoint:
    settings: EndpointSettings
    queue: FairQueue
    limits: dict[QueueOwner, _Limit] = field(default_factory=dict[QueueOwner, _Limit])


class WorkerEndpoints:
    """The endpoints of a worker, which its jobs share fairly."""

    def __init__(
        self,
        settings: Mapping[str, EndpointSettings],
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
        first_pause_s: float = _FIRST_PAUSE_S,
        cache_bytes: int = 64 << 20,
    ) -> None:
        """Answers of up to `cache_bytes` are kept for requests that a job repeats; 0: none is."""
        self._servers = {
            name: _Endpoint(each, FairQueue(each.concurrency)) for name, each in settings.items()
        }
        self._clock = clock
        self._rng = rng
        self._first_pause_s = first_pause_s
        self._cache = _Cache(cache_bytes)
        self._client: httpx.AsyncClient | None = None

    def of(self, owner: QueueOwner, budget_s: float) -> JobEndpoints:
        """Those of a job for one item, for `budget_s` in total; waiting for a slot is free."""
        return JobEndpoints(self, owner, budget_s)

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.aclose()

    async def post(
        self,
        owner: QueueOwner,
        name: str,
        path: str,
        body: Mapping[str, Any],
        *,
        most: int,
        fresh: bool,
        budget_s: float,
        pausing: Pausing = _pausing,
    ) -> tuple[dict[str, Any], float]:
        """An answer, and the seconds that it took; see `Endpoints.post`.

        `pausing` makes a context, given what is wrong, for the time until a request is repeated.
        """
        server = self._servers.get(name)
        if server is None:
            known = ", ".join(sorted(self._servers)) or "none"
            raise InvalidError(
                f"endpoint {name!r} is not one of this installation's: {known} "
                "(an operator sets options.endpoints of the workers)"
            )
        request = json.dumps(body).encode()
        key = hashlib.sha256(repr((owner, name, path)).encode() + request).digest()
        if not fresh and (known_answer := self._cache.get(key)) is not None:
            return known_answer, 0.0
        self._opened()  # before its time counts
        async with self._turn(server, owner, most), server.queue.slot(owner):
            started = self._clock()
            answer = await self._asked(name, server.settings, path, request, budget_s, pausing)
            took_s = self._clock() - started
        self._cache.put(key, answer)
        return answer, took_s

    def _opened(self) -> httpx.AsyncClient:
        import httpx  # some megabytes, in workers that ask servers only

        if self._client is None:
            # Each endpoint has its `concurrency`; those of httpx would be one for all of them.
            self._client = httpx.AsyncClient(
                follow_redirects=False,
                limits=httpx.Limits(max_connections=None),
                mounts=direct_mounts(each.settings.base_url for each in self._servers.values()),
            )
        return self._client

    @asynccontextmanager
    async def _turn(self, server: _Endpoint, owner: QueueOwner, most: int) -> AsyncGenerator[None]:
        limit = server.limits.setdefault(owner, _Limit(asyncio.Semaphore(most)))
        limit.users += 1
        try:
            async with limit.slots:
                yield
        finally:
            limit.users -= 1
            if not limit.users:
                server.limits.pop(owner, None)

    async def _asked(
        self,
        name: str,
        settings: EndpointSettings,
        path: str,
        request: bytes,
        budget_s: float,
        pausing: Pausing,
    ) -> dict[str, Any]:
        last, attempt = f"no answer within {budget_s:g} s", 0
        try:
            async with asyncio.timeout(budget_s):
                while True:
                    try:
                        return await self._send(name, settings, path, request)
                    except _AgainError as error:
                        last, asked_s = error.message, error.pause_s
                    pause_s = backoff_s(
                        attempt, base_s=self._first_pause_s, max_s=_MOST_PAUSE_S, rng=self._rng
                    )
                    with pausing(last):
                        await asyncio.sleep(max(pause_s, asked_s))
                    attempt += 1
        except TimeoutError:
            raise UnavailableError(f"endpoint {name!r}: {last}") from None

    async def _send(
        self, name: str, settings: EndpointSettings, path: str, request: bytes
    ) -> dict[str, Any]:
        import httpx

        key = await asyncio.to_thread(settings.key)
        headers = {"content-type": "application/json"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        url = settings.base_url.rstrip("/") + path
        try:
            async with self._opened().stream(
                "POST", url, content=request, headers=headers, timeout=settings.timeout_s
            ) as response:
                body = await _read(response)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _AgainError(f"{type(error).__name__}: {error}") from None
        code = response.status_code
        if code == _OK:
            return _object(body)
        detail = _shown(body, key)
        if code in _AGAIN or code >= 500:
            raise _AgainError(f"HTTP {code}: {detail}", _pause(response))
        denied = code in _DENIED or _is_of_model(body)
        refused = DeniedError if denied else RefusedError
        raise refused(f"endpoint {name!r}: HTTP {code}: {detail}", _code(body))


class JobEndpoints:
    """The endpoints as the judge of one item sees them; fulfils `Endpoints`."""

    def __init__(self, shared: WorkerEndpoints, owner: QueueOwner, budget_s: float) -> None:
        self._shared = shared
        self._owner = owner
        self._budget_s = self._left_s = budget_s

    async def post(
        self, endpoint: str, path: str, body: Mapping[str, Any], *, most: int, fresh: bool = False
    ) -> dict[str, Any]:
        """See `Endpoints.post`."""
        if self._left_s <= 0:
            raise UnavailableError(f"endpoint {endpoint!r}: no answer within {self._budget_s:g} s")
        answer, took_s = await self._shared.post(
            self._owner, endpoint, path, body, most=most, fresh=fresh, budget_s=self._left_s
        )
        self._left_s -= took_s
        return answer


class _Cache:
    """The answers used last."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._found: OrderedDict[bytes, tuple[dict[str, Any], int]] = OrderedDict()

    def get(self, key: bytes) -> dict[str, Any] | None:
        if key not in self._found:
            return None
        self._found.move_to_end(key)
        return self._found[key][0]

    def put(self, key: bytes, answer: dict[str, Any]) -> None:
        size = len(json.dumps(answer)) + len(key)
        _, before = self._found.pop(key, ({}, 0))
        self._found[key] = (answer, size)
        self._bytes += size - before
        while self._bytes > self._most:
            self._bytes -= self._found.popitem(last=False)[1][1]


async def _read(response: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_REPLY_BYTES:
            raise _AgainError(f"answers with more than {MAX_REPLY_BYTES} bytes")
    return bytes(body)


def _object(body: bytes) -> dict[str, Any]:
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _AgainError("the answer is not a JSON object")
    return found


def _shown(body: bytes, key: str) -> str:
    """What a server says of an error, without the key, which some repeat."""
    text = " ".join(body.decode(errors="replace").split())
    return (text.replace(key, "***") if key else text)[:_DETAIL]


def _code(body: bytes) -> str:
    """What a server calls its error: `code`, or else the `type` of the error."""
    error = _error(body)
    found = error.get("code") or error.get("type")
    return found if isinstance(found, str) else ""


def _is_of_model(body: bytes) -> bool:
    """Whether a server says that the name of the model is wrong."""
    error = _error(body)
    return error.get("param") == "model" or error.get("code") == "model_not_found"


def _error(body: bytes) -> Mapping[str, Any]:
    """The error that a server describes; empty: it describes none."""
    try:
        found: Any = json.loads(body)["error"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _pause(response: httpx.Response) -> float:
    text = response.headers.get("retry-after", "")
    return min(float(text), _MOST_PAUSE_S) if text.isascii() and text.isdigit() else 0.0
