"""Connections on which single commands are sent, a few of which are not given back to the pool.

Half of the processor time of a command through `Redis.execute_command` is spent in its pool, its
retries and its telemetry, none of which a command on a connection that has just been used needs.
"""

from __future__ import annotations

from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

MOST_IDLE = 8  # they count as used in the pool, whose other users need some too


class Connections:
    """Connections of a client, each of which serves one command at a time."""

    def __init__(self, redis: Redis) -> None:
        self._pool = redis.connection_pool
        self._parsers = redis.response_callbacks
        self._idle: list[AbstractConnection] = []

    async def command(self, *args: str | int | float | bytes) -> Any:
        """As `Redis.execute_command`, but never tried again.

        Raises:
            RedisError: the server cannot be reached, or refuses.
        """
        connection = await self._ready()
        try:
            await connection.send_packed_command(connection.pack_command(*args))
            answer = await connection.read_response()
        except ResponseError:  # an answer too
            await self._keep(connection)
            raise
        except BaseException:  # an answer may still come, which nobody else may read
            await self._forget(connection)
            raise
        await self._keep(connection)
        parse = self._parsers.get(cast("str", args[0]))
        return answer if parse is None else parse(answer)

    async def _ready(self) -> AbstractConnection:
        """A connection that the server has not closed since it was used."""
        if self._idle:
            connection = self._idle.pop()
            if await _is_open(connection):
                return connection
            await self._forget(connection)
        return await self._pool.get_connection()  # which connects if it must

    async def _keep(self, connection: AbstractConnection) -> None:
        if len(self._idle) < MOST_IDLE and not connection.should_reconnect():
            self._idle.append(connection)
        else:
            await self._pool.release(connection)

    async def _forget(self, connection: AbstractConnection) -> None:
        await connection.disconnect(nowait=True)
        await self._pool.release(connection)


async def _is_open(connection: AbstractConnection) -> bool:
    try:
        return not await connection.can_read()
    except RedisConnectionError:
        return False
