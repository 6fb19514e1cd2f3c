"""Publishers and receivers of weights for contract tests, in this process and in others.

`python -m paceline.testing.weight_fleet TRANSPORT publish|receive ...` is one that can be killed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Self

from paceline.testing.engines import wait_for
from paceline.types import PolicyVersion
from paceline.weights import SnapshotHeader, Staging, TransportSettings, plan
from paceline.weights.route import ChunkSource, Route, TransferReport
from paceline.weights.transport import WeightReceiver, WeightTransport, make_transport

PATIENCE_S = 60.0
CHUNK = 4096
KEY = b"the key of the job, of 32 bytes."
_TENSORS = (
    ("frozen", "float32", (11, 1000)),
    ("half", "bfloat16", (3, 5001)),
    ("empty", "float32", (0, 4)),
    ("bytes", "uint8", (120_001,)),
)
_ENTRIES, _NUM_BYTES = plan(_TENSORS)
_FROZEN_BYTES = _ENTRIES[0].num_bytes


def header_of(version: int, *, frozen: bool = False) -> SnapshotHeader:
    """The header of a version of some tensors, in fifty chunks."""
    return SnapshotHeader(
        job_id="job",
        version=version,
        step=version,
        parent_version=version - 1,
        base_version=-1,
        incarnation=1,
        num_bytes=_NUM_BYTES,
        chunk_bytes=CHUNK,
        tensors=_ENTRIES,
        frozen_bytes=_FROZEN_BYTES if frozen else 0,
    )


def content(version: int) -> bytes:
    """The bytes of a version, which differs from the one before in few places."""
    data = bytearray(random.Random(0).randbytes(_NUM_BYTES))
    for offset in range(_FROZEN_BYTES + version % 97, _NUM_BYTES, 97):
        data[offset] = version % 256
    return bytes(data)


def fill(staging: Staging, version: int, *, start: int = 0, until: int = _NUM_BYTES) -> None:
    """Fill in bytes of a version."""
    data = content(version)
    for offset in range(start, until, CHUNK):
        staging.fill(offset, data[offset : min(offset + CHUNK, until)])


async def until(done: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    await wait_for(done, PATIENCE_S)


class WeightMember:
    """A transport that publishes, and receives as one worker."""

    def __init__(self, transport: WeightTransport, name: str) -> None:
        self.transport = transport
        self.endpoint = ""
        self.reports: list[TransferReport] = []
        self.complete: dict[int, Staging] = {}
        self.receiver: WeightReceiver = transport.receive(
            job_id="job", worker_id=name, report=self.reports.append, complete=self._complete
        )
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Be reachable."""
        self.endpoint = await self.transport.start()
        self._running = asyncio.create_task(self.receiver.run())

    async def close(self) -> None:
        """Stop receiving and serving."""
        await self.receiver.close()
        await self.transport.close()
        self.complete.clear()

    def publish(self, version: int, *, frozen: bool = False) -> Staging:
        """Memory to fill with a version."""
        return self.transport.publish(header_of(version, frozen=frozen), key=KEY)

    def offer(self, version: int) -> Staging:
        """Publish a whole version."""
        staging = self.publish(version)
        fill(staging, version)
        staging.finish()
        return staging

    def follow(
        self,
        version: int,
        *peers: WeightMember | str,
        base: int = -1,
        parts: int = 1,
        key: bytes = KEY,
        step: int | None = None,
    ) -> bool:
        """Receive a version: from the first `parts` peers, the others are fallbacks."""
        endpoints = [peer if isinstance(peer, str) else peer.endpoint for peer in peers]
        sources = tuple(ChunkSource(e, part, parts) for part, e in enumerate(endpoints[:parts]))
        policy = PolicyVersion(version=version, step=version if step is None else step)
        return self.receiver.route(
            Route(policy, sources, tuple(endpoints[parts:]), base_version=base, key=key)
        )

    def num_ready(self, version: int) -> int:
        """Chunks received of a version."""
        transfers = self.receiver.progress()
        return max((each.num_ready for each in transfers if each.version == version), default=0)

    async def received(self, version: int) -> Staging:
        """A version, once it is complete."""
        await until(lambda: version in self.complete)
        return self.complete[version]

    def _complete(self, staging: Staging) -> None:
        self.complete[staging.header.version] = staging


class Process:
    """A member in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, endpoint: str) -> None:
        self.endpoint = endpoint
        self.pid = process.pid
        self._process = process

    def kill(self) -> None:
        """As kill -9 does."""
        self._process.send_signal(signal.SIGKILL)


class Fleet:
    """Members that use one transport; all are closed in the end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._members: list[WeightMember] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self._members:
            await member.close()

    async def close(self, member: WeightMember) -> None:
        """Close a member, and forget it."""
        self._members.remove(member)
        await member.close()

    async def member(self) -> WeightMember:
        """A new member in this process."""
        transport = make_transport(self._name, TransportSettings(host="127.0.0.1"))
        member = WeightMember(transport, f"worker-{len(self._members)}")
        await member.start()
        self._members.append(member)
        return member

    @asynccontextmanager
    async def process(
        self, role: str, *, source: str = "", chunks: int = -1
    ) -> AsyncGenerator[Process]:
        """A process that publishes (only so many chunks) or receives from a source, version 1."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "paceline.testing.weight_fleet", self._name, role),
            *("--source", source, "--chunks", str(chunks)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(PATIENCE_S):
                line = await process.stdout.readline()
            yield Process(process, line.decode().strip())
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _run(transport: str, role: str, source: str, chunks: int) -> None:
    async with Fleet(transport) as fleet:
        member = await fleet.member()
        if role == "publish":
            staging = member.publish(1)
            fill(staging, 1, until=_NUM_BYTES if chunks < 0 else chunks * CHUNK)
            if chunks < 0:
                staging.finish()
        else:
            member.follow(1, source)
        print(member.endpoint, flush=True)
        await asyncio.to_thread(sys.stdin.read)  # to the end of the test


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("transport")
    parser.add_argument("role", choices=("publish", "receive"))
    parser.add_argument("--source", default="")
    parser.add_argument("--chunks", type=int, default=-1)
    given = parser.parse_args()
    asyncio.run(_run(given.transport, given.role, given.source, given.chunks))


if __name__ == "__main__":
    main()
