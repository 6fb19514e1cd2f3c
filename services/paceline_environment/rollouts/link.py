"""One stream to one rollout worker, shared by all of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from grpc import aio

from paceline.enums import FinishReason
from paceline.errors import PacelineError
from paceline.platform import wire
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.linger import Linger, at_once
from paceline.platform.transport.rpc import exchange
from paceline.tokens.transcript import merge_run
from paceline.types import VersionRun
from paceline.v1 import rollout_pb2 as pb
from paceline.v1.rollout_pb2_grpc import RolloutStub
from paceline_environment.coalesce import portions
from paceline_environment.rollouts.turn import Turn, TurnEnd

if TYPE_CHECKING:
    from paceline.v1.rollout_pb2_grpc import RolloutAsyncStub

log = Log("link")
_STREAM_S = 24 * 3600.0
_MAX_TOKENS = 500_000  # per message, well below the limit of gRPC


class RolloutStream:
    """Batches requests and dispatches events to their turns. Once `dead`, open a new one."""

    def __init__(self, *, worker_id: str, channel: aio.Channel, linger: Linger = at_once) -> None:
        """`linger`: how long a request waits for others, in seconds."""
        self.worker_id = worker_id
        self._linger = linger
        self.dead = False
        self._channel = channel
        self._stub: RolloutAsyncStub = RolloutStub(channel)
        self._turns: dict[str, Turn] = {}
        self._outbox: list[pb.GenerateRequest] = []
        self._aborts: list[str] = []
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"link {worker_id}")

    async def ask(self, turn: Turn, *, timeout_s: float, trace: str = "") -> TurnEnd:
        """Generate the rest of a turn; its tokens are appended to it as they arrive."""
        turn.sends += 1
        turn.resumed = turn.resumed or turn.sends > 1
        request = _request(turn, timeout_s)
        request.trace = trace
        turn.ending = self._task.get_loop().create_future()
        self._turns[request.request_id] = turn
        self._outbox.append(request)
        self._wake.set()
        try:
            return await turn.ending
        finally:
            if self._turns.pop(request.request_id, None) is not None and not self.dead:
                self._aborts.append(request.request_id)
                self._wake.set()

    async def close(self) -> None:
        """Close the stream and its channel."""
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._channel.close()

    async def _run(self) -> None:
        why = "the stream ended"
        try:
            async for events in exchange(
                self._stub.Generate, self._requests(), timeout_s=_STREAM_S
            ):
                self._deliver(events.events)
        except PacelineError as error:
            why = str(error)
        finally:
            self.dead = True
            self._wake.set()
            turns, self._turns = self._turns, {}
            if turns:
                log.warning("link lost", rollout=self.worker_id, requests=len(turns), error=why)
            for turn in turns.values():
                turn.end(TurnEnd(FinishReason.ERROR, "UNAVAILABLE", f"{self.worker_id}: {why}"))

    async def _requests(self) -> AsyncIterator[pb.GenerateBatch]:
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._linger())
            self._wake.clear()
            if self.dead:
                return
            outbox, self._outbox = self._outbox, []
            aborts, self._aborts = self._aborts, []
            for batch in portions(
                outbox, size=lambda request: len(request.tokens), max_size=_MAX_TOKENS
            ):
                yield pb.GenerateBatch(requests=batch)
            if aborts:
                yield pb.GenerateBatch(abort=aborts)

    def _deliver(self, events: Sequence[pb.GenerateEvent]) -> None:
        for event in events:
            turn = self._turns.get(event.request_id)
            if turn is None:
                continue
            if event.tokens:
                if turn.resumed:
                    turn.resumed = False
                    had = len(turn.tokens)
                    log.info(
                        "turn resumed",
                        request=turn.request_id,
                        rollout=self.worker_id,
                        num_tokens=had,
                    )
                turn.tokens.extend(event.tokens)
                if turn.stages is not None:
                    turn.stages.tokens += len(event.tokens)
                turn.logprobs.extend(event.logprobs)
                for run in event.versions:
                    merge_run(turn.versions, VersionRun(run.version, run.count, self.worker_id))
            if event.finish_reason:
                del self._turns[event.request_id]
                reason = wire.member_of(FinishReason, event.finish_reason, "finish_reason")
                turn.end(TurnEnd(reason, event.error_code, event.error))


def _request(turn: Turn, timeout_s: float) -> pb.GenerateRequest:
    sampling = turn.sampling
    tokens = [*turn.prefix, *turn.tokens] if turn.tokens else turn.prefix
    return pb.GenerateRequest(
        request_id=f"{turn.request_id}.{turn.sends}",
        tokens=tokens,
        sampling={  # pyright: ignore[reportArgumentType] (a message would be copied)
            "max_tokens": sampling.max_tokens - len(turn.tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop_tokens": sampling.stop_tokens,
            "stop_strings": sampling.stop_strings,
            "seed": sampling.seed,
        },
        pinned_version=turn.pinned_version,
        min_version=turn.min_version,
        timeout_s=timeout_s,
        sampled=len(turn.tokens),
    )
