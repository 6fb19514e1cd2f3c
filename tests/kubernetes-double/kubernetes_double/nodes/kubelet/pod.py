"""One pod on this machine, from its binding to a node to its removal."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from kubernetes.aio.client import ApiException

from kubernetes_double.errors import NotFoundError, UnavailableError
from kubernetes_double.logs import Log
from kubernetes_double.nodes.client import POD, Object
from kubernetes_double.nodes.informer import Informer
from kubernetes_double.nodes.kubelet import container as containers
from kubernetes_double.nodes.kubelet.environment import (
    Lookup,
    command_of,
    environment_of,
)
from kubernetes_double.nodes.kubelet.hosts import write_hosts
from kubernetes_double.nodes.kubelet.machine import Machine
from kubernetes_double.nodes.kubelet.network import Network
from kubernetes_double.nodes.kubelet.status import Seen, status_of, waiting
from kubernetes_double.nodes.kubelet.supervisor import BackOff, Supervisor
from kubernetes_double.nodes.kubelet.tokens import Tokens
from kubernetes_double.nodes.kubelet.volumes import Volumes
from kubernetes_double.nodes.loop import changed
from kubernetes_double.nodes.times import now

log = Log("cluster.pod")

_RETRY_S = 0.2
_GONE = (404, 409)
_ETC = "/run/pod"
_HERE = {"/etc/hosts": f"{_ETC}/hosts", "/etc/resolv.conf": f"{_ETC}/resolv.conf"}
_MULTI = {"/etc/host.conf": f"{_ETC}/host.conf"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Dependencies shared by all pods. `logs(pod, container)` is a container's log file."""

    informer: Informer
    network: Network
    machine: Machine
    tokens: Tokens
    back_off: BackOff
    folder: Path
    claims: Path
    logs: Callable[[Object, str], Path]
    hosts: Callable[[str], str]
    lookup: Callable[[str], Lookup]


