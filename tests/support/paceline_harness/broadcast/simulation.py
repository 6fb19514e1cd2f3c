"""The real tracker and simulated receivers, trainer and network, on one simulated clock.

Receivers do what those of `paceline.weights` do: take a version through the sources of their
route, go on elsewhere by what is missing when a sender is silent, refuses or sends damaged chunks,
tell the tracker, finish a version of which they have half before they begin a newer one.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paceline.types import PolicyVersion
from paceline.weights.cost import Codec
from paceline.weights.route import (
    QUIET_EVENTS,
    ChunkSource,
    Route,
    TransferEvent,
    TransferProgress,
    TransferReport,
)
from paceline_experience.fleet.routing.broadcast import Broadcast, Node
from paceline_harness.broadcast.fabric import TRAINER, Fabric, Host
from paceline_harness.broadcast.flows import Flow, Flows, Key

_SILENCE_S = 0.5
_PATIENCE = 3.0  # times the expected seconds of a chunk
_SLOW_CHUNKS = 4
_RETRY_S = 0.5


@dataclass(slots=True)
class Receiver:
    """One worker."""

    host: str
    route: Route | None = None  # of the version under way, or the one before
    newer: Route | None = None  # to a version that has to wait
    underway: int = -1  # version
    whole: int = -1  # newest one
    refused: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])  # damaged
    failures: Counter[str] = field(default_factory=Counter[str])  # by sender, of this route
    counted: int = 0  # chunks already reported
    check_at: float = float("inf")
    done_at: dict[int, float] = field(default_factory=dict[int, float])


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of what is not bytes."""

    control_s: float = 0.02  # worker to tracker, or back
    beat_s: float = 2.0
    lease_s: float = 10.0  # after which a dead worker has left


