"""Chunks in flight, as arrays of arrival times.

A flow receives chunks in order from one sender. With `s` seconds per chunk at the flow's share of
the links, and `a[j]` the time at which the sender has chunk `j`, it arrives at `t[j] = max(t[j-1],
a[j] + latency) + s`: a running maximum over `a[j] - j s`, so thousands of chunks are one vector
operation. An event changes the later times of its flow and of the flows downstream.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.weights.cost import shares
from paceline_harness.broadcast.fabric import Fabric

Key = tuple[str, int]  # host, version
Times = NDArray[np.float64]


@dataclass(slots=True)
class Flow:
    """A host's past and predicted chunks of a version: chunk j at `times[j]`, from `source`."""

    key: Key
    times: Times
    chunk_bytes: float
    source: str = ""  # host; empty: none
    rate: float = 0.0
    peak: float = 0.0  # best rate from this source
    since: float = 0.0  # time from which the source serves it
    spoiled_at: float = np.inf  # time at which a damaged chunk arrives

    def count(self, now: float) -> int:
        """Number of chunks that have arrived."""
        return int(np.searchsorted(self.times, now, side="right"))

    @property
    def end(self) -> float:
        """Time at which the last chunk arrives; infinite if never, as things stand."""
        return float(self.times[-1])

    def done(self, now: float) -> bool:
        """Whether all chunks have arrived."""
        return self.end <= now


