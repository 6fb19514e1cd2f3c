"""The reconcile loop of all workload controllers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable

import aiohttp
from kubernetes.aio.client import ApiException

from kubernetes_double.logs import Log
from kubernetes_double.nodes.client import Kind, Object
from kubernetes_double.nodes.informer import Informer, Key, controller_of, key_of

log = Log("cluster.loop")

_PAUSES_S = (0.02, 0.1, 0.5, 2.0)


class Loop:
    """Calls `sync(key)` for the keys that `keys_of(kind, object)` returns when an object changes.

    A key is never synced concurrently, but once more if it was added meanwhile.
    """

    def __init__(
        self,
        informer: Informer,
        *,
        sync: Callable[[Key], Awaitable[None]],
        keys_of: Callable[[Kind, Object], Iterable[Key]],
    ) -> None:
        self._sync = sync
        self._waiting: dict[Key, None] = {}
        self._failures: dict[Key, int] = {}
        self._wake = asyncio.Event()
        informer.listen(lambda kind, item: self.add(*keys_of(kind, item)))

    def add(self, *keys: Key) -> None:
        """Queue keys for another sync."""
        self._waiting.update(dict.fromkeys(keys))
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                key = next(iter(self._waiting))
                del self._waiting[key]
                await self._once(key)

    async def _once(self, key: Key) -> None:
        try:
            await self._sync(key)
        except (ApiException, aiohttp.ClientError, TimeoutError) as error:
            self._again(key, error)
        except Exception as error:  # the boundary of this object: the others go on
            log.exception("failed", key="/".join(key))
            self._again(key, error)
        else:
            self._failures.pop(key, None)

    def _again(self, key: Key, error: Exception) -> None:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause_s = _PAUSES_S[min(failures, len(_PAUSES_S)) - 1]
        if failures > 1:
            log.warning("repeated", key="/".join(key), error=repr(error))
        asyncio.get_running_loop().call_later(pause_s, self.add, key)


def own_and_owned(kind: Kind, *owned: Kind) -> Callable[[Kind, Object], Iterable[Key]]:
    """Keys of a controller's own objects, and of the owners of changed objects."""

    def keys_of(changed: Kind, item: Object) -> Iterable[Key]:
        if changed is kind:
            return [key_of(item)]
        owner = controller_of(item) if changed in owned else None
        if owner is None or owner["kind"] != kind.name:
            return []
        return [(key_of(item)[0], owner["name"])]

    return keys_of


def changed(before: Object, now: Object) -> bool:
    """Whether a status must be written because any field of `now` differs."""
    return any(
        json.dumps(before.get(name), sort_keys=True) != json.dumps(value, sort_keys=True)
        for name, value in now.items()
    )
