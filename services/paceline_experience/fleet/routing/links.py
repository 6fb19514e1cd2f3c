"""Measured rates and latencies of links: moving averages by node, pair and pair of sites."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_RISE, _FALL = 0.5, 0.2  # weights; a flow that had to wait understates its link
_CLEAR = 1.2  # an end measured at this many times a flow did not limit it
_MIN_BUSY_S = 1e-3  # shorter transfers measure the clock and buffers
_MAX_SENDERS = 32  # latest senders remembered per receiver


@dataclass(frozen=True, slots=True)
class Node:
    """A worker, or a seed of the trainer: one end of a link."""

    worker_id: str  # seeds: empty
    endpoint: str  # http://host:port
    site: str = ""


@dataclass(frozen=True, slots=True)
class Priors:
    """Assumptions about links without measurements."""

    bytes_per_s: float = 125e6
    near_latency_s: float = 0.001
    far_latency_s: float = 0.02


def _mean(old: float | None, new: float) -> float:
    if old is None:
        return new
    return old + (_RISE if new > old else _FALL) * (new - old)


def _drift(old: float | None, new: float) -> float:
    return new if old is None else old + _FALL * (new - old)


def _is_informative(old: float | None, flow: float, *, other: float | None, alone: bool) -> bool:
    """Whether a flow's rate is evidence for the capacity of one of its ends.

    A higher rate always is; a lower one only if neither the other end nor the link between sites
    can have limited it.
    """
    if old is None or flow > old:
        return old is not None or alone
    return alone and (other is None or other > flow * _CLEAR)


class Pairs:
    """A number for a receiver and each of its last few senders."""

    def __init__(self) -> None:
        self._by_receiver: dict[str, dict[str, float]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_receiver.values()))

    def get(self, sender: str, receiver: str) -> float | None:
        """None: unknown or forgotten."""
        return self._by_receiver.get(receiver, {}).get(sender)

    def put(self, sender: str, receiver: str, value: float) -> None:
        """Set a value; beyond `_MAX_SENDERS` the oldest sender of the receiver is forgotten."""
        senders = self._by_receiver.setdefault(receiver, {})
        senders.pop(sender, None)
        senders[sender] = value
        if len(senders) > _MAX_SENDERS:
            del senders[next(iter(senders))]

    def forget(self, end: str) -> None:
        """Forget all pairs with this end."""
        self._by_receiver.pop(end, None)
        for senders in self._by_receiver.values():
            senders.pop(end, None)


@dataclass(slots=True)
class Links:
    """Bytes per second and seconds, keyed by endpoints and sites."""

    priors: Priors = Priors()
    _up: dict[str, float] = field(default_factory=dict[str, float])
    _down: dict[str, float] = field(default_factory=dict[str, float])
    _pair: Pairs = field(default_factory=Pairs)
    _site: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    _site_up: dict[str, float] = field(default_factory=dict[str, float])
    _site_down: dict[str, float] = field(default_factory=dict[str, float])
    _latency: Pairs = field(default_factory=Pairs)
    _site_latency: dict[tuple[str, str], float] = field(
        default_factory=dict[tuple[str, str], float]
    )
    _typical: dict[bool, float] = field(default_factory=dict[bool, float])  # by same site

    def observe(
        self, sender: Node, receiver: Node, *, wire_bytes: int, busy_s: float, sharers: int = 1
    ) -> None:
        """`wire_bytes` arrived in `busy_s` while `sharers` flows shared the sender's uplink.

        Between sites the uplink is not the bottleneck, so `sharers` is ignored there.
        """
        if wire_bytes <= 0 or busy_s < _MIN_BUSY_S:
            return
        flow = wire_bytes / busy_s
        pair, sites = (sender.endpoint, receiver.endpoint), (sender.site, receiver.site)
        near = sender.site == receiver.site
        up, down = self._up.get(pair[0]), self._down.get(pair[1])
        if _is_informative(up, flow * sharers, other=down, alone=near):
            self._up[pair[0]] = _mean(up, flow * sharers)
        if _is_informative(down, flow, other=up, alone=near):
            self._down[pair[1]] = _mean(down, flow)
        if not near:
            self._observe_sites(sites, flow)
        alone = min(flow * sharers, max(flow, self.up(sender))) if near else flow
        self._pair.put(*pair, _mean(self._pair.get(*pair), alone))
        self._typical[near] = _mean(self._typical.get(near), flow)

    def _observe_sites(self, sites: tuple[str, str], flow: float) -> None:
        up, down = self._site_up.get(sites[0]), self._site_down.get(sites[1])
        if _is_informative(up, flow, other=down, alone=True):
            self._site_up[sites[0]] = _mean(up, flow)
        if _is_informative(down, flow, other=up, alone=True):
            self._site_down[sites[1]] = _mean(down, flow)
        self._site[sites] = _mean(self._site.get(sites), flow)

    def observe_latency(self, sender: Node, receiver: Node, latency_s: float) -> None:
        """Record a latency: from the request to the first byte of the answer."""
        if latency_s <= 0:
            return
        ends, sites = (sender.endpoint, receiver.endpoint), (sender.site, receiver.site)
        self._latency.put(*ends, _drift(self._latency.get(*ends), latency_s))
        self._site_latency[sites] = _drift(self._site_latency.get(sites), latency_s)

    def up(self, node: Node) -> float:
        """Bytes per second that a node can send in total."""
        return self._up.get(node.endpoint) or self._usual()

    def down(self, node: Node) -> float:
        """Bytes per second that a node can receive."""
        return self._down.get(node.endpoint) or self._usual()

    def relay(self, node: Node) -> float:
        """Bytes per second that a node can relay."""
        return min(self.up(node), self.down(node))

    def rate(self, sender: Node, receiver: Node) -> float:
        """Bytes per second of one flow that has the sender's uplink to itself."""
        seen = self._pair.get(sender.endpoint, receiver.endpoint)
        if seen is not None:
            return seen
        ends = min(self.up(sender), self.down(receiver))
        if sender.site == receiver.site:
            return ends
        between = self._site.get((sender.site, receiver.site))
        return min(ends, between or self._between(sender.site, receiver.site) or ends)

    def wan(self, site: str) -> float:
        """Bytes per second that a site can relay to other sites; infinite if unknown."""
        up, down = self._site_up.get(site), self._site_down.get(site)
        return min(up or math.inf, down or math.inf)

    def _between(self, sender: str, receiver: str) -> float | None:
        up, down = self._site_up.get(sender), self._site_down.get(receiver)
        known = [rate for rate in (up, down) if rate is not None]
        return min(known) if known else self._typical.get(False)

    def measured(self, sender: Node, receiver: Node) -> float:
        """Measured bytes per second of a pair; 0: none yet."""
        return self._pair.get(sender.endpoint, receiver.endpoint) or 0.0

    def latency(self, sender: Node, receiver: Node) -> float:
        """Seconds from a request to the first byte."""
        seen = self._latency.get(sender.endpoint, receiver.endpoint)
        if seen is not None:
            return seen
        near = sender.site == receiver.site
        prior = self.priors.near_latency_s if near else self.priors.far_latency_s
        return self._site_latency.get((sender.site, receiver.site), prior)

    def forget(self, node: Node) -> None:
        """The node is gone; measurements of its site stay."""
        self._up.pop(node.endpoint, None)
        self._down.pop(node.endpoint, None)
        self._pair.forget(node.endpoint)
        self._latency.forget(node.endpoint)

    def _usual(self) -> float:
        return self._typical.get(True) or self._typical.get(False) or self.priors.bytes_per_s
