"""The connection to Redis, its keys and its Lua scripts. Nothing else in Paceline touches Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
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

from paceline.errors import (
    FencedError,
    NotFoundError,
    StateError,
    StoreError,
    TransitionError,
    UnavailableError,
)
from paceline.logs import Log
from paceline.rpc import backoff_s
from paceline.store_url import malformed, plain, without_secrets
from paceline.types import EPISODE_STEPS, EpisodeState
from paceline.usage import Usage

PING_TIMEOUT_S = 5.0
log = Log("store")

# What a command ends in that got no answer from the node it was for; all others are answers.
_UNANSWERED = (RedisConnectionError, RedisTimeoutError, RedisClusterException, ClusterDownError)

# A Lua script fails with `redis.error_reply("FENCED text")`; the first word picks the class.
_SCRIPT_ERRORS = {
    "FENCED": FencedError,
    "MISSING": NotFoundError,
    "LOST": UnavailableError,
    "OUTDATED": UnavailableError,
    "STATE": StateError,
    "TRANSITION": TransitionError,
}

# One letter per state in the records that scripts read and write.
LETTERS: dict[EpisodeState, str] = {
    EpisodeState.QUEUED: "q",
    EpisodeState.LEASED: "l",
    EpisodeState.FINISHED: "f",
    EpisodeState.READY: "r",
    EpisodeState.TAKEN: "t",
    EpisodeState.TRAINED: "n",
    EpisodeState.DURABLE: "d",
    EpisodeState.MEASURED: "m",
    EpisodeState.DROPPED: "x",
}


def job_key(tenant: str, job_id: str, name: str) -> str:
    """`{tenant/job}:name`: the hash tag keeps all keys of a job on one cluster node."""
    return f"{{{tenant}/{job_id}}}:{name}"


class Store:
    """A client of Redis that runs the scripts under `lua/` by name; all errors are of our tree.

    On a cluster every script and transaction stays in one slot: that of a job, or the registry's.
    """

    def __init__(self, redis: Redis | RedisCluster) -> None:
        # A script whose answer was lost must not run again behind the back of who called it.
        redis.set_retry(Retry(NoBackoff(), 0))
        self.redis = redis
        self.usage: Usage | None = None  # told of every wait, if it is there
        self.away = False  # the last that was asked got no answer
        self._digests: dict[str, str] = {}

    @classmethod
    async def connect(cls, url: str, *, wait_s: float = 0.0) -> Store:
        """Connect to a URL of `paceline.store_url.SCHEMES`; wait for who does not answer yet.

        Raises:
            StoreError: nothing answers there within `wait_s`, it refuses the credentials, or it is
                no such URL.
        """
        shown = without_secrets(url)
        redis = _client(url)
        deadline = time.monotonic() + wait_s
        attempt = 0
        while (problem := await _ping(redis)) is not None:
            pause = backoff_s(attempt, base_s=0.1)
            attempt += 1
            if problem.final or time.monotonic() + pause > deadline:
                await redis.aclose()
                raise StoreError(f"store_url {shown}: {problem.text}")
            log.warning("waits for the store", store=shown, error=problem.text, wait_s=wait_s)
            await asyncio.sleep(pause)
        return cls(redis)

    async def run(self, script: str, keys: list[str], *args: str | int | float | bytes) -> Any:
        """Run `lua/<script>.lua` atomically."""
        if script not in self._digests:
            await self._load(script)
        with self.asked():
            try:
                return await self._evalsha(script, keys, args)
            except NoScriptError:
                await self._load(script)
                return await self._evalsha(script, keys, args)

    async def command(self, *args: str | int | float | bytes) -> Any:
        """One plain command."""
        with self.asked():
            return await self.redis.execute_command(*args)

    async def hashes(self, *keys: str) -> list[dict[bytes, bytes]]:
        """Several whole hashes, as of one moment."""
        with self.asked():
            async with self.redis.pipeline(transaction=True) as pipe:
                for key in keys:
                    pipe.hgetall(key)
                return await pipe.execute()

    async def together(self, *commands: tuple[str | int, ...]) -> list[Any]:
        """Several plain commands on keys of one slot, all or none; their answers in order."""
        with self.asked():
            async with self.redis.pipeline(transaction=True) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                return await pipe.execute()

    async def now(self) -> float:
        """Ledger time: seconds by the clock of Redis."""
        with self.asked():
            seconds, micros = await self.redis.time()
        return seconds + micros / 1e6

    @contextmanager
    def asked(self) -> Generator[None]:
        """Inside, somebody waits for Redis; its errors leave as errors of our tree."""
        with nullcontext() if self.usage is None else self.usage.wait("store"), translated():
            try:
                yield
            except (RedisError, RedisClusterException) as error:
                self.away = isinstance(error, _UNANSWERED)
                raise
            self.away = False

    async def close(self) -> None:
        """Close all connections."""
        await self.redis.aclose()

    async def _load(self, script: str) -> None:
        folder = files("paceline_experience") / "lua"
        parts = [_state_table(), *((folder / f"{n}.lua").read_text() for n in ("common", script))]
        with self.asked():
            self._digests[script] = str(await self.redis.script_load("\n".join(parts)))

    async def _evalsha(self, script: str, keys: list[str], args: tuple[Any, ...]) -> Any:
        return await self.redis.evalsha(self._digests[script], len(keys), *keys, *args)


@dataclass(frozen=True, slots=True)
class _Problem:
    """Why a store does not answer, and whether waiting is of no use."""

    text: str
    final: bool


def _client(url: str) -> Redis | RedisCluster:
    address, is_cluster = plain(url)
    # With a socket_timeout, redis-py writes inside `asyncio.wait_for`, which costs a task per
    # command and on Python 3.11 may swallow a cancellation. A dead host is found by keepalive.
    options: dict[str, Any] = {
        "socket_timeout": None,
        "socket_connect_timeout": 5.0,
        "health_check_interval": 15,
        "retry": Retry(NoBackoff(), 0),
    }
    try:
        return (RedisCluster if is_cluster else Redis).from_url(address, **options)
    except ValueError:
        raise malformed(url) from None


async def _ping(redis: Redis | RedisCluster) -> _Problem | None:
    try:
        async with asyncio.timeout(PING_TIMEOUT_S):
            await redis.ping()
    except TimeoutError:
        return _Problem(f"no answer within {PING_TIMEOUT_S:g} s", final=False)
    except (RedisError, RedisClusterException, OSError) as error:
        # What is refused while a connection is being made comes wrapped.
        if any(isinstance(each, AuthenticationError) for each in (error, error.__cause__)):
            return _Problem(f"the credentials are refused: {error}", final=True)
        return _Problem(str(error), final=False)
    return None


def _state_table() -> str:
    """The nouns' state table as Lua, so that there is one of it."""
    steps = {LETTERS[a]: "".join(LETTERS[b] for b in after) for a, after in EPISODE_STEPS.items()}
    names = {letter: str(state) for state, letter in LETTERS.items()}
    return f"local STEPS = {_lua_table(steps)}\nlocal NAMES = {_lua_table(names)}"


def _lua_table(values: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key} = '{value}'" for key, value in values.items()) + "}"


@contextmanager
def translated() -> Generator[None]:
    """Errors of Redis inside leave as errors of our tree."""
    try:
        yield
    except (RedisError, RedisClusterException) as error:
        raise translate(error) from None


def translate(error: RedisError | RedisClusterException) -> Exception:
    """The error of our tree that a Redis error stands for."""
    word, _, text = str(error).partition(" ")
    if word in _SCRIPT_ERRORS:
        return _SCRIPT_ERRORS[word](text.partition(" script: ")[0])
    if isinstance(error, OutOfMemoryError):  # which has lost its first word
        return StoreError(f"OOM: the store is full: {error}")
    if isinstance(error, MovedError):
        return StoreError("the store is one node of a cluster; use redis+cluster:// in store_url")
    if isinstance(error, RedisConnectionError):
        return StoreError(f"the store cannot be reached: {error}")
    return StoreError(f"the store refused: {error}")
