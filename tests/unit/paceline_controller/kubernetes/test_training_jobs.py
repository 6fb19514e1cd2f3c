"""Steps of `TrainingJob` objects that need no gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

from paceline_controller.cluster.training_job_status import FINALIZER
from paceline_controller.cluster.training_jobs import TrainingJobs
from paceline_controller.runtimes.kubernetes.events import Events
from paceline_controller.runtimes.kubernetes.resources import (
    TRAINING_JOBS,
    Kind,
    Object,
    name_of,
)
from paceline_controller.runtimes.kubernetes.watches import Cache


def made(name: str, **fields: Any) -> Object:
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": "7"}
    return {"apiVersion": TRAINING_JOBS.api_version, "kind": TRAINING_JOBS.kind, **fields} | {
        "metadata": metadata
    }


class Server:
    """Objects that are there, and the changes that were asked for."""

    namespace = "default"

    def __init__(self, *objects: Object) -> None:
        self.objects = list(objects)
        self.changes: dict[str, Object] = {}

    async def list(
        self, kind: Kind, *, selector: str = "", fields: str = ""
    ) -> tuple[list[Object], str]:
        return self.objects, "8"

    async def watch(
        self, kind: Kind, *, selector: str = "", fields: str = "", version: str, watch_s: int = 60
    ) -> AsyncIterator[tuple[str, Object]]:
        yield "BOOKMARK", {"metadata": {"resourceVersion": version}}

    async def create(self, kind: Kind, body: Object) -> Object:
        return body

    async def patch(
        self, kind: Kind, name: str, changes: Object, *, subresource: str = ""
    ) -> Object:
        self.changes[name] = changes
        (body,) = [each for each in self.objects if name_of(each) == name]
        changed = {**changes.get("metadata", {}), "resourceVersion": "9"}
        return {**body, "metadata": {**body["metadata"], **changed}}


async def test_a_malformed_object_does_not_block_others() -> None:
    strange = made("strange", status={"state": "hibernating", "jobId": "strange-1"})
    server = Server(strange, made("usual", spec={}))
    cache = Cache(server, TRAINING_JOBS, on_change=lambda: None)
    await cache.follow()
    controller = TrainingJobs(
        api=server,
        cache=cache,
        gateway=cast(Any, None),
        workers=cast(Any, None),
        events=Events(server, identity="c-0", regarding=lambda _: None),
    )
    await controller.once()
    assert server.changes["usual"]["metadata"]["finalizers"] == [FINALIZER]
    assert list(server.changes) == ["usual"]
