"""Contract tests for transports of weights: whatever carries them, these promises hold.

`CHECKS` are coroutine functions that take a `Fleet` of one transport; each needs a new one.
`fulfils_the_contract` runs them all.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline.errors import IntegrityError, StateError
from paceline.testing.common import expect
from paceline.testing.weight_fleet import (
    CHUNK,
    KEY,
    Fleet,
    content,
    fill,
    header_of,
    until,
)
from paceline.weights import Staging

Check = Callable[[Fleet], Awaitable[None]]
_STILL_S = 0.5


async def fulfils_the_contract(name: str) -> None:
    """Run every check with the installed transport of this name."""
    for check in CHECKS:
        async with Fleet(name) as fleet:
            try:
                await check(fleet)
            except AssertionError as error:
                raise AssertionError(f"{check.__name__}: {error}") from error


async def all_receivers_get_every_byte(fleet: Fleet) -> None:
    """Several receivers, two of them from another receiver, while the version is being filled."""
    trainer = await fleet.member()
    first, second, third, fourth = [await fleet.member() for _ in range(4)]
    staging = trainer.publish(1)
    first.follow(1, trainer)
    second.follow(1, trainer)
    third.follow(1, first, trainer)
    fourth.follow(1, third, trainer)
    fill(staging, 1, until=20 * CHUNK)
    workers = (first, second, third, fourth)
    await until(lambda: all(worker.num_ready(1) >= 20 for worker in workers))
    expect(not any(worker.complete for worker in workers), "complete before the last byte")
    fill(staging, 1, start=20 * CHUNK)
    staging.finish()
    for worker in workers:
        held = await worker.received(1)
        expect(held.root == staging.root, "the root differs")
        expect(held.header.tensors == staging.header.tensors, "the tensors differ")
        expect_tensors(held, 1)
        worker.transport.verify(held)


async def versions_follow_each_other(fleet: Fleet) -> None:
    """Also with a base to send deltas against, and where the first bytes never change."""
    trainer, worker = await fleet.member(), await fleet.member()
    for version in range(1, 7):
        staging = trainer.publish(version, frozen=True)
        worker.follow(version, trainer, base=version - 1)
        fill(staging, version)
        staging.finish()
        held = await worker.received(version)
        expect_tensors(held, version)
        expect(worker.receiver.latest == version, "the newest version is another")
        expect(worker.receiver.held(version) is held, "the version is not held")
        expect(len(worker.receiver.progress()) <= 2, "more than two versions are held")


async def parts_make_a_whole(fleet: Fleet) -> None:
    """Each of two publishers serves its part of the chunks."""
    seeds = [await fleet.member() for _ in range(2)]
    worker = await fleet.member()
    for part, seed in enumerate(seeds):
        staging = seed.transport.publish(header_of(1), key=KEY, part=part, parts=2)
        fill(staging, 1)
        staging.finish()
    worker.follow(1, *seeds, parts=2)
    expect_tensors(await worker.received(1), 1)


async def a_stranger_gets_nothing(fleet: Fleet) -> None:
    """Without the key of the job there are no bytes, and none are believed."""
    trainer, stranger, worker = [await fleet.member() for _ in range(3)]
    trainer.offer(1)
    stranger.follow(1, trainer, key=b"another key of 32 bytes, as it is")
    worker.follow(1, trainer)
    await worker.received(1)
    await asyncio.sleep(_STILL_S)
    expect(stranger.num_ready(1) == 0 and not stranger.complete, "it got bytes without the key")


async def damage_is_refused(fleet: Fleet) -> None:
    """A byte that is not the published one reaches nobody; another peer has the right one."""
    damaged, trainer, worker = [await fleet.member() for _ in range(3)]
    damaged.offer(1).buffer()[7 * CHUNK] ^= 1
    worker.follow(1, damaged)
    await until(lambda: bool(worker.reports))
    await asyncio.sleep(_STILL_S)
    expect(not worker.complete, "a damaged version is complete")
    trainer.offer(1)
    worker.follow(1, damaged, trainer)
    expect_tensors(await worker.received(1), 1)


async def damage_in_memory_is_noticed(fleet: Fleet) -> None:
    """`verify` compares what is held with what arrived, and `refetch` brings it again."""
    trainer, worker = await fleet.member(), await fleet.member()
    trainer.offer(1)
    worker.follow(1, trainer)
    held = await worker.received(1)
    held.buffer()[3 * CHUNK + 1] ^= 1
    try:
        worker.transport.verify(held)
    except IntegrityError:
        worker.receiver.refetch(1)
    else:
        expect(False, "a changed byte passes for what arrived")
    del held
    worker.complete.clear()
    expect_tensors(await worker.received(1), 1)


async def receivers_cannot_change_the_version(fleet: Fleet) -> None:
    """What one of them writes into its memory is seen by nobody else."""
    trainer, first, second = [await fleet.member() for _ in range(3)]
    staging = trainer.offer(1)
    first.follow(1, trainer)
    held = await first.received(1)
    held.buffer()[:] = bytes(len(held.buffer()))
    second.follow(1, trainer)
    expect_tensors(staging, 1)
    expect_tensors(await second.received(1), 1)


async def another_publication_replaces_a_version(fleet: Fleet) -> None:
    """A trainer that has lost its last versions gives their numbers to others."""
    trainer, again, worker = [await fleet.member() for _ in range(3)]
    trainer.offer(1)
    worker.follow(1, trainer)
    await worker.received(1)
    header = replace(header_of(1), step=5, incarnation=2)
    staging = again.transport.publish(header, key=KEY)
    fill(staging, 2)
    staging.finish()
    worker.complete.clear()
    expect(not worker.follow(1, again, step=5), "the stale version passes for the new one")
    held = await worker.received(1)
    expect(held.header.step == 5, "the stale version was received")
    expect_tensors(held, 2)


async def a_torn_version_is_never_complete(fleet: Fleet) -> None:
    """A publisher gives up in the middle, and publishes the next version."""
    trainer, worker = await fleet.member(), await fleet.member()
    staging = trainer.publish(1)
    worker.follow(1, trainer)
    fill(staging, 1, until=10 * CHUNK)
    await until(lambda: worker.num_ready(1) >= 10)
    staging.abandon()
    trainer.offer(2)
    worker.follow(2, trainer)
    expect_tensors(await worker.received(2), 2)
    expect(list(worker.complete) == [2], f"versions {list(worker.complete)} are complete")


async def newer_versions_withdraw_older_ones(fleet: Fleet) -> None:
    """Versions go while they are read: what a receiver has is whole, and in the end the newest."""
    trainer = await fleet.member()
    workers = [await fleet.member() for _ in range(2)]
    for version in range(1, 20):
        trainer.offer(version)
        for worker in workers:
            worker.follow(version, trainer)
        await asyncio.sleep(0)
    for worker in workers:
        expect_tensors(await worker.received(19), 19)
        expect(list(worker.complete) == sorted(worker.complete), "versions in another order")
        held = [worker.receiver.held(version) for version in worker.complete]
        for staging in filter(None, held):
            expect_tensors(staging, staging.header.version)


async def a_killed_publisher_is_replaced(fleet: Fleet) -> None:
    """Kill -9 in the middle of a version: another peer that has it sends it all."""
    trainer, worker, reader = [await fleet.member() for _ in range(3)]
    async with fleet.process("publish", chunks=15) as publisher:
        worker.follow(1, publisher.endpoint)
        reader.follow(1, worker, publisher.endpoint)
        await until(lambda: worker.num_ready(1) >= 15 and reader.num_ready(1) >= 15)
        publisher.kill()
    trainer.offer(1)
    worker.follow(1, publisher.endpoint, trainer)
    reader.follow(1, worker, trainer)
    expect_tensors(await worker.received(1), 1)
    expect_tensors(await reader.received(1), 1)


async def a_version_outlives_its_publisher(fleet: Fleet) -> None:
    """What was received stays, and passes on, after kill -9 of whoever made it."""
    worker, late = await fleet.member(), await fleet.member()
    async with fleet.process("publish") as publisher:
        worker.follow(1, publisher.endpoint)
        held = await worker.received(1)
        publisher.kill()
    expect_tensors(held, 1)
    late.follow(1, worker)
    expect_tensors(await late.received(1), 1)


async def a_killed_receiver_holds_up_nobody(fleet: Fleet) -> None:
    """Kill -9 of a receiver, with another behind it: that one gets the version from elsewhere."""
    trainer, worker = await fleet.member(), await fleet.member()
    staging = trainer.publish(1)
    async with fleet.process("receive", source=trainer.endpoint) as between:
        worker.follow(1, between.endpoint, trainer)
        fill(staging, 1, until=15 * CHUNK)
        await until(lambda: worker.num_ready(1) >= 15)
        between.kill()
    fill(staging, 1, start=15 * CHUNK)
    staging.finish()
    expect_tensors(await worker.received(1), 1)


async def a_reader_of_a_dead_relay_keeps_its_bytes(fleet: Fleet) -> None:
    """Memory of a version is not used for the next while somebody reads it, by whatever way."""
    trainer, worker = await fleet.member(), await fleet.member()
    trainer.offer(1)
    async with fleet.process("receive", source=trainer.endpoint) as between:
        worker.follow(1, between.endpoint)
        held = await worker.received(1)
        between.kill()
    for version in range(2, 8):
        trainer.offer(version)
    expect_tensors(held, 1)
    worker.transport.verify(held)


async def nothing_is_left_behind(fleet: Fleet) -> None:
    """After all have ended, some by kill -9: no file, no memory, no descriptor."""
    shared = shared_files(os.getpid())
    before = num_descriptors()
    async with fleet.process("publish") as publisher:
        async with fleet.process("receive", source=publisher.endpoint) as between:
            worker = await fleet.member()
            worker.follow(1, between.endpoint, publisher.endpoint)
            await worker.received(1)
            # Others on the machine have files there, which come and go.
            used = set[Path]().union(
                *(shared_files(pid) for pid in (os.getpid(), between.pid, publisher.pid))
            )
            between.kill()
        publisher.kill()
    await fleet.close(worker)
    del worker
    left = [path.name for path in used - shared if path.exists()]
    expect(not left, f"files in /dev/shm are left behind: {left}")
    await until(lambda: num_descriptors() <= before)


async def what_does_not_fit_is_refused(fleet: Fleet) -> None:
    """A snapshot beyond the memory there is ends with an error that says so, and nothing else."""
    trainer, worker = await fleet.member(), await fleet.member()
    huge = replace(header_of(1), num_bytes=1 << 60, chunk_bytes=1 << 23)
    try:
        trainer.transport.publish(huge, key=KEY)
    except StateError as error:
        expect("no memory" in str(error), f"the error says: {error}")
    else:
        expect(False, "an exbibyte is published")
    trainer.offer(2)
    worker.follow(2, trainer)
    expect_tensors(await worker.received(2), 2)


CHECKS: tuple[Check, ...] = (
    all_receivers_get_every_byte,
    versions_follow_each_other,
    parts_make_a_whole,
    a_stranger_gets_nothing,
    damage_is_refused,
    damage_in_memory_is_noticed,
    receivers_cannot_change_the_version,
    another_publication_replaces_a_version,
    a_torn_version_is_never_complete,
    newer_versions_withdraw_older_ones,
    a_killed_publisher_is_replaced,
    a_version_outlives_its_publisher,
    a_killed_receiver_holds_up_nobody,
    a_reader_of_a_dead_relay_keeps_its_bytes,
    nothing_is_left_behind,
    what_does_not_fit_is_refused,
)


def expect_tensors(staging: Staging, version: int) -> None:
    """Every tensor has the bytes of this version."""
    expected = content(version)
    for entry, data in staging.tensors():
        wanted = expected[entry.offset : entry.offset + entry.num_bytes]
        expect(bytes(data) == wanted, f"the bytes of {entry.name} differ in version {version}")


def shared_files(pid: int) -> set[Path]:
    """Files in /dev/shm that a process has open or mapped."""
    if sys.platform != "linux":
        return set()
    used = {line.rpartition(" ")[2] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            used.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {Path(name) for name in used if name.startswith("/dev/shm/")}


def num_descriptors() -> int:
    """Descriptors of weights' memory in this process."""
    gc.collect()
    count = 0
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        try:
            count += "paceline-weights" in os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return count
