"""Process of a trainer rank that seeds snapshots: announces, fills and serves them."""

from __future__ import annotations

import argparse
import asyncio
import os
import threading
import time
from typing import Any

import uvloop
from blake3 import blake3
from lines import answer, tell, usage
from snapshots import Weights, noise, shapes

from paceline.enums import WorkerKind
from paceline.platform.server.membership import Membership
from paceline.platform.transport import rpc
from paceline.types import Worker
from paceline.v1 import roster_pb2 as pb
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline.weights import SnapshotHeader, Staging, WeightServer, choose_chunk_bytes, plan

PIECE_BYTES = 4 << 20
KEY = bytes(range(32))  # for snapshots offered without the tracker


class Process:
    """State of the process, and handlers of its commands."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._server = WeightServer(host=given.address, keep_streaming=True)
        self._endpoint = ""
        self._step = 0
        self._data: bytes | memoryview = b""
        self._weights: Weights | None = None
        self._filling: asyncio.Task[None] | None = None
        self._held: list[threading.Event] = []

    async def run(self) -> None:
        """Serve until stdin closes."""
        self._endpoint = await self._server.start()
        self._roster = RosterStub(rpc.connect(self._given.tracker))
        member = Membership(
            roster=self._roster, report=self._report, progress=self._server.progress
        )
        joined = asyncio.create_task(member.run())
        tell("ready", endpoint=self._endpoint)
        await answer(
            prepare=self._prepare,
            publish=self._publish,
            release=self._release,
            offer=self._offer,
            digest=self._digest,
            usage=usage,
        )
        joined.cancel()
        await self._server.close()

    def _report(self) -> Worker:
        return Worker(
            worker_id=f"trainer-{self._given.part}",
            kind=WorkerKind.TRAINER,
            endpoint=f"{self._given.address}:1",
            site=self._given.site,
            job_id=self._given.job_id,
            weights_endpoint=self._endpoint,
            pid=os.getpid(),
        )

    async def _prepare(self, num_bytes: int, seed: int, change: float = 0.0) -> dict[str, Any]:
        """Create the bytes of the next snapshot; they are the same on every seed."""
        self._step += 1
        if not change:
            self._data = noise(num_bytes, seed)
            return {}
        if self._weights is None:
            self._weights = Weights(num_bytes, seed)
        else:
            self._weights.train(change)
        self._data = self._weights.bytes()
        return {}

    async def _publish(self, held_at: float = 1.0) -> dict[str, Any]:
        """Announce a version and fill it while it is served, pausing at the share `held_at`."""
        begin_s = time.monotonic()
        reply = await rpc.call(
            self._roster.PublishVersion,
            pb.PublishVersionRequest(
                job_id=self._given.job_id,
                incarnation=1,
                step=self._step,
                parent=self._step - 1,
                weights_endpoint=self._endpoint,
                num_bytes=len(self._data),
                part=self._given.part,
                parts=self._given.parts,
            ),
            timeout_s=30.0,
            idempotent=True,
        )
        version = reply.version.version
        header = self._header(self._given.job_id, version, reply.chunk_bytes)
        self._filling = asyncio.create_task(self._fill(header, reply.key, held_at=held_at))
        return {
            "version": version,
            "begin_s": begin_s,
            "key": reply.key.hex(),
            "endpoint": self._endpoint,
            "chunk_bytes": header.chunk_bytes,
        }

    async def _release(self) -> dict[str, Any]:
        """Fill the rest of paused versions."""
        for event in self._held:
            event.set()
        self._held.clear()
        return {}

    async def _offer(self, job_id: str) -> dict[str, Any]:
        """Serve the prepared bytes as a separate job, complete and unannounced."""
        chunk_bytes = choose_chunk_bytes(len(self._data))
        header = self._header(job_id, 1, chunk_bytes)
        await self._fill(header, KEY)
        return {"job_id": job_id, "version": 1, "key": KEY.hex(), "endpoint": self._endpoint}

    def _header(self, job_id: str, version: int, chunk_bytes: int) -> SnapshotHeader:
        # Unrelated bytes get a new model name each time, so no version is a base for a delta.
        model = "model" if self._weights is not None else f"model{self._step}"
        entries, total = plan(shapes(len(self._data), model))
        return SnapshotHeader(
            job_id=job_id,
            version=version,
            step=self._step,
            parent_version=self._step - 1,
            base_version=-1,
            incarnation=1,
            num_bytes=total,
            chunk_bytes=chunk_bytes,
            tensors=entries,
        )

    async def _fill(self, header: SnapshotHeader, key: bytes, *, held_at: float = 1.0) -> None:
        # Rank 0 serves every chunk.
        part = self._given.part
        parts = self._given.parts if part else 1
        staging = self._server.stage(header, key=key, part=part, parts=parts)
        released = threading.Event()
        self._held.append(released)
        part_bytes = int(held_at * len(self._data))
        await asyncio.to_thread(fill, staging, self._data, part_bytes, released)
        tell("filled", version=header.version)

    async def _digest(self) -> dict[str, Any]:
        return {"digest": blake3(self._data).hexdigest()}


def fill(
    staging: Staging, data: bytes | memoryview, part_bytes: int, released: threading.Event
) -> None:
    """Fill the snapshot piece by piece, as a trainer does tensor by tensor.

    Wait for `released` after `part_bytes`.
    """
    view = memoryview(data)
    for offset in range(0, len(view), PIECE_BYTES):
        if offset >= part_bytes:
            released.wait()
        staging.fill(offset, view[offset : offset + PIECE_BYTES])
    staging.finish()


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("address", "tracker", "job-id", "site"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    uvloop.run(Process(parser.parse_args()).run())


if __name__ == "__main__":
    main()
