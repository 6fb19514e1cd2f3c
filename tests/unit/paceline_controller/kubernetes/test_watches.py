"""A cache follows its source through all that a server may do."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UnavailableError
from paceline_controller.runtimes.kubernetes.connection import WATCH_S, HistoryGoneError
from paceline_controller.runtimes.kubernetes.resources import PODS, Kind
from paceline_controller.runtimes.kubernetes.watches import Cache
from paceline_harness.runtime import FakeClock


def thing(name: str, version: int, uid: str = "") -> dict[str, Any]:
    metadata = {"name": name, "resourceVersion": str(version), "uid": uid or f"uid-{name}"}
    return {"metadata": metadata}


@dataclass
class Server:
    """Remembers objects and a history that it can lose."""

    version: int = 1
    objects: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    history: list[tuple[int, str, dict[str, Any]]] = field(
        default_factory=list[tuple[int, str, dict[str, Any]]]
    )
    forgotten: int = 0
    away: bool = False
    lists: int = 0

    def put(self, name: str) -> dict[str, Any]:
        self.version += 1
        known = self.objects.get(name)
        uid = known["metadata"]["uid"] if known else f"uid-{name}-{self.version}"
        self.objects[name] = thing(name, self.version, uid)
        self.history.append((self.version, "MODIFIED" if known else "ADDED", self.objects[name]))
        return self.objects[name]

    def drop(self, name: str) -> dict[str, Any]:
        self.version += 1
        gone = thing(name, self.version, self.objects.pop(name)["metadata"]["uid"])
        self.history.append((self.version, "DELETED", gone))
        return gone

    def compact(self) -> None:
        self.forgotten = self.version

    async def list(
        self, kind: Kind, *, selector: str = "", fields: str = ""
    ) -> tuple[list[dict[str, Any]], str]:
        if self.away:
            raise UnavailableError("away")
        self.lists += 1
        return list(self.objects.values()), str(self.version)

    async def watch(
        self,
        kind: Kind,
        *,
        selector: str = "",
        fields: str = "",
        version: str,
        watch_s: int = WATCH_S,
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        if self.away:
            raise UnavailableError("away")
        if int(version) < self.forgotten:
            raise HistoryGoneError("too old")
        yield "BOOKMARK", {"metadata": {"resourceVersion": version}}
        for at, change, body in self.history:
            if at > int(version):
                yield change, body
        yield "BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}}


def cache_of(server: Server, clock: FakeClock | None = None) -> tuple[Cache, list[int]]:
    changes: list[int] = []
    cache = Cache(
        server, PODS, on_change=lambda: changes.append(1), clock=clock or FakeClock(), stale_s=90.0
    )
    return cache, changes


def names_in(cache: Cache) -> set[str]:
    return {body["metadata"]["name"] for body in cache.objects()}


async def test_it_lists_once_and_then_watches() -> None:
    server = Server()
    server.put("a")
    cache, changes = cache_of(server)
    with pytest.raises(UnavailableError, match="not listed yet"):
        cache.objects()
    await cache.follow()
    server.put("b")
    server.drop("a")
    await cache.follow()
    assert names_in(cache) == {"b"}
    assert server.lists == 1
    assert len(changes) == 3


async def test_it_lists_again_when_the_server_has_forgotten() -> None:
    server = Server()
    server.put("a")
    cache, _ = cache_of(server)
    await cache.follow()
    server.drop("a")
    server.put("b")
    server.compact()
    await cache.follow()  # 410
    await cache.follow()
    assert names_in(cache) == {"b"}
    assert server.lists == 2


async def test_old_knowledge_is_not_given_out() -> None:
    server, clock = Server(), FakeClock()
    cache, _ = cache_of(server, clock)
    await cache.follow()
    server.away = True
    clock.pass_s(60)
    with pytest.raises(UnavailableError):
        await cache.follow()
    assert cache.objects() == []
    clock.pass_s(31)
    with pytest.raises(UnavailableError, match="nothing was heard of pods for 91 s"):
        cache.objects()
    server.away = False
    await cache.follow()
    assert cache.objects() == []


async def test_own_writes_are_visible_immediately_and_not_reverted() -> None:
    server = Server()
    cache, _ = cache_of(server)
    await cache.follow()
    before = server.version
    cache.learn(server.put("a"))
    assert names_in(cache) == {"a"}
    late = [thing("a", before, "uid-a-2")]
    cache.learn(late[0])
    assert cache.objects() == [server.objects["a"]]
    gone = server.drop("a")
    cache.forget(gone)
    await cache.follow()  # brings ADDED and DELETED once more
    assert names_in(cache) == set()


steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "put and learn", "drop", "drop and forget", "compact", "follow"]),
        st.sampled_from("abc"),
    ),
    max_size=60,
)


@given(steps)
async def test_it_ends_up_with_what_the_server_has(script: list[tuple[str, str]]) -> None:
    server = Server()
    cache, _ = cache_of(server)
    await cache.follow()
    for step, name in script:
        if step.startswith("put"):
            body = server.put(name)
            if step.endswith("learn"):
                cache.learn(body)
                assert body in cache.objects()
        elif step.startswith("drop") and name in server.objects:
            gone = server.drop(name)
            if step.endswith("forget"):
                cache.forget(gone)
                assert name not in names_in(cache)
        elif step == "compact":
            server.compact()
        elif step == "follow":
            await cache.follow()
    await cache.follow()
    await cache.follow()
    found = {body["metadata"]["name"]: body for body in cache.objects()}
    assert found == server.objects
