"""Helpers for engine tests: requests, weight snapshots, and collected answers.

The contract tests are in `paceline.testing.engine_contract`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.plugins import Engine, EngineOutput, EngineRequest
from paceline.types import SamplingParams
from paceline.weights import SnapshotHeader, Staging, plan
from paceline.weights.canary import NO_CANARY, Canary, CanarySequence

PATIENCE_S = 60.0


class Answers:
    """Collects emissions by request; `swap` loads the torch `model`, or no weights if None."""

    def __init__(self, engine: Engine, model: Any = None) -> None:
        self.engine = engine
        self.model = model
        self.parts: dict[str, list[EngineOutput]] = defaultdict(list)
        self.task = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        async for batch in self.engine.emissions():
            for emission in batch:
                assert not self.ended(emission.request_id), "nothing follows an end"
                self.parts[emission.request_id].append(emission)

    def ended(self, name: str) -> EngineOutput | None:
        """The last emission of a request, if it has ended."""
        found = self.parts[name]
        return found[-1] if found and found[-1].finish_reason else None

    def tokens(self, name: str) -> list[int]:
        """All tokens of a request."""
        return [t for e in self.parts[name] for t in e.tokens]

    def logprobs(self, name: str) -> list[float]:
        """Log-probs of all tokens of a request."""
        return [x for e in self.parts[name] for x in e.logprobs]

    def versions(self, name: str) -> list[int]:
        """The version that sampled each token of a request."""
        runs = [run for e in self.parts[name] for run in e.versions]
        return [run.version for run in runs for _ in range(run.count)]

    async def until(self, name: str, tokens: int) -> None:
        """Wait until a request has this many tokens."""
        await wait_for(lambda: len(self.tokens(name)) >= tokens)

    async def end(self, name: str) -> EngineOutput:
        """Wait until a request ends."""
        await wait_for(lambda: self.ended(name) is not None)
        return self.parts[name][-1]

    async def run(self, *requests: EngineRequest) -> list[EngineOutput]:
        """Submit requests and wait until all end."""
        self.engine.submit(requests)
        return [await self.end(request.request_id) for request in requests]

    async def swap(self, version: int, activation: str = "in_flight", model: Any = None) -> None:
        """Load a version."""
        await self.engine.load(self.weights(version, model), activation)

    def weights(self, version: int, model: Any = None) -> Staging:
        """A snapshot of the torch model with this version; without one, of no weights."""
        model = model or self.model
        return blank_snapshot(version) if model is None else snapshot(model, version)


def snapshot(model: Any, version: int, canary: Sequence[int] = (1, 2), **changes: Any) -> Staging:
    """The parameters of a torch model as a trainer would publish them."""
    named: dict[str, Any] = dict(model.named_parameters())
    tensors = {
        name: (tuple(each.shape), each.detach().contiguous().numpy().tobytes())
        for name, each in named.items()
    }
    return _snapshot(tensors, version, canary, **changes)


def blank_snapshot(version: int, canary: Sequence[int] = (1, 2), **changes: Any) -> Staging:
    """A snapshot for an engine that ignores weights."""
    return _snapshot({"weight": ((4, 4), bytes(64))}, version, canary, **changes)


def _snapshot(
    tensors: Mapping[str, tuple[tuple[int, ...], bytes]],
    version: int,
    canary: Sequence[int],
    **changes: Any,
) -> Staging:
    entries, num_bytes = plan([(n, "float32", shape) for n, (shape, _) in tensors.items()])
    fields: dict[str, Any] = {
        "job_id": "job",
        "version": version,
        "step": version,
        "parent_version": -1,
        "base_version": -1,
        "incarnation": 1,
        "num_bytes": num_bytes,
        "chunk_bytes": 1 << 16,
        "tensors": entries,
        "tied": (),
        "canary": Canary((CanarySequence(tuple(canary), (-3.0,) * (len(canary) - 1)),))
        if canary
        else NO_CANARY,
        **changes,
    }
    staging = Staging(SnapshotHeader(**fields))
    for entry in entries:
        staging.fill(entry.offset, tensors[entry.name][1])
    staging.finish()
    return staging


def ask(
    name: str, tokens: Sequence[int] = (1, 2, 3), pinned: int = -1, sampled: int = 0, **s: Any
) -> EngineRequest:
    """A request, by default for eight tokens."""
    knobs: dict[str, Any] = {"max_tokens": 8, **s}
    return EngineRequest(name, tuple(tokens), SamplingParams(**knobs), pinned, sampled)


async def wait_for(done: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while not done():
            await asyncio.sleep(0.005)