class Flows:
    """All flows of a fabric. Change some, then `settle`."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.flows: dict[Key, Flow] = {}
        self.stopped: set[str] = set()  # hosts that send and receive nothing
        self.spoiled: set[str] = set()  # hosts that send damaged chunks
        self.sent: Counter[Key] = Counter()  # chunks by sender and version
        self.crossed: Counter[tuple[str, str, int]] = Counter()  # by sites and version
        self._out: dict[str, set[Key]] = {}
        self._wires: dict[tuple[str, str], set[Key]] = {}
        self._dirty: set[Key] = set()

    def seed(self, host: str, version: int, *, num_chunks: int, chunk_bytes: float) -> None:
        """Give a host the complete version."""
        times = np.full(num_chunks, -np.inf)
        self.flows[host, version] = Flow((host, version), times, chunk_bytes)

    def open(self, key: Key, *, num_chunks: int, chunk_bytes: float) -> Flow:
        """Start a flow without chunks or a source."""
        flow = Flow(key, np.full(num_chunks, np.inf), chunk_bytes)
        self.flows[key] = flow
        self._dirty.update(self.children(key))
        return flow

    def connect(self, key: Key, source: str, now: float) -> None:
        """Take missing chunks from `source`; empty: from nowhere."""
        flow = self.flows[key]
        self._account(flow, now)
        self._unlink(flow)
        flow.times[flow.count(now) :] = np.inf
        flow.source, flow.since, flow.rate = source, now, 0.0
        flow.spoiled_at, flow.peak = np.inf, 0.0
        if source:
            self._out.setdefault(source, set()).add(key)
            self._wires.setdefault(self._sites(flow), set()).add(key)
        self._dirty.add(key)

    def drop(self, key: Key, now: float) -> None:
        """Remove the version from a host."""
        self.connect(key, "", now)
        self._dirty.update(self.children(key))
        del self.flows[key]
        self._dirty.discard(key)

    def touch(self, host: str) -> None:
        """Note that a host's links have changed."""
        self._dirty |= self._out.get(host, set())
        self._dirty |= {key for key in self.flows if key[0] == host}

    def finished(self, key: Key) -> None:
        """Release a finished flow's share of the links."""
        self._dirty.add(key)

    def children(self, key: Key) -> list[Key]:
        """Flows that take this version from this host, sorted by name."""
        return sorted(k for k in self._out.get(key[0], ()) if k[1] == key[1])

    def takers(self, host: str) -> list[Key]:
        """Flows of any version that come, or will come, from this host."""
        return sorted(self._out.get(host, ()))

    def settle(self, now: float) -> set[Key]:
        """Recompute the affected predictions; returns the flows whose times changed."""
        changed: set[Key] = set()
        for key in self._shared(now):
            self._dirty.add(key)
        ordered = self._behind(self._dirty & self.flows.keys(), now)
        live = set(self._dirty)
        self._dirty = set()
        for key in ordered:
            if key in live and key in self.flows and self._predict(self.flows[key], now):
                changed.add(key)
                live.update(self.children(key))
        return changed

    def close(self, now: float) -> None:
        """Count the chunks that open flows have delivered."""
        for flow in self.flows.values():
            self._account(flow, now)
            flow.since = now

    def is_active(self, flow: Flow, now: float) -> bool:
        """Whether a flow currently uses links."""
        giver = self.flows.get((flow.source, flow.key[1]))
        silent = flow.source in self.stopped or flow.key[0] in self.stopped
        return bool(flow.source) and giver is not None and not silent and not flow.done(now)

    def _account(self, flow: Flow, now: float) -> None:
        if not flow.source:
            return
        came = flow.count(now) - int(np.searchsorted(flow.times, flow.since, side="right"))
        self.sent[flow.source, flow.key[1]] += came
        sender, receiver = self._sites(flow)
        self.crossed[sender, receiver, flow.key[1]] += came

    def _sites(self, flow: Flow) -> tuple[str, str]:
        hosts = self.fabric.hosts
        return hosts[flow.source].site, hosts[flow.key[0]].site

    def _unlink(self, flow: Flow) -> None:
        if not flow.source:
            return
        self._dirty |= self._out[flow.source]
        self._out[flow.source].discard(flow.key)
        wire = self._wires[self._sites(flow)]
        wire.discard(flow.key)
        if self._sites(flow)[0] != self._sites(flow)[1]:
            self._dirty |= wire
        self._dirty.discard(flow.key)

    def _shared(self, now: float) -> list[Key]:
        """Recompute the rates at the affected senders; returns the flows whose rate changed."""
        senders = {self.flows[k].source for k in self._dirty if k in self.flows}
        for key in [k for k in self._dirty if k in self.flows and self.flows[k].source]:
            ends = self._sites(self.flows[key])
            if ends[0] != ends[1]:
                senders |= {self.flows[k].source for k in self._wires[ends]}
        got: list[Key] = []
        for sender in sorted(senders - {""}):
            keys = sorted(k for k in self._out[sender] if self.is_active(self.flows[k], now))
            caps = [self._cap(self.flows[k], now) for k in keys]
            rates = shares(self.fabric.hosts[sender].up, caps)
            new = dict.fromkeys(self._out[sender], 0.0) | dict(zip(keys, rates, strict=True))
            for key in sorted(new):
                flow = self.flows[key]
                if abs(new[key] - flow.rate) > 1e-6 * flow.rate:
                    self._dirty.add(key)
                    self._rerate(flow, new[key], now)
                    got.append(key)
        return got

    def _cap(self, flow: Flow, now: float) -> float:
        sender, receiver = self.fabric.hosts[flow.source], self.fabric.hosts[flow.key[0]]
        wire = self.fabric.wire(sender, receiver)
        if wire is None:
            return receiver.down
        flows = self._wires[sender.site, receiver.site]
        num_active = sum(self.is_active(self.flows[k], now) for k in flows)
        return min(receiver.down, wire.bytes_per_s / max(1, num_active))

    def _rerate(self, flow: Flow, rate: float, now: float) -> None:
        """Continue the chunk in flight from its current progress at the new rate."""
        n = flow.count(now)
        old, flow.rate, flow.peak = flow.rate, rate, max(flow.peak, rate)
        if n < len(flow.times) and old > 0 and np.isfinite(flow.times[n]):
            left = (flow.times[n] - now) * old
            if left < flow.chunk_bytes:
                flow.times[n] = now + left / rate if rate > 0 else np.inf

    def _behind(self, keys: Iterable[Key], now: float) -> list[Key]:
        """These flows and all downstream, senders first; in a cycle, the most complete first."""
        reach, todo = set[Key](), deque(sorted(keys))
        while todo:
            key = todo.popleft()
            if key not in reach:
                reach.add(key)
                todo.extend(self.children(key))
        ready = deque(sorted(k for k in reach if self._giver(k) not in reach))
        ordered = self._down(ready, reach)
        ring = reach - set(ordered)
        for key in ring:  # a cycle never gains chunks that none of its members has
            flow = self.flows[key]
            flow.times[flow.count(now) :] = np.inf
        most = sorted(ring, key=lambda k: (-self.flows[k].count(now), k))
        return ordered + self._down(deque(most[:1]), ring)

    def _down(self, ready: deque[Key], within: set[Key]) -> list[Key]:
        ordered: dict[Key, None] = {}
        while ready:
            key = ready.popleft()
            if key not in ordered:
                ordered[key] = None
                ready.extend(k for k in self.children(key) if k in within)
        return list(ordered)

    def _giver(self, key: Key) -> Key | None:
        flow = self.flows.get(key)
        return None if flow is None or not flow.source else (flow.source, key[1])

    def _predict(self, flow: Flow, now: float) -> bool:
        n = flow.count(now)
        if n == len(flow.times):
            return False
        old = flow.times[n:].copy()
        giver = self.flows.get((flow.source, flow.key[1]))
        if giver is None or flow.rate <= 0:
            flow.times[n:] = np.inf
            return bool(np.any(old != np.inf))
        hosts = self.fabric.hosts
        latency = self.fabric.latency_s(hosts[flow.source], hosts[flow.key[0]])
        step, ready = flow.chunk_bytes / flow.rate, max(now, flow.since + latency)
        if flow.times[n] - step < now and np.isfinite(flow.times[n]):
            ready, n = float(flow.times[n]), n + 1  # it is under way
        steps = step * np.arange(len(flow.times) - n)
        begins = np.maximum(giver.times[n:] + latency, ready) - steps
        flow.times[n:] = np.maximum.accumulate(begins) + steps + step
        if flow.source in self.spoiled:
            flow.spoiled_at = float(flow.times[n]) if n < len(flow.times) else np.inf
            flow.times[n:] = np.inf
            return True
        return not np.array_equal(old, flow.times[len(flow.times) - len(old) :])
