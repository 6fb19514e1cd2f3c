"""The nodes of a cluster as a process: `python -m kubernetes_double.nodes SETTINGS`.

It must be the first process of a PID and a mount namespace, so that the kernel removes all its
pods, mounts and networks however it ends. It exchanges JSON lines: first it prints
`{"gateway": ADDRESS}`; once the API server listens there, it receives `{"kubeconfig": PATH}` and
prints `{"ready": true}`; each further line is a request (see `requests.py`) with a reply. It exits
when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from kubernetes_double.logs import EventFormatter, Log
from kubernetes_double.nodes.client import Objects, connect
from kubernetes_double.nodes.informer import Informer
from kubernetes_double.nodes.kubelet.kubelet import Kubelet
from kubernetes_double.nodes.kubelet.logs import Logs
from kubernetes_double.nodes.kubelet.machine import this_machine
from kubernetes_double.nodes.kubelet.network import Network, hide_run
from kubernetes_double.nodes.kubelet.proxy import Proxy
from kubernetes_double.nodes.kubelet.supervisor import BackOff
from kubernetes_double.nodes.kubelet.tokens import Tokens
from kubernetes_double.nodes.registry import Registry
from kubernetes_double.nodes.requests import Requests
from kubernetes_double.nodes.settings import Settings
from kubernetes_double.nodes.workloads.claims import Claims
from kubernetes_double.nodes.workloads.deployments import Deployments
from kubernetes_double.nodes.workloads.endpoints import Endpoints
from kubernetes_double.nodes.workloads.jobs import Jobs
from kubernetes_double.nodes.workloads.scheduler import Scheduler
from kubernetes_double.nodes.workloads.stateful_sets import StatefulSets

log = Log("cluster.nodes")

_BACK_OFF = BackOff(base_s=10.0, most_s=300.0, stable_s=600.0)


async def main() -> None:
    """Run the nodes of one cluster."""
    settings = TypeAdapter(Settings).validate_json(Path(sys.argv[1]).read_bytes())
    hide_run()
    network = Network(chance=random.Random())
    try:
        _say({"gateway": network.gateway})
        lines = await _standard_input()
        told = await lines.readline()
        if told:
            await _serve(settings, network, Path(json.loads(told)["kubeconfig"]), lines)
    finally:
        network.close()


async def _serve(
    settings: Settings, network: Network, kubeconfig: Path, lines: asyncio.StreamReader
) -> None:
    client = await connect(kubeconfig)
    async with client:
        informer = Informer(Objects(client))
        server = urlsplit(client.configuration.host)
        logs = Logs(settings.folder / "logs", informer)
        runner, port = await logs.serve(network.gateway)
        claims = settings.folder / "volumes"
        kubelet = Kubelet(
            informer,
            network=network,
            machine=this_machine(
                images=settings.images, files=settings.files, variables=settings.variables
            ),
            tokens=Tokens(informer.objects, host=str(server.hostname), port=server.port or 443),
            back_off=_hastened(settings.haste),
            folder=settings.folder / "pods",
            logs=logs.path,
            claims=claims,
        )
        controllers = (
            Claims(informer, folder=claims),
            *(kind(informer) for kind in (Endpoints, Scheduler, Jobs, StatefulSets, Deployments)),
        )
        proxy = Proxy(informer, network)
        registry = Registry(informer, host=network.gateway, port=port)
        for node in settings.nodes:
            await registry.add(node)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(controller.loop.run()) for controller in controllers]
            tasks.append(group.create_task(proxy.run()))
            tasks += await informer.start(group)
            _say({"ready": True})
            await Requests(kubelet, registry, say=_say).serve(lines)
            await kubelet.close()
            for task in tasks:
                task.cancel()
        await runner.cleanup()


def _hastened(haste: float) -> BackOff:
    normal = _BACK_OFF
    return BackOff(
        base_s=normal.base_s / haste,
        most_s=normal.most_s / haste,
        stable_s=normal.stable_s / haste,
    )


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


if __name__ == "__main__":
    handler = logging.StreamHandler()
    handler.setFormatter(EventFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    asyncio.run(main())
