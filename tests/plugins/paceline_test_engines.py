"""Engines that compute something else than the trainer: a little, or too much."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from paceline.plugins import (
    Engine,
    EngineFactory,
    EngineOutput,
    EngineRequest,
    EngineStatus,
    ProvesWeights,
    RollsBack,
    WeightSnapshot,
    registry,
)


class Inexact:
    """The torch engine with noise on its log-probs, or a fault in the weights that it reads."""

    def __init__(
        self,
        *,
        noise: float = 0.0,
        fault: str = "",
        versions: Sequence[int] = (),
        off_by: float = 0.0,
        worker: str = "",
        **arguments: Any,
    ) -> None:
        """`noise`: its standard deviation, in units of the noise that the trainer measures.

        `versions`: those that the fault is in; none: in all. `off_by`: what the log-probs of tokens
        are off by, though not those of the canary, on the worker whose name ends in `worker`.
        """
        make: EngineFactory = registry.find("engines", "torch")
        self._inner: Engine = make(**arguments)
        self._times = noise
        self._fault = fault
        self._versions = versions
        name = arguments["model_dir"].parent.name  # of the folder of a worker
        self._off_by = off_by if name.endswith(worker) else 0.0
        self._deviation = 0.0
        self._chance = random.Random(0)

    async def start(self) -> None:
        await self._inner.start()

    def submit(self, batch: Sequence[EngineRequest]) -> None:
        self._inner.submit(batch)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._inner.abort(request_ids)

    async def emissions(self) -> AsyncIterator[list[EngineOutput]]:
        async for batch in self._inner.emissions():
            yield [replace(each, logprobs=self._said(each.logprobs)) for each in batch]

    async def load(self, snapshot: WeightSnapshot, activation: str) -> None:
        header: Any = snapshot.header
        self._deviation = self._times * header.canary.noise
        await self._inner.load(self._read(snapshot), activation)

    async def roll_back(self, snapshot: WeightSnapshot) -> None:
        assert isinstance(self._inner, RollsBack)
        await self._inner.roll_back(self._read(snapshot))

    async def score(self, tokens: Sequence[int]) -> list[float]:
        return self._noisy(await self._inner.score(tokens))

    async def unequal(self, snapshot: WeightSnapshot) -> list[str]:
        assert isinstance(self._inner, ProvesWeights)
        return await self._inner.unequal(snapshot)

    def status(self) -> EngineStatus:
        return self._inner.status()

    async def close(self) -> None:
        await self._inner.close()

    def _said(self, logprobs: Sequence[float]) -> tuple[float, ...]:
        return tuple(x - self._off_by for x in self._noisy(logprobs))

    def _noisy(self, logprobs: Sequence[float]) -> list[float]:
        return [min(x + self._chance.gauss(0.0, self._deviation), 0.0) for x in logprobs]

    def _read(self, snapshot: WeightSnapshot) -> WeightSnapshot:
        version: int = snapshot.header.version
        if not self._fault or (self._versions and version not in self._versions):
            return snapshot
        from paceline_harness.models.corruptions import corrupted

        wrong = corrupted(snapshot, self._fault, seed=0)
        assert wrong is not None, self._fault
        return wrong
