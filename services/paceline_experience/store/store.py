"""The connection to Redis, its keys and its Lua scripts. Nothing else in Paceline touches Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.resources import files
from types import TracebackType
from typing import Any, cast

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.connection import HiredisRespSerializer
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    OutOfMemoryError,
    RedisClusterException,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from paceline.enums import EPISODE_TRANSITIONS
from paceline.errors import (
    DeletedError,
    FencedError,
    NotFoundError,
    StateError,
    StoreError,
    TransitionError,
    UnavailableError,
)
from paceline.platform.store_url import malformed, plain, without_secrets
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.usage import Usage
from paceline.platform.transport.rpc import backoff_s
from paceline_experience.store.connections import Connections
from paceline_experience.store.letters import LETTERS

PING_TIMEOUT_S = 5.0
log = Log("store")

# Errors of commands that the node did not answer; all others are answers.
_UNANSWERED = (RedisConnectionError, RedisTimeoutError, RedisClusterException, ClusterDownError)

# A Lua script fails with `redis.error_reply("FENCED text")`; the first word selects the class.
_SCRIPT_ERRORS = {
    "DELETED": DeletedError,
    "FENCED": FencedError,
    "MISSING": NotFoundError,
    "LOST": UnavailableError,
    "OUTDATED": UnavailableError,
    "STATE": StateError,
    "TRANSITION": TransitionError,
}


class Store:
    """A Redis client that runs the scripts under `lua/` by name; raises only `PacelineError`s.

    On a cluster every script and transaction stays in one hash slot: a job's or the registry's.
    """

    def __init__(self, redis: Redis | RedisCluster) -> None:
        # The client must not retry a script whose answer was lost: it may have run.
        redis.set_retry(Retry(NoBackoff(), 0))
        self.redis = redis
        whole = redis.execute_command  # of a cluster it finds the node
        self._send = whole if isinstance(redis, RedisCluster) else Connections(redis).command
        self.usage: Usage | None = None  # accounts for waits, if set
        self.unreachable = False  # the last command got no answer
        self._digests: dict[str, str] = {}

    @classmethod
    async def connect(cls, url: str, *, wait_s: float = 0.0) -> Store:
        """Connect to a URL of `store_url.SCHEMES`; retry for `wait_s` while nothing answers.

        Raises:
            StoreError: nothing answers within `wait_s`, the credentials are refused, or the URL
                is invalid.
        """
        redacted = without_secrets(url)
        redis = client_of(url)
        deadline = time.monotonic() + wait_s
        attempt = 0
        while (problem := await _ping(redis)) is not None:
            pause = backoff_s(attempt, base_s=0.1)
            attempt += 1
            if problem.final or time.monotonic() + pause > deadline:
                await redis.aclose()
                raise StoreError(f"store_url {redacted}: {problem.text}")
            log.warning("waiting for the store", store=redacted, error=problem.text, wait_s=wait_s)
            await asyncio.sleep(pause)
        return cls(redis)

    async def run(self, script: str, keys: list[str], *args: str | int | float | bytes) -> Any:
        """Run `lua/<script>.lua` atomically."""
        if script not in self._digests:
            await self._load(script)
        with self.waiting():
            try:
                return await self._evalsha(script, keys, args)
            except NoScriptError:
                await self._load(script)
                return await self._evalsha(script, keys, args)

    async def command(self, *args: str | int | float | bytes) -> Any:
        """Run one plain command."""
        with self.waiting():
            return await self._send(*args)

    async def scored(self, *args: str | int | float | bytes) -> list[tuple[str, float]]:
        """Members of a sorted set and their scores, from a command that is given WITHSCORES."""
        found: list[Any] = await self.command(*args, "WITHSCORES")
        return [(name.decode(), float(score)) for name, score in pairs(found)]

    async def hashes(self, *keys: str) -> list[dict[bytes, bytes]]:
        """Read several whole hashes atomically."""
        if len(keys) == 1:  # atomic by itself; a transaction would cost twice as much
            return [dict(pairs(await self.command("HGETALL", *keys)))]
        with self.waiting():
            async with self.redis.pipeline(transaction=True) as pipe:
                for key in keys:
                    pipe.hgetall(key)
                return await pipe.execute()

    async def transaction(self, *commands: tuple[str | int, ...]) -> list[Any]:
        """Run several plain commands on keys of one hash slot, all or none; answers in order."""
        with self.waiting():
            async with self.redis.pipeline(transaction=True) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                return await pipe.execute()

    async def now(self) -> float:
        """Seconds since the epoch by the clock of Redis."""
        with self.waiting():
            seconds, micros = await self.redis.time()
        return seconds + micros / 1e6

    def waiting(self) -> AbstractContextManager[None]:
        """Account the time inside as waiting for the store, and translate errors of Redis."""
        return _StoreWait(self)

    async def close(self) -> None:
        """Close all connections."""
        await self.redis.aclose()

    async def _load(self, script: str) -> None:
        folder = files("paceline_experience.store") / "lua"
        parts = [_state_table(), *((folder / f"{n}.lua").read_text() for n in ("common", script))]
        with self.waiting():
            self._digests[script] = str(await self.redis.script_load("\n".join(parts)))

    async def _evalsha(self, script: str, keys: list[str], args: tuple[Any, ...]) -> Any:
        return await self._send("EVALSHA", self._digests[script], len(keys), *keys, *args)


@dataclass(frozen=True, slots=True)
class _Problem:
    """Why a store does not answer; `final`: retrying is useless."""

    text: str
    final: bool


def client_of(url: str) -> Redis | RedisCluster:
    """A client with the options that a `Store` needs; it connects with the first command.

    Raises:
        StoreError: the URL is not valid.
    """
    address, is_cluster = plain(url)
    # With a socket_timeout, redis-py writes inside `asyncio.wait_for`, which costs a task per
    # command and on Python 3.11 may swallow a cancellation. A dead host is found by keepalive.
    options: dict[str, Any] = {
        "socket_timeout": None,
        "socket_connect_timeout": 5.0,
        "health_check_interval": 15,
        "max_connections": 1000,  # without a number it is 100, and more at once are an error
        "retry": Retry(NoBackoff(), 0),
    }
    try:
        if is_cluster:
            return RedisCluster.from_url(address, **options)
        redis = Redis.from_url(address, **options)
    except ValueError:
        raise malformed(url) from None
    pool = redis.connection_pool
    pool.connection_class = _packing(pool.connection_class)
    return redis


def _packing(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    """A connection that encodes commands in C, which redis-py does for blocking ones only.

    A command with the payloads of many episodes costs a third as much.
    """
    packer = HiredisRespSerializer()

    def pack_command(_: AbstractConnection, *args: Any) -> list[bytes]:
        return packer.pack(*args)

    return type(kind.__name__, (kind,), {"pack_command": pack_command})


async def _ping(redis: Redis | RedisCluster) -> _Problem | None:
    try:
        async with asyncio.timeout(PING_TIMEOUT_S):
            await redis.ping()
    except TimeoutError:
        return _Problem(f"no answer within {PING_TIMEOUT_S:g} s", final=False)
    except (RedisError, RedisClusterException, OSError) as error:
        # A refusal while connecting comes wrapped in another error.
        if any(isinstance(each, AuthenticationError) for each in (error, error.__cause__)):
            return _Problem(f"the credentials are refused: {error}", final=True)
        return _Problem(str(error), final=False)
    return None


class _StoreWait:
    """A class, as every command enters one: a generator would take three times as long."""

    __slots__ = ("_block", "_store")

    def __init__(self, store: Store) -> None:
        self._store = store
        self._block = None if store.usage is None else store.usage.wait("store")

    def __enter__(self) -> None:
        if self._block is not None:
            self._block.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._block is not None:
            self._block.__exit__(kind, error, trace)
        if error is None:
            self._store.unreachable = False
        elif isinstance(error, (RedisError, RedisClusterException)):
            self._store.unreachable = isinstance(error, _UNANSWERED)
            raise translate(error) from None


def _state_table() -> str:
    """The table of episode states as Lua, so that there is only one."""
    steps = {
        LETTERS[a]: "".join(LETTERS[b] for b in after) for a, after in EPISODE_TRANSITIONS.items()
    }
    names = {letter: str(state) for state, letter in LETTERS.items()}
    return f"local STEPS = {_lua_table(steps)}\nlocal NAMES = {_lua_table(names)}"


def _lua_table(values: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key} = '{value}'" for key, value in values.items()) + "}"


def translate(error: RedisError | RedisClusterException) -> Exception:
    """The `PacelineError` for an error of Redis."""
    word, _, text = str(error).partition(" ")
    if word in _SCRIPT_ERRORS:
        return _SCRIPT_ERRORS[word](text.partition(" script: ")[0])
    if isinstance(error, OutOfMemoryError):  # redis-py strips its first word
        return StoreError(f"OOM: the store is full: {error}")
    if isinstance(error, MovedError):
        return StoreError("the store is one node of a cluster; use redis+cluster:// in store_url")
    if isinstance(error, RedisConnectionError):
        return StoreError(f"the store cannot be reached: {error}")
    return StoreError(f"the store refused: {error}")


def pairs(answer: Any) -> list[tuple[Any, Any]]:
    """Pairs of a flat reply; clients for RESP 3 have paired them already, or made a mapping."""
    if isinstance(answer, Mapping):
        return [*cast("Mapping[Any, Any]", answer).items()]
    if answer and isinstance(answer[0], list | tuple):
        return [(each[0], each[1]) for each in answer]
    return [*zip(answer[::2], answer[1::2], strict=True)]
