"""Whether jobs can be submitted: everybody may ask, so it costs little and tells nothing."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2 import HealthCheckResponse

from paceline.errors import PacelineError, UnavailableError
from paceline.logs import Log
from paceline.rpc import call

FRESH_S = 1.0
TIMEOUT_S = 2.0
AWAY = "the experience service does not answer"
log = Log("readiness")


@contextmanager
def plainly() -> Generator[None]:
    """Users are not told addresses and errors of what is behind the gateway; its log is."""
    try:
        yield
    except UnavailableError as error:
        log.warning("experience does not answer", why=error.message)
        raise type(error)(AWAY) from None


class Readiness:
    """Asks the experience service how it is, once in `FRESH_S` however many want to know."""

    def __init__(self, *, check: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """`check`: `Check` of its gRPC health."""
        self._check = check
        self._clock = clock
        self._asked = -math.inf
        self._why = ""
        self._lock = asyncio.Lock()

    async def ready(self) -> None:
        """Raise `UnavailableError`, with the same text always, while it does not serve."""
        async with self._lock:
            if self._clock() - self._asked >= FRESH_S:
                await self._ask()
        if self._why:
            raise UnavailableError(AWAY)

    async def _ask(self) -> None:
        before, self._why = self._why, ""
        try:
            reply = await call(self._check, health_pb2.HealthCheckRequest(), timeout_s=TIMEOUT_S)
            if reply.status != HealthCheckResponse.SERVING:
                self._why = "not serving"
        except PacelineError as error:
            self._why = error.message or type(error).__name__
        self._asked = self._clock()
        if self._why and not before:
            log.warning("experience does not answer", why=self._why)
