"""gRPC surface of a rollout worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from paceline.errors import InvalidError
from paceline.platform import wire
from paceline.plugins import EngineOutput, EngineRequest, EngineStatus
from paceline.types import PolicyVersion, SamplingParams
from paceline.v1 import rollout_pb2 as pb
from paceline.v1 import rollout_pb2_grpc as pb_grpc
from paceline.v1 import types_pb2
from paceline_rollout.streams import CallerRequest, CallerStream, StreamMultiplexer

EVENTS_PER_MESSAGE = 512
MAX_REQUESTS = 16_384  # per message; even empty requests cost memory
Status = Callable[[], tuple[EngineStatus, PolicyVersion, float]]


class RolloutServicer(pb_grpc.RolloutServicer):
    """`Rollout` over a `StreamMultiplexer`; `status` returns counters, version, canary error."""

    def __init__(self, *, multiplexer: StreamMultiplexer, worker_id: str, status: Status) -> None:
        self._multiplexer = multiplexer
        self._worker_id = worker_id
        self._status = status

    async def Generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request_iterator: AsyncIterator[pb.GenerateBatch], context: Any
    ) -> AsyncIterator[pb.GenerateEvents]:
        """Stream events until the caller has half-closed and all requests have ended.

        Raises:
            InvalidError: a message is invalid; requests before it are answered first.
        """
        stream = self._multiplexer.attach()
        reader = asyncio.create_task(self._read(request_iterator, stream), name="generate")
        try:
            async for batch in stream.batches():
                for first in range(0, len(batch), EVENTS_PER_MESSAGE):
                    yield _events(batch[first : first + EVENTS_PER_MESSAGE])
            if reader.done():  # otherwise this worker closes the stream to drain
                await reader
        finally:
            reader.cancel()
            self._multiplexer.detach(stream)

    async def Status(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.RolloutStatusRequest, context: Any
    ) -> pb.RolloutStatus:
        """Current counters."""
        now, active, canary_error = self._status()
        return pb.RolloutStatus(
            worker_id=self._worker_id,
            engine=now.engine,
            precision=now.precision,
            active=wire.to_proto(active, types_pb2.PolicyVersion),
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

    async def _read(self, requests: AsyncIterator[pb.GenerateBatch], stream: CallerStream) -> None:
        try:
            async for batch in requests:
                if (count := len(batch.requests)) > MAX_REQUESTS:
                    text = f"requests: {count} in a message; allowed: {MAX_REQUESTS}"
                    raise InvalidError(text)
                if batch.requests:
                    self._multiplexer.submit(
                        stream, [_from_proto(request) for request in batch.requests]
                    )
                if batch.abort:
                    self._multiplexer.abort(stream, list(batch.abort))
        finally:
            stream.half_close()


def _from_proto(request: pb.GenerateRequest) -> CallerRequest:
    return CallerRequest(
        generation=EngineRequest(
            request_id=request.request_id,
            tokens=tuple(request.tokens),
            sampling=wire.from_proto(request.sampling, SamplingParams),
            pinned_version=request.pinned_version,
            sampled=request.sampled,
        ),
        min_version=request.min_version,
        timeout_s=request.timeout_s,
        trace=request.trace,
    )


def _events(batch: Sequence[EngineOutput]) -> pb.GenerateEvents:
    return pb.GenerateEvents(events=[_event(output) for output in batch])


def _event(output: EngineOutput) -> pb.GenerateEvent:
    return pb.GenerateEvent(
        request_id=output.request_id,
        tokens=output.tokens,
        logprobs=output.logprobs,
        versions=[wire.to_proto(run, types_pb2.VersionRun) for run in output.versions],
        finish_reason=wire.number_of(output.finish_reason),
        matched_stop=output.matched_stop,
        error_code=output.error_code,
        error=output.error,
    )
