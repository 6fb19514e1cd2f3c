"""Snapshot transfers over loopback: one hop, a chain of peers with cut-through, and raw TCP.

Each peer is a separate process.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from paceline.config.service import TlsSettings
from paceline.weights import SnapshotHeader, Staging, WeightServer, choose_chunk_bytes, plan, pull
from paceline_harness.certificates import Authority

JOB = "hops"
KEY = bytes(range(32))
WAIT_S = 120.0
PIECE_BYTES = 1 << 20


def hops(
    num_bytes: int, rounds: int, *, lengths: tuple[int, ...] = (1, 3)
) -> Iterator[dict[str, Any]]:
    """All rows: with and without TLS, for the first version (cold) and later ones (warm).

    `lengths` are those of the chains, in peers.

    From the third version on a peer receives into memory that it has used before.
    """
    raw = raw_tcp(num_bytes, rounds)
    yield {"scenario": "loopback-raw-tcp", "bytes": num_bytes, "workers": 1, **raw}
    with TemporaryDirectory() as folder:
        certificate = Authority(Path(folder)).issue("peer")
        for tls in (None, certificate):
            for peers in lengths:
                for each in uvloop.run(chain(num_bytes, peers=peers, rounds=rounds, tls=tls)):
                    yield {**each, "raw_tcp_gib_per_s": raw["gib_per_s"]}


async def chain(
    num_bytes: int, *, peers: int, rounds: int, tls: TlsSettings | None
) -> list[dict[str, Any]]:
    """Transfer through a chain of peers: the cold round, and the best of the warm ones.

    Timed from the complete snapshot until the last peer has verified all of it.
    """
    server = WeightServer(host="127.0.0.1", tls=tls)
    parent = await server.start()
    context = mp.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    for _ in range(peers):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=peer, args=(theirs, parent, rounds + 1, tls)))
        processes[-1].start()
        parent = str(await asyncio.to_thread(mine.recv))
        pipes.append(mine)
    data = os.urandom(num_bytes)
    taken: list[tuple[float, float]] = []
    for version in range(1, rounds + 2):
        staging = server.stage(header_of(num_bytes, version=version, peers=peers), key=KEY)
        fill(staging, data)
        del staging  # its memory is reused once the server drops it
        start_s, cpu_s = time.monotonic(), time.process_time()
        for pipe in pipes:
            pipe.send(version)
        ends = [await asyncio.to_thread(pipe.recv) for pipe in pipes]
        cpu_s = time.process_time() - cpu_s + sum(used for _, used in ends)
        taken.append((max(end for end, _ in ends) - start_s, cpu_s))
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("end")
        process.join(WAIT_S)
    await server.close()
    name = f"{'loopback' if peers == 1 else f'chain{peers}'}{'-tls' if tls else ''}"
    return [
        figures(f"{name}-cold", num_bytes, peers, taken[:1]),
        figures(name, num_bytes, peers, taken[1:]),
    ]


def figures(
    name: str, num_bytes: int, peers: int, taken: list[tuple[float, float]]
) -> dict[str, Any]:
    """Row with the best of the rounds."""
    seconds, cpu_s = min(taken)
    return {
        "scenario": name,
        "bytes": num_bytes,
        "workers": peers,
        "seconds": seconds,
        "gib_per_s": num_bytes / 2**30 / seconds,
        "cpu_s_per_gib": cpu_s / (num_bytes / 2**30) / peers,
        "digest_ok": True,  # otherwise the pull would raise
        "rounds": [each for each, _ in taken],
    }


def peer(pipe: Connection, parent: str, versions: int, tls: TlsSettings | None) -> None:
    """Process of one peer: pulls from its parent, serves others, reports endpoint and times."""
    uvloop.run(relay(pipe, parent, versions, tls))


async def relay(pipe: Connection, parent: str, versions: int, tls: TlsSettings | None) -> None:
    """Asynchronous part of `peer`."""
    server = WeightServer(host="127.0.0.1", tls=tls)
    pipe.send(await server.start())

    def into(header: SnapshotHeader) -> Staging:
        return server.stage(header, key=KEY)

    for version in range(1, versions + 1):
        await asyncio.to_thread(pipe.recv)
        cpu_s = time.process_time()
        await pull(
            [parent],
            job_id=JOB,
            version=version,
            stage=into,
            timeout_s=WAIT_S,
            key=KEY,
            tls=tls,
        )
        pipe.send((time.monotonic(), time.process_time() - cpu_s))
    await asyncio.to_thread(pipe.recv)
    await server.close()


def header_of(num_bytes: int, *, version: int, peers: int) -> SnapshotHeader:
    """Header of a snapshot with one tensor."""
    entries, total = plan([("weight", "uint8", (num_bytes,))])
    chunk_bytes = choose_chunk_bytes(num_bytes, receivers=peers)
    return SnapshotHeader(JOB, version, version, version - 1, -1, 1, total, chunk_bytes, entries)


def fill(staging: Staging, data: bytes) -> None:
    """Fill the snapshot piece by piece, as a trainer does tensor by tensor."""
    for offset in range(0, len(data), PIECE_BYTES):
        staging.fill(offset, memoryview(data)[offset : offset + PIECE_BYTES])
    staging.finish()


def raw_tcp(num_bytes: int, rounds: int) -> dict[str, Any]:
    """Raw `sendall` and `recv_into` between two processes, without verification."""
    context = mp.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=sink, args=(theirs, num_bytes, rounds))
    process.start()
    data = memoryview(os.urandom(num_bytes))
    port = mine.recv()
    taken: list[float] = []
    for _ in range(rounds):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            start_s = time.monotonic()
            for offset in range(0, num_bytes, PIECE_BYTES):
                connection.sendall(data[offset : offset + PIECE_BYTES])
            taken.append(mine.recv() - start_s)
    process.join(WAIT_S)
    best = min(taken)
    return {"seconds": best, "gib_per_s": num_bytes / 2**30 / best, "rounds": taken}


def sink(pipe: Connection, num_bytes: int, rounds: int) -> None:
    """Process that receives into one preallocated buffer."""
    buffer = memoryview(bytearray(num_bytes))
    buffer[::4096] = bytes(len(buffer[::4096]))
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        for _ in range(rounds):
            connection, _ = server.accept()
            with connection:
                filled = 0
                while filled < num_bytes:
                    filled += connection.recv_into(buffer[filled:])
                pipe.send(time.monotonic())
