"""Process of a rollout worker without a model: follows its route, holds weights, serves peers."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvloop
from blake3 import blake3
from forwarder import Forwarder
from lines import answer, tell, usage
from shelf import Shelf

from paceline.enums import WorkerKind
from paceline.errors import NotFoundError
from paceline.platform.server.membership import Membership
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport import rpc
from paceline.types import PolicyVersion, Worker
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline.weights import HttpTransport, Staging, TransportSettings
from paceline.weights.canary import CanaryRule
from paceline.weights.route import ChunkSource, Route, TransferProgress
from paceline_rollout.weight_updater import WeightUpdater

if TYPE_CHECKING:
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub


class Process:
    """State of the process, and handlers of its commands."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._shelf = Shelf()
        self._metrics = Metrics()
        self._weights = HttpTransport(TransportSettings(host=given.address, metrics=self._metrics))
        self._endpoint = ""
        self._transfers: Callable[[], list[TransferProgress]] = list

    async def run(self) -> None:
        """Serve until stdin closes."""
        given = self._given
        self._endpoint = await self._weights.start()
        if given.damages:
            port = urlsplit(self._endpoint).port
            assert port is not None
            self._endpoint = await Forwarder(host=given.address, port=port).start()
        roster = RosterStub(rpc.connect(given.tracker))
        running = [asyncio.create_task(each) for each in self._follow(roster)]
        tell("ready", endpoint=self._endpoint)
        await answer(
            digest=self._digest,
            progress=self._progress,
            usage=usage,
            counts=self._counts,
            pull=self._pull,
        )
        for task in running:
            task.cancel()

    def _follow(self, roster: RosterAsyncStub) -> list[Coroutine[Any, Any, None]]:
        """Background tasks of a rollout worker."""
        follower = WeightUpdater(
            roster=roster,
            engine=self._shelf,
            transport=self._weights,
            job_id=self._given.job_id,
            worker_id=self._given.worker_id,
            activation="in_flight",
            rule=CanaryRule(),
            max_refusals=3,
            metrics=self._metrics,
            changed=self._changed,
        )
        self._transfers = follower.progress
        member = Membership(roster=roster, report=self._worker, progress=follower.progress)
        return [follower.run(), member.run()]

    async def _changed(self, version: int, healthy: bool) -> None:
        pass

    def _worker(self) -> Worker:
        return Worker(
            worker_id=self._given.worker_id,
            kind=WorkerKind.ROLLOUT,
            endpoint=f"{self._given.address}:1",
            site=self._given.site,
            job_id=self._given.job_id,
            active_version=self._shelf.version,
            weights_endpoint=self._endpoint,
            pid=os.getpid(),
        )

    async def _digest(self, version: int) -> dict[str, Any]:
        held = self._shelf.held
        if held is None or held.header.version != version:
            raise NotFoundError(f"version {version} is not held")
        return {"digest": blake3(held.buffer()).hexdigest()}

    async def _progress(self) -> dict[str, Any]:
        found = self._transfers()
        fields = ("version", "num_ready", "num_chunks", "sources")
        return {"transfers": [{name: getattr(each, name) for name in fields} for each in found]}

    async def _counts(self) -> dict[str, Any]:
        """Received bytes of weights, and transfer events by name."""
        found = self._metrics.registry.collect()
        samples = [sample for family in found for sample in family.samples]
        events = [each for each in samples if each.name == "paceline_weight_events_total"]
        moved = [each for each in samples if each.name == "paceline_weight_bytes_total"]
        return {
            "events": {each.labels["event"]: each.value for each in events},
            "in_bytes": sum(each.value for each in moved if each.labels["direction"] == "in"),
        }

    async def _pull(self, job_id: str, endpoint: str, version: int, key: str) -> dict[str, Any]:
        """Pull directly from an endpoint, without the tracker."""
        done: asyncio.Future[Staging] = asyncio.get_running_loop().create_future()
        receiver = self._weights.receive(
            job_id=job_id,
            worker_id=self._given.worker_id,
            report=lambda report: None,
            complete=done.set_result,
        )
        noun = PolicyVersion(version=version, step=version)
        receiver.route(Route(noun, (ChunkSource(endpoint),), key=bytes.fromhex(key)))
        running = asyncio.create_task(receiver.run())
        await done
        running.cancel()
        return {}


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("address", "tracker", "job-id", "worker-id", "site"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--damages", type=int, default=0, help="flip bits in served data")
    uvloop.run(Process(parser.parse_args()).run())


if __name__ == "__main__":
    main()
