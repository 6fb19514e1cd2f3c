"""Connections to a real server: an answer reaches the command that it belongs to, whatever ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from paceline_experience.store.connections import MOST_IDLE, Connections
from paceline_experience.store.store import client_of


@pytest.fixture
async def redis(redis_socket: str) -> AsyncIterator[Redis]:
    client = client_of(f"unix://{redis_socket}")
    assert isinstance(client, Redis)
    yield client
    await client.aclose()


async def echoed(connections: Connections, count: int) -> None:
    texts = [str(n).encode() for n in range(count)]
    assert await asyncio.gather(*(connections.command("ECHO", each) for each in texts)) == texts


async def clients(redis: Redis) -> set[str]:
    """Numbers of all connections that the server has."""
    return {each["id"] for each in await redis.client_list()}


async def test_commands_at_once_have_connections_of_their_own_which_stay(redis: Redis) -> None:
    connections = Connections(redis)
    await echoed(connections, 20)
    known = await clients(redis)
    assert len(known) >= 20
    await echoed(connections, 20)
    assert await clients(redis) == known


async def test_after_many_at_once_the_pool_has_connections_for_others(redis_socket: str) -> None:
    redis = Redis(unix_socket_path=redis_socket, max_connections=MOST_IDLE + 2, socket_timeout=None)
    connections = Connections(redis)
    await echoed(connections, MOST_IDLE + 2)
    assert await redis.ping()
    async with redis.pipeline() as pipe:
        pipe.execute_command("ECHO", "x")
        assert await pipe.execute() == [b"x"]
    await redis.aclose()


async def test_the_answer_of_a_cancelled_command_reaches_nobody_else(redis: Redis) -> None:
    """Whether it was about to connect, to be sent or to be answered."""
    connections = Connections(redis)
    for number in range(40):
        key = str(number)
        call = asyncio.create_task(connections.command("BLPOP", key, 30))
        await asyncio.sleep(0.0005 * number)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await connections.command("RPUSH", key, "x")
        await echoed(connections, 5)


async def test_a_connection_that_the_server_has_closed_is_not_used(redis: Redis) -> None:
    connections = Connections(redis)
    await echoed(connections, 5)
    await redis.execute_command("CLIENT KILL", "TYPE", "normal", "SKIPME", "yes")
    await asyncio.sleep(0.05)
    await echoed(connections, 8)


async def test_one_that_closes_during_a_command_is_an_error_and_replaced(redis: Redis) -> None:
    connections = Connections(redis)
    number = await connections.command("CLIENT ID")
    call = asyncio.create_task(connections.command("BLPOP", "none", 30))
    await asyncio.sleep(0.02)
    await redis.execute_command("CLIENT KILL", "ID", number)
    with pytest.raises(RedisConnectionError):
        await call
    assert await connections.command("CLIENT ID") > number


async def test_a_refusal_is_an_answer(redis: Redis) -> None:
    connections = Connections(redis)
    number = await connections.command("CLIENT ID")
    await connections.command("SET", "text", "x")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await connections.command("LPUSH", "text", "x")
    assert await connections.command("CLIENT ID") == number


async def test_answers_are_those_of_the_client(redis: Redis) -> None:
    commands = (
        ("ZADD", "sorted", 1.5, "x"),
        ("ZSCORE", "sorted", "x"),
        ("SET", "key", "1", "NX", "EX", 30),
        ("SET", "key", "1", "NX"),
        ("HSET", "hash", "a", "1"),
        ("HGETALL", "hash"),
        ("HSCAN", "hash", 0),
        ("EXPIRE", "key", 9),
    )
    own, expected = [], []
    for run, answers in ((Connections(redis).command, own), (redis.execute_command, expected)):
        await redis.flushall()
        for command in commands:
            answers.append(await run(*command))
    assert own == expected
