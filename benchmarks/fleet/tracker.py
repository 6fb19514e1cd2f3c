"""Process of the tracker: roster and routes of experience, without jobs and a store."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable
from typing import Any

import uvloop
from grpc import aio
from lines import answer, tell, usage

from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport import rpc
from paceline.types import PolicyVersion
from paceline.v1.roster_pb2_grpc import add_RosterServicer_to_server
from paceline.weights.route import ChunkSource
from paceline_experience.api.roster import RosterServicer
from paceline_experience.fleet.roster import Query, Roster
from paceline_experience.fleet.routes import RoutePlanner
from paceline_experience.jobs.training import SeedInstructions, Training

KEY = bytes(range(32))
LEASE_S = 6.0
SWEEP_S = 1.0


class Publications(Training):
    """Numbers publications by their steps, without jobs and ledgers."""

    def __init__(self, tracker: RoutePlanner) -> None:
        self._tracker = tracker

    async def publish_version(
        self,
        job_id: str,
        *,
        incarnation: int,
        step: int,
        parent: int,
        num_bytes: int,
        seed: ChunkSource,
        digest: str = "",
        number: int = -1,
    ) -> SeedInstructions:
        """Announce a version whose number is its step; part 0 must come first."""
        version = PolicyVersion(
            version=step,
            step=step,
            parent=parent,
            incarnation=incarnation,
            digest=digest,
            num_bytes=num_bytes,
        )
        made = self._tracker.publication(job_id, version, seed)
        self._tracker.announce(job_id, made, key=KEY)
        return SeedInstructions(version, -1, KEY, made.chunk_bytes, made.source)


async def run(address: str) -> None:
    """Serve until stdin closes."""
    roster = Roster(lease_s=LEASE_S)
    tracker = RoutePlanner(roster)
    training = Publications(tracker)

    async def no_jobs(kept: Iterable[str]) -> Iterable[str]:
        return ()

    servicer = RosterServicer(roster=roster, tracker=tracker, training=training, ended_jobs=no_jobs)
    interceptors = [rpc.ErrorInterceptor(metrics=Metrics())]
    server = aio.server(interceptors=interceptors, options=rpc.SERVER_OPTIONS)
    add_RosterServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    background = [asyncio.create_task(sweep(roster)), asyncio.create_task(follow(roster, tracker))]

    async def members() -> dict[str, Any]:
        """Active version of each member at its last heartbeat."""
        found = roster.workers(Query())
        return {"members": {worker.worker_id: worker.active_version for worker in found}}

    async def weights(job_id: str) -> dict[str, Any]:
        found = tracker.placement(job_id)
        troubles = {each.endpoint: each.trouble for each in found.holders}
        shapes = [(each.shape, each.predicted_s) for each in found.versions]
        return {"troubles": troubles, "shapes": shapes}

    tell("ready")
    await answer(members=members, usage=usage, weights=weights)
    for task in background:
        task.cancel()
    await server.stop(0.1)


async def sweep(roster: Roster) -> None:
    """Expire members without heartbeats."""
    while True:
        await asyncio.sleep(SWEEP_S)
        roster.expire()


async def follow(roster: Roster, tracker: RoutePlanner) -> None:
    """Notify the tracker of every change in the roster."""
    while True:
        event = roster.changed.event()
        tracker.sync()
        await event.wait()


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    uvloop.run(run(parser.parse_args().address))


if __name__ == "__main__":
    main()
