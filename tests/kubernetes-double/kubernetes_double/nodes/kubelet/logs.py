"""The output of containers: its files, and the endpoint from which the API server reads it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import web

from kubernetes_double.nodes.client import POD, Object
from kubernetes_double.nodes.informer import Informer
from kubernetes_double.nodes.workloads.pods import is_over

PATH = "/containerLogs/{namespace}/{pod}/{container}"
_POLL_S = 0.2


class Logs:
    """Log files by pod and container, kept after the pod is gone; `serve` serves them."""

    def __init__(self, folder: Path, informer: Informer) -> None:
        self._folder = folder
        self._informer = informer

    def path(self, pod: Object, container: str) -> Path:
        """The log of a container's last run; `.previous` is the one before."""
        metadata = pod["metadata"]
        folder = self._folder / metadata["namespace"] / metadata["name"] / metadata["uid"]
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{container}.log"

    async def serve(self, host: str) -> tuple[web.AppRunner, int]:
        """Listen on a free port; returns the runner and the port."""
        application = web.Application()
        application.router.add_get(PATH, self._answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, host, 0)
        await site.start()
        return runner, runner.addresses[0][1]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        known, query = request.match_info, request.query
        key = (known["namespace"], known["pod"])
        pod = self._informer.get(POD, key)
        if pod is None:
            raise web.HTTPNotFound(text=f"pod {key} is not here")
        path = self.path(pod, known["container"])
        if query.get("previous") == "true":
            path = path.with_suffix(".previous")
        try:  # a restart may rename it at any moment
            data = await asyncio.to_thread(path.read_bytes)
        except FileNotFoundError:
            text = f"container {known['container']} has no output there"
            raise web.HTTPNotFound(text=text) from None
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(_end_of(data, query.get("tailLines"), query.get("limitBytes")))
        if query.get("follow") == "true":
            await self._follow(response, path, len(data), key)
        return response

    async def _follow(
        self, response: web.StreamResponse, path: Path, read: int, key: tuple[str, str]
    ) -> None:
        while True:
            pod = self._informer.get(POD, key)
            over = pod is None or is_over(pod)
            with path.open("rb") as file:
                file.seek(read)
                more = file.read()
            if more:
                read += len(more)
                await response.write(more)
            elif over:
                return
            await asyncio.sleep(_POLL_S)


def _end_of(data: bytes, lines: str | None, limit: str | None) -> bytes:
    if lines is not None:
        data = b"".join(data.splitlines(keepends=True)[-int(lines) :]) if int(lines) else b""
    return data if limit is None else data[: int(limit)]
