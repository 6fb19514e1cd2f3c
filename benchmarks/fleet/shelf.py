"""What holds the weights of a worker without a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from lines import tell

from paceline.plugins import EngineOutput, EngineRequest, EngineStatus, WeightSnapshot
from paceline.weights import Staging


class Shelf:
    """In the place of an engine: keeps the newest snapshot and generates nothing."""

    def __init__(self) -> None:
        self.held: Staging | None = None

    @property
    def version(self) -> int:
        """That is held; -1: none."""
        return self.held.header.version if self.held is not None else -1

    def put(self, snapshot: Staging) -> None:
        """Take it, and say so."""
        self.held = snapshot
        tell("complete", version=snapshot.header.version, root=snapshot.root)

    async def start(self) -> None:
        """Nothing to load."""

    def submit(self, batch: Sequence[EngineRequest]) -> None:
        """Nobody asks."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Nothing runs."""

    async def emissions(self) -> AsyncIterator[list[EngineOutput]]:
        """None."""
        for nothing in ():
            yield nothing

    async def load(self, snapshot: WeightSnapshot, activation: str) -> None:
        """Take it."""
        assert isinstance(snapshot, Staging)
        self.put(snapshot)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """There is no canary."""
        return []

    def status(self) -> EngineStatus:
        """Nothing but the version."""
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
