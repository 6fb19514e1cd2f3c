"""Whether jobs can be submitted. Anybody may ask, so it is cheap and reveals no details."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2 import HealthCheckResponse

from paceline.errors import PacelineError, PendingError, UnavailableError
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.rpc import call

FRESH_S = 1.0
TIMEOUT_S = 2.0
UNAVAILABLE = "the experience service does not answer"
log = Log("readiness")


@contextmanager
def hide_upstream_details() -> Generator[None]:
    """Keep addresses and errors of the upstream out of answers to users; they are logged."""
    try:
        yield
    except PendingError:
        raise  # an answer to the user
    except UnavailableError as error:
        log.warning("experience does not answer", why=error.message)
        raise type(error)(UNAVAILABLE) from None


class Readiness:
    """Checks the health of the experience service, at most once per `FRESH_S`."""

    def __init__(self, *, check: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """`check`: the `Check` method of its gRPC health service."""
        self._check = check
        self._clock = clock
        self._checked_at = -math.inf
        self._problem = ""
        self._lock = asyncio.Lock()

    async def ready(self) -> None:
        """Raise `UnavailableError`, always with the same text, while it does not serve."""
        async with self._lock:
            if self._clock() - self._checked_at >= FRESH_S:
                await self._check_health()
        if self._problem:
            raise UnavailableError(UNAVAILABLE)

    async def _check_health(self) -> None:
        before, self._problem = self._problem, ""
        try:
            reply = await call(self._check, health_pb2.HealthCheckRequest(), timeout_s=TIMEOUT_S)
            if reply.status != HealthCheckResponse.SERVING:
                self._problem = "not serving"
        except PacelineError as error:
            self._problem = error.message or type(error).__name__
        self._checked_at = self._clock()
        if self._problem and not before:
            log.warning("experience does not answer", why=self._problem)
