"""The policy as an environment of verifiers calls it: a client whose answers come from elsewhere.

An environment drives its own rollout and asks a client for each reply. Here it gets one that hands
the prompt out and waits until a reply is given.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from verifiers.clients import Client  # pyright: ignore[reportMissingImports]
from verifiers.types import (  # pyright: ignore[reportMissingImports]
    Response,
    ResponseMessage,
)


@dataclass(slots=True)
class Asked:
    """A prompt, and where its reply is awaited."""

    prompt: list[Any]  # of verifiers' messages
    tools: list[Any]  # of verifiers' tools
    reply: asyncio.Future[ResponseMessage]


class AwaitingClient(Client[Any, Any, Any, Any]):  # pyright: ignore[reportUntypedBaseClass]
    """Puts every prompt into `asked`."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: asyncio.Queue[Asked] = asyncio.Queue()

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **more: Any
    ) -> Any:
        """Hand a prompt out and await the reply, a `Response`."""
        del sampling_args, more
        reply: asyncio.Future[ResponseMessage] = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(Asked(list(prompt), list(tools or ()), reply))
        return Response(id="", created=0, model=model, message=await reply)

    async def close(self) -> None:
        """Release nothing."""

    def setup_client(self, config: Any) -> Any:
        """Not used: there is no client to set up."""
        raise NotImplementedError

    async def to_native_tool(self, tool: Any) -> Any:
        """Not used: there is no other form."""
        raise NotImplementedError

    async def to_native_prompt(self, messages: Any) -> Any:
        """Not used: there is no other form."""
        raise NotImplementedError

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **more: Any
    ) -> Any:
        """Not used: there is no other form."""
        raise NotImplementedError

    async def raise_from_native_response(self, response: Any) -> None:
        """Not used: there is no other form."""
        raise NotImplementedError

    async def from_native_response(self, response: Any) -> Any:
        """Not used: there is no other form."""
        raise NotImplementedError