class Simulation:
    """Say what is to happen `at` which second, then `run`."""

    def __init__(self, fabric: Fabric, *, timing: Timing | None = None, ratio: float = 1.0) -> None:
        """`ratio`: size of deltas relative to full chunks; from 1 on nobody requests them."""
        self.now = 0.0
        self.ratio = ratio
        self.fabric = fabric
        self.flows = Flows(fabric)
        self.broadcast = Broadcast(clock=lambda: self.now, codec=Codec(ratio=ratio))
        self.receivers: dict[str, Receiver] = {}
        self.dead: set[str] = set()
        self.newest = -1
        self.num_routes = 0  # sent to workers
        self.reports: list[TransferReport] = []
        self._timing = timing or Timing()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._told: dict[str, Route] = {}
        self._polling = False
        for host in fabric.hosts.values():
            if host.name != TRAINER:
                self._join(host)
        self.at(self._timing.beat_s, self._beat)

    # --- what is to happen

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Schedule an action."""
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, action))

    def publish(self, version: int, num_bytes: int, *, chunk_bytes: int = 0) -> None:
        """Let the trainer announce a version that it holds."""
        cut = chunk_bytes or self.broadcast.chunk_bytes(num_bytes)
        num_chunks = -(-num_bytes // cut)
        self.newest = version
        self.flows.seed(TRAINER, version, num_chunks=num_chunks, chunk_bytes=cut)
        noun = PolicyVersion(version, step=version, num_bytes=num_bytes)
        site = self.fabric.hosts[TRAINER].site
        source = ChunkSource(endpoint(TRAINER))
        self.broadcast.announce(noun, seeds=[source], site=site, chunk_bytes=cut)
        self._poll_soon()

    def join(self, host: Host) -> None:
        """Add a worker."""
        self.fabric.hosts[host.name] = host
        self._join(host)
        self._poll_soon()

    def kill(self, name: str, *, notice: bool = False) -> None:
        """Break a worker's connections; the tracker learns by `notice` or by its expired lease."""
        self.dead.add(name)
        self.flows.stopped.add(name)
        for taker in self.flows.takers(name):
            self._later(0.001, taker, TransferEvent.FAILED)
        for key in [key for key in self.flows.flows if key[0] == name]:
            self.flows.drop(key, self.now)
        self._settle()
        self.at(self.now + (0 if notice else self._timing.lease_s), lambda: self._gone(name))

    def freeze(self, name: str) -> None:
        """Suspend a worker; its connections stay open."""
        self.flows.stopped.add(name)
        self.flows.touch(name)
        self._settle()
        for taker in self.flows.takers(name):
            self._watch(taker)

    def thaw(self, name: str) -> None:
        """Resume a worker where it stopped."""
        self.flows.stopped.discard(name)
        self.flows.touch(name)
        self._told.pop(name, None)
        self._poll_soon()
        self._settle()

    def limit(self, name: str, bytes_per_s: float) -> None:
        """Limit the rate of a worker's links."""
        host = self.fabric.hosts[name]
        self.fabric.hosts[name] = replace(host, up=bytes_per_s, down=bytes_per_s)
        self.flows.touch(name)
        self._settle()

    def spoil(self, name: str) -> None:
        """Damage the chunks that a worker relays."""
        self.flows.spoiled.add(name)
        self.flows.touch(name)
        self._settle()

    def run(self, *, until: float = float("inf"), past: float = 0.0) -> float:
        """Run until all have the newest version after `past`, or `until`; returns the time."""
        while self._events and self._events[0][0] <= until:
            when, _, action = heapq.heappop(self._events)
            self.now = max(self.now, when)
            action()
            if self.now >= past and self.complete():
                break
        self.flows.close(self.now)
        return self.now

    def complete(self) -> bool:
        """Whether all live workers that are not frozen hold the newest version."""
        return all(
            r.whole >= self.newest
            for name, r in self.receivers.items()
            if name not in self.dead and name not in self.flows.stopped
        )

    def copies(self, version: int) -> float:
        """Copies of the snapshot that the trainer has sent."""
        num_chunks = len(self.flows.flows[TRAINER, version].times)
        return self.flows.sent[TRAINER, version] / num_chunks

    # --- receivers

    def _join(self, host: Host) -> None:
        self.receivers[host.name] = Receiver(host.name)
        self.broadcast.join(Node(host.name, endpoint(host.name), host.site))

    def _gone(self, name: str) -> None:
        self.broadcast.leave(name)
        self.receivers.pop(name, None)
        self._told.pop(name, None)
        self._poll_soon()

    def _receive(self, name: str, route: Route) -> None:
        if name in self.dead or name in self.flows.stopped:
            return
        receiver, version = self.receivers[name], route.version.version
        if version <= receiver.whole or version < receiver.underway:
            return
        if receiver.underway == version:
            receiver.route = route
            receiver.failures.clear()
            self._take(receiver, self._choice(receiver, skip=""))
        else:
            receiver.newer = route
            if receiver.underway < 0 or not self._half(name, receiver.underway):
                self._begin(receiver)
        self._settle()

    def _half(self, name: str, version: int) -> bool:
        flow = self.flows.flows[name, version]
        return flow.count(self.now) * 2 >= len(flow.times)

    def _begin(self, receiver: Receiver) -> None:
        """Start the newer version; drop the one in progress."""
        assert receiver.newer is not None
        receiver.route, receiver.newer = receiver.newer, None
        receiver.failures.clear()
        if receiver.underway >= 0:
            self._drop((receiver.host, receiver.underway))
        version = receiver.route.version.version
        seed = self.flows.flows[TRAINER, version]
        wire = self.ratio if receiver.route.base_version >= 0 else 1.0
        size = seed.chunk_bytes * wire
        self.flows.open((receiver.host, version), num_chunks=len(seed.times), chunk_bytes=size)
        receiver.underway, receiver.counted, receiver.check_at = version, 0, float("inf")
        self._take(receiver, self._choice(receiver, skip=""))

    def _drop(self, key: Key) -> None:
        for child in self.flows.children(key):
            self._later(0.001, child, TransferEvent.FAILED)
        self.flows.drop(key, self.now)

    def _choice(self, receiver: Receiver, *, skip: str) -> str:
        """The source with the fewest failures, in the order of the route; empty: none."""
        route, version = receiver.route, receiver.underway
        assert route is not None
        ends = [*(s.endpoint for s in route.sources), *route.fallbacks]
        able: list[tuple[int, int, str]] = []
        for place, end in enumerate(ends):
            host = end.removeprefix("http://")
            bad = host in self.dead or (host, version) in receiver.refused
            serves = (host, version) in self.flows.flows or (place == 0 and version == self.newest)
            if host != skip and not bad and serves:
                able.append((receiver.failures[host], place, host))
        return min(able)[2] if able else ""

    def _take(self, receiver: Receiver, source: str) -> None:
        key = (receiver.host, receiver.underway)
        flow = self.flows.flows[key]
        if flow.source == source and source:
            return
        if flow.source:
            self._report(flow, TransferEvent.MOVED)
        self.flows.connect(key, source, self.now)
        if not source:
            self.at(self.now + _RETRY_S, lambda: self._retry(receiver, key))
        elif source in self.flows.stopped:
            self._watch(key)

    def _retry(self, receiver: Receiver, key: Key) -> None:
        flow = self.flows.flows.get(key)
        if flow is not None and not flow.source and receiver.underway == key[1]:
            if receiver.newer is not None:
                self._begin(receiver)  # nobody holds the older version
            else:
                self._take(receiver, self._choice(receiver, skip=""))
            self._settle()

    def _watch(self, key: Key) -> None:
        """Start the receiver's timeout for a silent sender."""
        flow, route = self.flows.flows[key], self.receivers[key[0]].route
        rate = (route.bytes_per_s if route else 0.0) or flow.peak
        expected = flow.chunk_bytes / rate if rate else 0.0
        self._later(max(_PATIENCE * expected, _SILENCE_S), key, TransferEvent.STALLED)

    def _later(self, delay: float, key: Key, event: TransferEvent) -> None:
        source = self.flows.flows[key].source
        self.at(self.now + delay, lambda: self._fail(key, source, event))

    def _fail(self, key: Key, source: str, event: TransferEvent) -> None:
        """Report a sender that does not serve, and continue with the next one."""
        receiver, flow = self.receivers.get(key[0]), self.flows.flows.get(key)
        if receiver is None or flow is None or flow.source != source or flow.done(self.now):
            return
        if key[0] in self.flows.stopped or (
            event == TransferEvent.STALLED and source not in self.flows.stopped
        ):
            return
        self._report(flow, event)
        receiver.failures[source] += 1
        if event == TransferEvent.DAMAGED:
            receiver.refused.add((source, key[1]))
        self.flows.connect(key, "", self.now)
        self._take(receiver, self._choice(receiver, skip=source))
        self._settle()

    def _slow(self, key: Key, source: str) -> None:
        flow = self.flows.flows.get(key)
        if flow is not None and flow.source == source and self._is_slow(flow):
            self._report(flow, TransferEvent.SLOW)

    def _is_slow(self, flow: Flow) -> bool:
        receiver = self.receivers.get(flow.key[0])
        route = receiver.route if receiver else None
        if route is None or not flow.source or flow.done(self.now):
            return False
        return 0 < flow.rate * _PATIENCE < (route.bytes_per_s or flow.peak)

    def _check(self, key: Key) -> None:
        """Check whether the flow has ended; if not, check again when it should."""
        receiver, flow = self.receivers.get(key[0]), self.flows.flows.get(key)
        if receiver is None or flow is None or receiver.underway != key[1]:
            return
        receiver.check_at = float("inf")
        if not flow.done(self.now):
            self._expect(flow)
            return
        self._report(flow, TransferEvent.DONE)
        receiver.underway, receiver.whole = -1, key[1]
        receiver.done_at[key[1]] = self.now
        self.flows.finished(key)
        for old in [k for k in self._kept(key[0]) if k[1] < key[1]]:
            self._drop(old)
        if receiver.newer is not None:
            self._begin(receiver)
        self._settle()

    def _kept(self, name: str) -> list[Key]:
        versions = range(max(0, self.newest - 3), self.newest + 1)
        return [(name, v) for v in versions if (name, v) in self.flows.flows]

    # --- the clock and the tracker

    def _settle(self) -> None:
        for key in sorted(self.flows.settle(self.now)):
            flow = self.flows.flows[key]
            self._expect(flow)
            if flow.spoiled_at < float("inf"):
                self._later(flow.spoiled_at - self.now, key, TransferEvent.DAMAGED)
            if self._is_slow(flow):
                wait = max(_SILENCE_S, _SLOW_CHUNKS * flow.chunk_bytes / flow.rate)
                source = flow.source
                self.at(self.now + wait, lambda k=key, s=source: self._slow(k, s))

    def _expect(self, flow: Flow) -> None:
        receiver = self.receivers.get(flow.key[0])
        if receiver is None or receiver.underway != flow.key[1]:
            return
        end = max(flow.end, self.now)
        if end < receiver.check_at:
            receiver.check_at = end
            self.at(end, lambda: self._check(flow.key))

    def _report(self, flow: Flow, event: TransferEvent) -> None:
        name, version = flow.key
        receiver, ready = self.receivers[name], flow.count(self.now)
        came, receiver.counted = ready - receiver.counted, ready
        wire_bytes = int(came * flow.chunk_bytes)
        whole_bytes = came * self.flows.flows[TRAINER, version].chunk_bytes
        hosts = self.fabric.hosts
        sender = hosts.get(flow.source)
        report = TransferReport(
            worker_id=name,
            version=version,
            endpoint=endpoint(flow.source),
            event=event,
            num_bytes=int(whole_bytes),
            wire_bytes=wire_bytes,
            busy_s=wire_bytes / flow.rate if flow.rate > 0 else 0.0,
            latency_s=self.fabric.latency_s(sender, hosts[name]) if sender and came else 0.0,
            num_ready=ready,
            num_chunks=len(flow.times),
            base_version=version - 1 if wire_bytes < int(whole_bytes) else -1,
        )
        self.reports.append(report)
        self.at(self.now + self._timing.control_s, lambda: self._heard(report))

    def _heard(self, report: TransferReport) -> None:
        self.broadcast.report(report)
        if report.event not in QUIET_EVENTS:
            self._poll_soon()

    def _beat(self) -> None:
        for name in self.receivers:
            if name in self.dead or name in self.flows.stopped:
                continue
            held = [
                TransferProgress(v, flow.count(self.now), len(flow.times), (endpoint(flow.source),))
                for _, v in self._kept(name)
                if (flow := self.flows.flows[name, v])
            ]
            self.broadcast.progress(name, held)
        self._poll_soon()
        self.at(self.now + self._timing.beat_s, self._beat)

    def _poll_soon(self) -> None:
        if not self._polling:
            self._polling = True
            self.at(self.now + 0.001, self._poll)

    def _poll(self) -> None:
        """Send new routes to the workers whose route has changed."""
        self._polling = False
        for name in list(self.receivers):
            route = self.broadcast.route(name)
            if route is not None and route is not self._told.get(name):
                self._told[name] = route
                self.num_routes += 1
                self.at(
                    self.now + self._timing.control_s,
                    lambda n=name, r=route: self._receive(n, r) if n in self.receivers else None,
                )


def endpoint(host: str) -> str:
    """The endpoint of a host."""
    return f"http://{host}"
