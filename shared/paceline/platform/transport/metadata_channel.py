"""A channel that adds the same metadata to every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from grpc import aio

Metadata = tuple[tuple[str, str], ...]


class MetadataChannel(aio.Channel):
    """Wraps a channel.

    Interceptors would do the same, but grpc.aio then starts further tasks for every call, and takes
    one class for each type of call.
    """

    def __init__(self, channel: aio.Channel, metadata: Metadata) -> None:
        self._channel = channel
        self._metadata = metadata

    async def __aenter__(self) -> MetadataChannel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)

    async def close(self, grace: float | None = None) -> None:
        """Close the connection; calls get `grace` seconds to finish."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """The state of the connection."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait for another state of the connection."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait for the connection."""
        await self._channel.channel_ready()

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        """A method with one request and one reply."""
        return self._adding(self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        """A method with one request and a stream of replies."""
        return self._adding(self._channel.unary_stream(*args, **options))

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        """A method with a stream of requests and one reply."""
        return self._adding(self._channel.stream_unary(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        """A method with streams of requests and replies."""
        return self._adding(self._channel.stream_stream(*args, **options))

    def _adding(self, method: Any) -> Callable[..., Any]:
        own = self._metadata

        def call(*args: Any, metadata: Any = None, **options: Any) -> Any:
            return method(*args, metadata=(*(metadata or ()), *own), **options)

        return call
