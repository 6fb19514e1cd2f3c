"""Requests of tests to the nodes outside the API: failures, commands in containers, new nodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from kubernetes_double.errors import NotFoundError
from kubernetes_double.nodes.kubelet.kubelet import Kubelet
from kubernetes_double.nodes.registry import Registry
from kubernetes_double.nodes.settings import Node

Answer = dict[str, Any]


class Requests:
    """Lines `{"id", "do": "signal" | "execute", "namespace", "pod", "container", ...}`.

    Or `{"id", "do": "add", "node": {...}}`, with the fields of `settings.Node`. Answered by
    `{"id", ...}`, with `error` where it could not be done.
    """

    def __init__(
        self, kubelet: Kubelet, registry: Registry, *, say: Callable[[Answer], None]
    ) -> None:
        self._kubelet = kubelet
        self._registry = registry
        self._say = say

    async def serve(self, lines: asyncio.StreamReader) -> None:
        """Answer requests until end of file."""
        tasks: set[asyncio.Task[None]] = set()
        while line := await lines.readline():
            task = asyncio.create_task(self._answer(json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        for task in tasks:
            task.cancel()

    async def _answer(self, request: dict[str, Any]) -> None:
        try:
            answer = await self._do(request)
        except NotFoundError as error:
            answer = {"error": str(error)}
        self._say({"id": request["id"], **answer})

    async def _do(self, request: dict[str, Any]) -> Answer:
        if request["do"] == "add":
            await self._registry.add(Node(**request["node"]))
            return {}
        namespace, pod = request["namespace"], request["pod"]
        supervisor = self._kubelet.supervisor(namespace, pod, request.get("container", ""))
        container = supervisor.container
        if container is None or not container.alive:
            raise NotFoundError(f"no container of pod {namespace}/{pod} runs")
        if request["do"] == "signal":
            container.signal(request["signal"])
            return {}
        command, timeout_s = request["command"], request["timeout_s"]
        code, output = await container.execute(command, timeout_s=timeout_s)
        return {"code": code, "output": output}
