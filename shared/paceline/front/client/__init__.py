"""The SDK: jobs over REST, synchronous and asynchronous."""

from paceline.front.client.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]
