"""An engine that wraps another one and counts requests. `paceline.plugins.Engine` has the docs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from paceline.plugins import (
    Engine,
    EngineFactory,
    EngineOutput,
    EngineRequest,
    EngineStatus,
    WeightSnapshot,
    registry,
)


class Metered:
    """Delegates to the engine `inner`, which gets all other arguments."""

    def __init__(self, *, inner: str = "torch", **arguments: Any) -> None:
        make: EngineFactory = registry.find("engines", inner)
        self._inner: Engine = make(**arguments)
        self.num_requests = 0

    async def start(self) -> None:
        """Start the inner engine."""
        await self._inner.start()

    def submit(self, batch: Sequence[EngineRequest]) -> None:
        """Count the requests and forward them."""
        self.num_requests += len(batch)
        self._inner.submit(batch)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests."""
        self._inner.abort(request_ids)

    def emissions(self) -> AsyncIterator[list[EngineOutput]]:
        """Stream the tokens of all requests."""
        return self._inner.emissions()

    async def load(self, snapshot: WeightSnapshot, activation: str) -> None:
        """Swap weights: `snapshot.header.version`, `snapshot.tensors()`."""
        await self._inner.load(snapshot, activation)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of a prompt, for the canary check."""
        return await self._inner.score(tokens)

    def status(self) -> EngineStatus:
        """Counters of the inner engine, under a distinct name."""
        status = self._inner.status()
        return replace(status, engine=f"metered-{status.engine}")

    async def close(self) -> None:
        """Close the inner engine."""
        await self._inner.close()
