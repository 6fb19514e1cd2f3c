"""Supervises one container of a pod: probes, restarts with back-off, termination."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes_double.errors import NotFoundError, UnavailableError
from kubernetes_double.logs import Log, tail
from kubernetes_double.nodes.client import Object
from kubernetes_double.nodes.kubelet.container import KILLED, Container
from kubernetes_double.nodes.kubelet.probes import get, outcomes
from kubernetes_double.nodes.times import now

log = Log("cluster.supervisor")

_LEAST_GRACE_S = 2.0
_CONFIG_PAUSE_S = 0.5
_TAIL_BYTES = 2048


@dataclass(frozen=True, slots=True)
class BackOff:
    """Delays between restarts in seconds: none, then `base_s`, doubling up to `most_s`.

    A run of `stable_s` resets them.
    """

    base_s: float
    most_s: float
    stable_s: float

    def pause_s(self, failures: int) -> float:
        """The delay before the restart after this many failures."""
        return 0.0 if failures <= 1 else min(self.most_s, self.base_s * 2.0 ** (failures - 2))


class Supervisor:
    """Keeps one container in the state its pod asks for; `status()` is its container status."""

    def __init__(
        self,
        spec: Object,
        *,
        policy: str,
        start: Callable[[], Awaitable[Container]],
        changed: Callable[[], None],
        address: str,
        back_off: BackOff,
        output: Path,
        grace_s: float,
    ) -> None:
        self.spec = spec
        self.ended = False
        self.exit_code: int | None = None
        self.container: Container | None = None
        self._policy = policy
        self._start = start
        self._changed = changed
        self._address = address
        self._back_off = back_off
        self._output = output
        self._grace_s = grace_s
        self._ports = {port["name"]: port["containerPort"] for port in _named_ports(spec)}
        self._stopping = asyncio.Event()
        self._restarts = -1
        self._started = self._ready = False
        self._state: Object = {"waiting": {"reason": "ContainerCreating"}}
        self._last: Object = {}

    @property
    def ready(self) -> bool:
        """Whether the container is ready for requests."""
        return self._ready

    async def run(self) -> int:
        """Run the container until it ends for good; returns its last exit code."""
        failures = 0
        while True:
            born_s = time.monotonic()
            code = await self._live()
            if not self._wants_restart(code):
                self.ended, self.exit_code = True, code
                self._changed()
                return code
            failures = failures + 1 if time.monotonic() - born_s < self._back_off.stable_s else 1
            await self._pause(self._back_off.pause_s(failures))

    async def stop(self, grace_s: float) -> None:
        """Run preStop, send SIGTERM, and SIGKILL after the grace period, without a restart."""
        self._stopping.set()
        await self._terminate(grace_s)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to its main process, as if it had crashed."""
        if self.container is not None:
            self.container.signal(number)

    def status(self) -> Object:
        """The entry in `containerStatuses`."""
        running = "running" in self._state
        return {
            "name": self.spec["name"],
            "image": self.spec.get("image", ""),
            "imageID": "",
            "ready": self._ready or (self.ended and self.exit_code == 0),
            "started": running and self._started,
            "restartCount": max(self._restarts, 0),
            "state": self._state,
            "lastState": self._last,
            **({"containerID": f"process://{self.container.pid}"} if self.container else {}),
        }

    async def _live(self) -> int:
        container = await self._begin()
        if container is None:
            return KILLED
        self.container = container
        self._restarts += 1
        born = now()
        self._move({"running": {"startedAt": born}})
        if self._stopping.is_set():
            container.signal(signal.SIGKILL)
        async with asyncio.TaskGroup() as group:
            probing = group.create_task(self._probe(container))
            code = await container.wait()
            probing.cancel()
        self._started = self._ready = False
        ending: Object = {"exitCode": code, "startedAt": born, "finishedAt": now()}
        ending["reason"] = "Error" if code else "Completed"
        if code and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            ending["message"] = tail(self._output, num_bytes=_TAIL_BYTES)
        self._move({"terminated": ending})
        return code

    async def _begin(self) -> Container | None:
        """Start the container, retrying while sources are missing; None if the pod ends before."""
        while not self._stopping.is_set():
            try:
                return await self._start()
            except NotFoundError as error:
                self._move({"waiting": _reason("CreateContainerConfigError", str(error))})
                await self._pause(_CONFIG_PAUSE_S, show=False)
            except UnavailableError as error:
                self._move({"terminated": {"exitCode": 128, **_reason("StartError", str(error))}})
                self._restarts += 1
                if not self._wants_restart(128):
                    return None
                await self._pause(self._back_off.pause_s(self._restarts + 2))
        return None

    def _wants_restart(self, code: int) -> bool:
        if self._stopping.is_set() or self._policy == "Never":
            return False
        return self._policy == "Always" or code != 0

    async def _pause(self, pause_s: float, *, show: bool = True) -> None:
        if show and pause_s > 0:
            text = f"back-off {pause_s:g}s restarting container {self.spec['name']}"
            self._move({"waiting": _reason("CrashLoopBackOff", text)})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()

    async def _probe(self, container: Container) -> None:
        if (startup := self.spec.get("startupProbe")) is not None:
            async for passes, reason in self._outcomes(startup, container):
                if passes:
                    break
                await self._fail(container, "startup", reason)
                return
        self._started = True
        self._ready = "readinessProbe" not in self.spec
        self._changed()
        async with asyncio.TaskGroup() as group:
            if "livenessProbe" in self.spec:
                group.create_task(self._watch_life(container))
            if "readinessProbe" in self.spec:
                group.create_task(self._watch_readiness(container))

    async def _watch_life(self, container: Container) -> None:
        async for passes, reason in self._outcomes(self.spec["livenessProbe"], container):
            if not passes:
                await self._fail(container, "liveness", reason)
                return

    async def _watch_readiness(self, container: Container) -> None:
        async for passes, reason in self._outcomes(self.spec["readinessProbe"], container):
            if reason:
                log.info("not ready", container=self.spec["name"], reason=reason)
            self._ready = passes
            self._changed()

    def _outcomes(self, probe: Object, container: Container) -> Any:
        return outcomes(probe, container=container, address=self._address, ports=self._ports)

    async def _fail(self, container: Container, kind: str, reason: str) -> None:
        log.warning("probe failed", kind=kind, container=self.spec["name"], reason=reason)
        if container.alive:
            await self._terminate(self._grace_s)

    async def _terminate(self, grace_s: float) -> None:
        container = self.container
        if container is None or not container.alive:
            return
        end_s = time.monotonic() + grace_s
        if grace_s > 0:
            await self._before_stop(container, grace_s)
            container.signal(signal.SIGTERM)
            left_s = max(end_s - time.monotonic(), min(grace_s, _LEAST_GRACE_S))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await container.wait()
        container.signal(signal.SIGKILL)
        await container.wait()

    async def _before_stop(self, container: Container, grace_s: float) -> None:
        action = self.spec.get("lifecycle", {}).get("preStop", {})
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(grace_s):
                if "exec" in action:
                    command = action["exec"]["command"]
                    code, output = await container.execute(command, timeout_s=grace_s)
                    if code:
                        log.warning("preStop failed", code=code, output=output[-500:])
                elif "httpGet" in action:
                    await get(action["httpGet"], address=self._address, ports=self._ports)
                elif "sleep" in action:
                    await asyncio.sleep(action["sleep"]["seconds"])

    def _move(self, state: Object) -> None:
        if "terminated" in self._state and "terminated" not in state:
            self._last = self._state
        self._state = state
        self._changed()


def _named_ports(spec: Object) -> list[Object]:
    return [port for port in spec.get("ports", []) if "name" in port]


def _reason(reason: str, message: str) -> Object:
    return {"reason": reason, "message": message}
