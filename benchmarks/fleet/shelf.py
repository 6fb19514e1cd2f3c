"""A stand-in for the engine of a worker without a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from lines import tell

from paceline.plugins import EngineOutput, EngineRequest, EngineStatus, WeightSnapshot
from paceline.weights import Staging


class Shelf:
    """An engine that holds the newest snapshot and generates nothing."""

    def __init__(self) -> None:
        self.held: Staging | None = None

    @property
    def version(self) -> int:
        """Version that is held; -1: none."""
        return self.held.header.version if self.held is not None else -1

    def put(self, snapshot: Staging) -> None:
        """Hold a snapshot, and print an event."""
        self.held = snapshot
        tell("complete", version=snapshot.header.version, root=snapshot.root)

    async def start(self) -> None:
        """Nothing to load."""

    def submit(self, batch: Sequence[EngineRequest]) -> None:
        """There are no requests."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """There is nothing to abort."""

    async def emissions(self) -> AsyncIterator[list[EngineOutput]]:
        """Yields nothing."""
        for nothing in ():
            yield nothing

    async def load(self, snapshot: WeightSnapshot, activation: str) -> None:
        """Hold a snapshot."""
        assert isinstance(snapshot, Staging)
        self.put(snapshot)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Returns nothing, since there is no canary."""
        return []

    def status(self) -> EngineStatus:
        """Status with the version only."""
        return EngineStatus(
            engine="shelf",
            precision="bytes",
            version=self.version,
            running=0,
            waiting=0,
            tokens_generated=0,
            prompt_tokens=0,
            max_context=0,
            vocab_size=0,
            busy_s=0.0,
            idle_s=0.0,
            swap_s=0.0,
        )

    async def close(self) -> None:
        """Nothing to stop."""
