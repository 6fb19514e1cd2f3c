"""The connection to Redis, its keys and its Lua scripts. Nothing else in Paceline touches Redis."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from paceline.errors import FencedError, NotFoundError, StateError, StoreError, TransitionError

# A Lua script fails with `redis.error_reply("FENCED text")`; the first word picks the class.
_SCRIPT_ERRORS = {
    "FENCED": FencedError,
    "MISSING": NotFoundError,
    "STATE": StateError,
    "TRANSITION": TransitionError,
}


def job_key(tenant: str, job_id: str, name: str) -> str:
    """`{tenant/job}:name`: the hash tag keeps all keys of a job on one cluster node."""
    return f"{{{tenant}/{job_id}}}:{name}"


class Store:
    """A Redis client that runs the scripts under `lua/` by name; all errors are of our tree."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self._digests: dict[str, str] = {}

    @classmethod
    async def connect(cls, url: str) -> Store:
        """Connect to a redis://, rediss:// or unix:// URL.

        Raises:
            StoreError: nothing answers there.
        """
        redis = Redis.from_url(url, socket_connect_timeout=5.0, health_check_interval=15)
        try:
            await redis.ping()
        except (RedisError, OSError) as error:
            await redis.aclose()
            raise StoreError(f"store_url {_without_password(url)}: {error}") from None
        return cls(redis)

    async def run(self, script: str, keys: list[str], *args: str | int | float | bytes) -> Any:
        """Run `lua/<script>.lua` atomically."""
        if script not in self._digests:
            await self._load(script)
        try:
            try:
                return await self._evalsha(script, keys, args)
            except NoScriptError:
                await self._load(script)
                return await self._evalsha(script, keys, args)
        except RedisError as error:
            raise translate(error) from None

    async def now(self) -> float:
        """Ledger time: seconds by the clock of Redis."""
        seconds, micros = await self.redis.time()
        return seconds + micros / 1e6

    async def close(self) -> None:
        """Close all connections."""
        await self.redis.aclose()

    async def _load(self, script: str) -> None:
        text = (files("paceline_experience") / "lua" / f"{script}.lua").read_text()
        self._digests[script] = str(await self.redis.script_load(text))

    async def _evalsha(self, script: str, keys: list[str], args: tuple[Any, ...]) -> Any:
        return await self.redis.evalsha(self._digests[script], len(keys), *keys, *args)


def translate(error: RedisError) -> Exception:
    """The error of our tree that a Redis error stands for."""
    word, _, text = str(error).partition(" ")
    if word in _SCRIPT_ERRORS:
        return _SCRIPT_ERRORS[word](text)
    if isinstance(error, RedisConnectionError):
        return StoreError(f"the store cannot be reached: {error}")
    return StoreError(f"the store refused: {error}")


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
