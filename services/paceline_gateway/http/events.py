"""Events of a job as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from paceline.errors import PacelineError
from paceline.platform.telemetry.logs import Log
from paceline.v1 import jobs_pb2 as pb
from paceline_gateway.http.views import view

log = Log("events")
KEEP_ALIVE_S = 15.0


async def lines(
    first: pb.JobEvent,
    source: AsyncIterator[pb.JobEvent],
    *,
    seen: int,
    keep_alive_s: float = KEEP_ALIVE_S,
) -> AsyncIterator[str]:
    """One block of text per event; its id is the number of metric rows so far."""
    event: pb.JobEvent | None = first
    pending: asyncio.Task[pb.JobEvent | None] | None = None
    try:
        while event is not None:
            seen += len(event.metrics)
            yield f"id: {seen}\ndata: {_ascii_json(event)}\n\n"
            pending = asyncio.create_task(_next(source))
            while not (await asyncio.wait({pending}, timeout=keep_alive_s))[0]:
                yield ": still here\n\n"
            event = pending.result()
        yield "event: end\ndata: {}\n\n"
    except PacelineError as error:
        log.warning("events cut off", error=error)
        body = {"error": {"type": type(error).__name__, "message": error.message}}
        yield f"event: error\ndata: {json.dumps(body)}\n\n"
    finally:
        if pending is not None:
            pending.cancel()


async def _next(source: AsyncIterator[pb.JobEvent]) -> pb.JobEvent | None:
    return await anext(source, None)


def _ascii_json(event: pb.JobEvent) -> str:
    # ASCII only: some readers also break lines at U+2028 and similar characters.
    return json.dumps(json.loads(view(event).model_dump_json()))
