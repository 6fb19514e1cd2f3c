"""The experience service, called on behalf of users."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import cache
from typing import Any

from google.protobuf.message import Message
from grpc import aio

from paceline.platform.telemetry.usage import Usage, nowhere
from paceline.platform.transport.operations import Operation
from paceline.platform.transport.principal import Principal
from paceline.platform.transport.rpc import call, stream
from paceline.platform.transport.sending import send
from paceline_gateway.messages import checked
from paceline_gateway.readiness import hide_upstream_details

STREAM_S = 3600.0


class Upstream:
    """Forwards operations unchanged; experience restricts callers to their tenant."""

    def __init__(
        self, channel: aio.Channel, *, timeout_s: float = 10.0, usage: Usage | None = None
    ) -> None:
        self._waits_on = nowhere if usage is None else usage.wait
        self._timeout_s = timeout_s
        self._channel = channel
        self._method = cache(self._make)

    async def call(
        self, each: Operation, request: Message, who: Principal, *, timeout_s: float | None = None
    ) -> Any:
        """The reply; idempotent operations are retried within the timeout."""
        with self._waits_on("experience"), hide_upstream_details():
            return await call(
                self._method(each),
                checked(request),
                timeout_s=timeout_s or self._timeout_s,
                idempotent=each.idempotent,
                on_behalf_of=who,
            )

    async def send(
        self,
        each: Operation,
        requests: AsyncIterator[Any],
        who: Principal,
        *,
        timeout_s: float,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> Any:
        """The reply to a stream of messages, once the service has accepted to read it."""
        with hide_upstream_details():
            return await send(
                self._method(each),
                (checked(request) async for request in requests),
                timeout_s=timeout_s,
                on_behalf_of=who,
                metadata=metadata,
                waits=True,
            )

    async def stream(self, each: Operation, request: Message, who: Principal) -> AsyncIterator[Any]:
        """The replies, until the stream ends or breaks."""
        with hide_upstream_details():
            replies = stream(
                self._method(each), checked(request), timeout_s=STREAM_S, on_behalf_of=who
            )
            async for reply in replies:
                yield reply

    def _make(self, each: Operation) -> Any:
        channel = self._channel
        make = channel.unary_stream if each.streams_replies else channel.unary_unary
        if each.streams_requests:
            make = channel.stream_unary
        return make(
            each.path,
            request_serializer=each.request.SerializeToString,
            response_deserializer=each.reply.FromString,
        )
