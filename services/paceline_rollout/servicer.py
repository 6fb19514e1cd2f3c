"""The wire of a rollout worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from paceline import wire
from paceline.errors import InvalidError
from paceline.interfaces import Emission, EngineStatus, Generation
from paceline.types import PolicyVersion
from paceline.v1 import rollout_pb2 as pb
from paceline.v1.rollout_pb2_grpc import RolloutServicer
from paceline_rollout.streams import Ask, Hub, Stream

EVENTS_PER_MESSAGE = 512
MAX_REQUESTS = 16_384  # in a message; even empty ones cost memory
Status = Callable[[], tuple[EngineStatus, PolicyVersion, float]]


class Servicer(RolloutServicer):
    """`Rollout` over a hub; `status` gives counters, active version and canary error."""

    def __init__(self, *, hub: Hub, worker_id: str, status: Status) -> None:
        self._hub = hub
        self._worker_id = worker_id
        self._status = status

    async def Generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request_iterator: AsyncIterator[pb.GenerateBatch], context: Any
    ) -> AsyncIterator[pb.GenerateEvents]:
        """Requests in, events out, until the caller has half-closed and all is answered.

        Raises:
            InvalidError: a message cannot be read; what came before it is answered first.
        """
        stream = self._hub.attach()
        reader = asyncio.create_task(self._read(request_iterator, stream), name="generate")
        try:
            async for batch in stream.batches():
                for first in range(0, len(batch), EVENTS_PER_MESSAGE):
                    yield _events(batch[first : first + EVENTS_PER_MESSAGE])
            if reader.done():  # else it is this side that closes
                await reader
        finally:
            reader.cancel()
            self._hub.detach(stream)

    async def Status(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.RolloutStatusRequest, context: Any
    ) -> pb.RolloutStatus:
        """Counters now."""
        now, active, canary_error = self._status()
        return pb.RolloutStatus(
            worker_id=self._worker_id,
            engine=now.engine,
            precision=now.precision,
            active=wire.version_to(active),
            running=now.running,
            waiting=now.waiting,
            tokens_generated=now.tokens_generated,
            prompt_tokens=now.prompt_tokens,
            max_context=now.max_context,
            busy_s=now.busy_s,
            idle_s=now.idle_s,
            swap_s=now.swap_s,
            canary_error=canary_error,
        )

    async def _read(self, requests: AsyncIterator[pb.GenerateBatch], stream: Stream) -> None:
        try:
            async for batch in requests:
                if (count := len(batch.requests)) > MAX_REQUESTS:
                    text = f"requests: {count} in a message; allowed: {MAX_REQUESTS}"
                    raise InvalidError(text)
                if batch.requests:
                    self._hub.submit(stream, [_ask(request) for request in batch.requests])
                if batch.abort:
                    self._hub.abort(stream, list(batch.abort))
        finally:
            stream.half_close()


def _ask(request: pb.GenerateRequest) -> Ask:
    return Ask(
        generation=Generation(
            request_id=request.request_id,
            tokens=tuple(request.tokens),
            sampling=wire.sampling_from(request.sampling),
            pinned_version=request.pinned_version,
            sampled=request.sampled,
        ),
        min_version=request.min_version,
        timeout_s=request.timeout_s,
        trace=request.trace,
    )


def _events(batch: Sequence[Emission]) -> pb.GenerateEvents:
    return pb.GenerateEvents(events=[_event(emission) for emission in batch])


def _event(emission: Emission) -> pb.GenerateEvent:
    return pb.GenerateEvent(
        request_id=emission.request_id,
        tokens=emission.tokens,
        logprobs=emission.logprobs,
        versions=wire.version_runs_to(emission.versions),
        finish_reason=emission.finish_reason,
        matched_stop=emission.matched_stop,
        error_code=emission.error_code,
        error=emission.error,
    )