class PodWorker:
    """Runs one pod and reports on it."""

    def __init__(self, pod: Object, around: Surroundings) -> None:
        self.pod = pod
        self._around = around
        self._folder = around.folder / pod["metadata"]["uid"]
        self._address = ""
        self._started = now()
        self._init: dict[str, Supervisor] = {}
        self._supervisors: dict[str, Supervisor] = {}
        self._initialized = False
        self._why = ""
        self._dirty = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._volumes: Volumes | None = None
        self._joining = asyncio.create_task(around.network.join(pod["metadata"]["uid"]))
        self._tasks = [asyncio.create_task(self._live()), asyncio.create_task(self._report())]

    @property
    def name(self) -> str:
        """Name of its pod."""
        return self.pod["metadata"]["name"]

    def supervisor(self, container: str = "") -> Supervisor | None:
        """The supervisor of one container, the first one if not named."""
        known = self._supervisors or self._init
        return known.get(container or next(iter(known), ""))

    def supervisors(self) -> list[Supervisor]:
        """The supervisors of all containers started so far."""
        return [*self._init.values(), *self._supervisors.values()]

    def update(self, pod: Object) -> None:
        """Take over a changed object."""
        self.pod = pod
        if "deletionTimestamp" in pod["metadata"]:
            self.end(float(pod["metadata"].get("deletionGracePeriodSeconds", 30)))

    def end(self, grace_s: float) -> None:
        """Terminate the pod, then remove its object; another call can only shorten the grace."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(grace_s))
            return
        for supervisor in self.supervisors():
            asyncio.get_running_loop().call_later(grace_s, supervisor.kill)

    async def abandon(self) -> None:
        """Kill the pod but leave its object."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(s.stop(0) for s in self.supervisors()))

    def refresh(self) -> None:
        """Update names and volume contents."""
        if self._volumes is None or self._ending is not None:
            return
        self.rename()
        with contextlib.suppress(NotFoundError):
            self._volumes.provide(self.pod)

    def rename(self) -> None:
        """Update the names that the pod resolves."""
        if self._address:
            text = self._around.hosts(self.pod["metadata"]["namespace"])
            own = f"{self._address} {self._hostname()}"
            write_hosts(self._folder / "etc", text, own=own)

    async def _live(self) -> None:
        try:
            await self._run()
        except Exception as error:  # the boundary of this pod: the others go on
            log.exception("pod failed", pod=self.name)
            self._why = repr(error)
            self._dirty.set()

    async def _run(self) -> None:
        await self._set_up()
        policy = self.pod["spec"].get("restartPolicy", "Always")
        once = "Never" if policy == "Never" else "OnFailure"
        for spec in self.pod["spec"].get("initContainers", []):
            supervisor = self._init[spec["name"]] = self._supervise(spec, policy=once)
            if await supervisor.run() or self._ending is not None:
                return
        self._initialized = True
        for spec in self.pod["spec"]["containers"]:
            self._supervisors[spec["name"]] = self._supervise(spec, policy=policy)
        self._dirty.set()
        async with asyncio.TaskGroup() as group:
            for supervisor in self._supervisors.values():
                group.create_task(supervisor.run())

    async def _set_up(self) -> None:
        metadata = self.pod["metadata"]
        (self._folder / "etc").mkdir(parents=True)
        (self._folder / "etc" / "resolv.conf").touch()
        (self._folder / "etc" / "host.conf").write_text("multi on\n")
        self._address = await asyncio.shield(self._joining)
        self.pod["status"] = {**self.pod.get("status", {}), "podIP": self._address}
        self.rename()
        while True:
            try:
                tokens = await self._around.tokens.of(self.pod)
                self._volumes = Volumes(
                    folder=self._folder / "volumes",
                    claims=self._around.claims,
                    lookup=self._around.lookup(metadata["namespace"]),
                    tokens=tokens,
                )
                self._volumes.provide(self.pod)
                self._why = ""
                return
            except NotFoundError as error:
                self._why = str(error)
                self._dirty.set()
                await asyncio.sleep(_RETRY_S)

    def _supervise(self, spec: Object, *, policy: str) -> Supervisor:
        return Supervisor(
            spec,
            policy=policy,
            start=lambda: self._start(spec),
            changed=self._dirty.set,
            address=self._address,
            back_off=self._around.back_off,
            output=self._around.logs(self.pod, spec["name"]),
            grace_s=float(self.pod["spec"].get("terminationGracePeriodSeconds", 30)),
        )

    async def _start(self, spec: Object) -> containers.Container:
        folder = self._folder / "containers" / spec["name"]
        (folder / "scratch").mkdir(parents=True, exist_ok=True)
        output = self._around.logs(self.pod, spec["name"])
        if output.exists():
            output.replace(output.with_suffix(".previous"))
        return await containers.start(self._spec(spec, folder), folder=folder, log=output)

    def _spec(self, spec: Object, folder: Path) -> containers.Spec:
        assert self._volumes is not None
        machine, namespace = self._around.machine, self.pod["metadata"]["namespace"]
        pod = {**self.pod, "status": {**self.pod.get("status", {}), "podIP": self._address}}
        environment = environment_of(
            spec,
            pod=pod,
            base=machine.environment(spec.get("image", "")) | self._around.tokens.variables,
            lookup=self._around.lookup(namespace),
        )
        environment["HOSTNAME"] = self._hostname()
        security = spec.get("securityContext") or {}
        uid, gid, groups = machine.user(pod, spec)
        etc = containers.Bind(str(self._folder / "etc"), _ETC, read_only=True)
        return containers.Spec(
            network=self._around.network.path(self.pod["metadata"]["uid"]),
            hostname=self._hostname(),
            scratch=str(folder / "scratch"),
            # Last, so that a volume on /tmp does not cover a Python environment below it.
            binds=(etc, *self._volumes.binds(pod, spec), *machine.files),
            links=_HERE | _MULTI,
            read_only_root=bool(security.get("readOnlyRootFilesystem")),
            no_new_privileges=security.get("allowPrivilegeEscalation") is False,
            uid=uid,
            gid=gid,
            groups=groups,
            directory=spec.get("workingDir", "/"),
            command=command_of(spec, environment),
            environment=environment,
        )

    def _hostname(self) -> str:
        return self.pod["spec"].get("hostname") or self.name

    async def _end(self, grace_s: float) -> None:
        if not self.supervisors():
            self._tasks[0].cancel()
        await asyncio.gather(*(s.stop(grace_s) for s in self.supervisors()))
        # A container that is being started is killed as soon as it runs.
        await asyncio.wait(self._tasks[:1])
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(ApiException, aiohttp.ClientError, TimeoutError):
            await self._publish()
        self._address = ""
        with contextlib.suppress(UnavailableError):
            await self._around.network.leave(self.pod["metadata"]["uid"], await self._joining)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        await self._remove()

    async def _remove(self) -> None:
        """Delete the object, unless it is already gone or replaced by another one."""
        while True:
            try:
                await self._around.informer.delete(POD, self.pod, grace_s=0)
                return
            except (ApiException, aiohttp.ClientError, TimeoutError) as error:
                if getattr(error, "status", 0) in _GONE:
                    return
                log.warning("not removed", pod=self.name, error=repr(error))
                await asyncio.sleep(_RETRY_S)

    async def _report(self) -> None:
        """Write the status after changes, once per burst."""
        self._dirty.set()
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            try:
                await self._publish()
            except (ApiException, aiohttp.ClientError, TimeoutError) as error:
                if getattr(error, "status", 0) != 404:
                    log.warning("cannot write status", pod=self.name, error=repr(error))
                    self._dirty.set()
                await asyncio.sleep(_RETRY_S)

    async def _publish(self) -> None:
        held = self._around.informer.get(POD, (self.pod["metadata"]["namespace"], self.name))
        if held is None or held["metadata"]["uid"] != self.pod["metadata"]["uid"]:
            return
        status = status_of(held, self._seen())
        if changed(held.get("status", {}), status):
            await self._around.informer.patch(POD, held, {"status": status}, status=True)

    def _seen(self) -> Seen:
        reason = "ContainerCreating" if self._initialized or not self._init else "PodInitializing"
        return Seen(
            address=self._address,
            host=self._around.network.gateway,
            started=self._started,
            init=_statuses(self.pod["spec"].get("initContainers", []), self._init, reason),
            containers=_statuses(self.pod["spec"]["containers"], self._supervisors, reason),
            initialized=self._initialized,
            why_waiting=self._why,
        )


def _statuses(
    specs: list[Object], supervisors: Mapping[str, Supervisor], reason: str
) -> list[Object]:
    return [
        supervisors[spec["name"]].status() if spec["name"] in supervisors else waiting(spec, reason)
        for spec in specs
    ]
