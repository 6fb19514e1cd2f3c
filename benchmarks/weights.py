"""How fast a snapshot travels over loopback: one pull, and a chain of peers with cut-through.

Every peer is a process of its own. Prints one line per case; `--json PATH` writes the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import resource
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import uvloop

from paceline.weights import Header, Staging, WeightServer, choose_chunk_bytes, plan, pull

JOB = "bench"


def make_header(num_bytes: int, *, version: int, chunk_bytes: int) -> Header:
    """A snapshot of one tensor."""
    entries, total = plan([("weight", "uint8", (num_bytes,))])
    return Header(JOB, version, version, version - 1, -1, 1, total, chunk_bytes, entries)


def peer(pipe: Connection, parent: str, versions: int) -> None:
    """Process of one peer: pulls from its parent, serves on, tells its endpoint and its times."""
    uvloop.run(relay(pipe, parent, versions))


async def relay(pipe: Connection, parent: str, versions: int) -> None:
    """Body of `peer`."""
    server = WeightServer(host="127.0.0.1")
    pipe.send(await server.start())

    def into(header: Header) -> Staging:
        staging = Staging(header)
        server.offer(staging)
        return staging

    for version in range(1, versions + 1):
        await asyncio.to_thread(pipe.recv)
        cpu_s = cpu()
        await pull([parent], job_id=JOB, version=version, into=into, timeout_s=120)
        pipe.send((time.monotonic(), cpu() - cpu_s))
    await asyncio.to_thread(pipe.recv)
    await server.close()


def cpu() -> float:
    """Processor seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def measure(num_bytes: int, *, peers: int, rounds: int, filled: bool) -> dict[str, float]:
    """Median seconds until the last peer is complete.

    Counted from when the whole snapshot is there (`filled`), else from its first byte, so that
    producing it is part of the time.
    """
    chunk_bytes = choose_chunk_bytes(num_bytes, receivers=peers)
    server = WeightServer(host="127.0.0.1")
    parent = await server.start()
    context = mp.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    for _ in range(peers):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=peer, args=(theirs, parent, rounds)))
        processes[-1].start()
        parent = str(await asyncio.to_thread(mine.recv))
        pipes.append(mine)
    data = os.urandom(num_bytes)
    taken: list[tuple[float, float]] = []
    for version in range(1, rounds + 1):
        staging = Staging(make_header(num_bytes, version=version, chunk_bytes=chunk_bytes))
        server.offer(staging)
        if filled:
            fill(staging, data)
        start_s, cpu_s = time.monotonic(), cpu()
        for pipe in pipes:
            pipe.send(version)
        if not filled:
            await asyncio.to_thread(fill, staging, data)
        ends = [await asyncio.to_thread(pipe.recv) for pipe in pipes]
        total_cpu_s = cpu() - cpu_s + sum(used for _, used in ends)
        taken.append((max(end for end, _ in ends) - start_s, total_cpu_s))
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("end")
        process.join()
    await server.close()
    wall_s, cpu_s = sorted(taken)[len(taken) // 2]
    return {
        "mib": num_bytes / 2**20,
        "peers": peers,
        "filled_before": filled,
        "chunk_kib": chunk_bytes / 1024,
        "wall_s": round(wall_s, 4),
        "mib_per_s": round(num_bytes / 2**20 / wall_s, 1),
        "cpu_s_per_gib_and_peer": round(cpu_s / (num_bytes / 2**30) / peers, 3),
    }


def fill(staging: Staging, data: bytes) -> None:
    """Produce the snapshot in pieces, as a trainer does tensor by tensor."""
    piece = 1 << 20
    for offset in range(0, len(data), piece):
        staging.fill(offset, memoryview(data)[offset : offset + piece])
    staging.finish()


def main() -> None:
    """Parse arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    figures: list[dict[str, float]] = []
    for peers, filled in ((1, True), (1, False), (3, True), (3, False)):
        found = uvloop.run(
            measure(given.mib << 20, peers=peers, rounds=given.rounds, filled=filled)
        )
        print(" ".join(f"{name}={value}" for name, value in found.items()), flush=True)
        figures.append(found)
    if given.json:
        given.json.write_text(json.dumps({"weights": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
