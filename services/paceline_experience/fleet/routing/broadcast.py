"""The distribution of one job's weights: decides who pulls which version from whom."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import NotFoundError
from paceline.types import PolicyVersion
from paceline.weights import cost
from paceline.weights.route import (
    QUIET_EVENTS,
    ChunkSource,
    Route,
    TransferEvent,
    TransferProgress,
    TransferReport,
)
from paceline_experience.fleet.routing.links import Links, Node, Priors
from paceline_experience.fleet.routing.members import Members
from paceline_experience.fleet.routing.pace import Paces
from paceline_experience.fleet.routing.plan import BroadcastLoad, Root, root_rate
from paceline_experience.fleet.routing.routing import Routing
from paceline_experience.fleet.routing.spread import Spread
from paceline_experience.fleet.routing.tree import ROOT
from paceline_experience.fleet.routing.view import BroadcastView, RoutedHolder, RoutedVersion

__all__ = ["Broadcast", "Node"]

_CHUNK_START_S = 0.25e-3  # cost of a chunk at each hop besides its bytes
_RATIO_DECAY = 0.1  # share by which a measured ratio returns to its prior with each version


@dataclass(frozen=True, slots=True)
class _Edge:
    sender: Node
    sharers: int


class Broadcast:
    """One job. Not thread-safe; deterministic, with an injected clock.

    Every method may change routes: callers ask `route` again afterwards and get the identical
    object while nothing has changed for that worker.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        priors: Priors | None = None,
        codec: cost.Codec | None = None,
        seed_keeps: int = 2,
    ) -> None:
        """`seed_keeps`: versions that a seed serves; older ones cannot be a base of differences."""
        self._members = Members(clock=clock)
        self._links = Links(priors or Priors())
        self._codec = codec or cost.Codec()
        self._prior_ratio = self._codec.ratio
        self._seed_keeps = seed_keeps
        self._spreads: dict[int, Spread] = {}
        self._targets: dict[str, int] = {}
        self._clock = clock
        self._paces = Paces()
        self._routing = Routing(members=self._members, links=self._links)

    # --- versions

    @property
    def newest(self) -> int:
        """The newest version; -1: none yet."""
        return max(self._spreads, default=-1)

    @property
    def versions(self) -> tuple[int, ...]:
        """Known versions, ascending."""
        return tuple(sorted(self._spreads))

    def chunk_bytes(self, num_bytes: int) -> int:
        """The best chunk size of a new version for the present workers."""
        num_workers, num_sites = len(self._members.nodes), self._members.num_sites()
        hops = num_sites - 1 + math.ceil(num_workers / max(1, num_sites))
        newest = self._spreads.get(self.newest)
        up = newest.root().up_bytes_per_s if newest else self._links.priors.bytes_per_s
        return cost.chunk_bytes(num_bytes, hops, bytes_per_s=up, start_s=_CHUNK_START_S)

    def announce(
        self,
        version: PolicyVersion,
        *,
        seeds: Sequence[ChunkSource],
        site: str = "",
        chunk_bytes: int = 0,
    ) -> None:
        """`version` is served by `seeds` in `site`; `chunk_bytes` 0: see `chunk_bytes()`.

        A repeated announcement replaces the seeds. Forgets versions that no worker targets, except
        the previous one.
        """
        known = self._spreads.get(version.version)
        if known is not None:
            known.reseed(seeds, site=site)
            return
        spread = Spread(
            version,
            chunk_bytes=chunk_bytes or self.chunk_bytes(version.num_bytes),
            seeds=seeds,
            site=site,
            members=self._members,
            links=self._links,
        )
        self._spreads[version.version] = spread
        for number, other in self._spreads.items():
            other.current = number == self.newest
        ratio = self._codec.ratio + _RATIO_DECAY * (self._prior_ratio - self._codec.ratio)
        self._codec = self._codec._replace(ratio=ratio)
        self._lay(spread)
        self._prune()

    def seed(self, version: int, source: ChunkSource) -> None:
        """Add a seed to an announced version; the first workers pull from it too.

        Raises:
            NotFoundError: the version is not known.
        """
        self._spread(version).seed(source)

    def forget(self, version: int) -> None:
        """Route nobody to this version any more."""
        self._spreads.pop(version, None)
        self._routing.forget(version)

    def withdraw(self, version: int) -> bool:
        """Route nobody to this version, but to the one before it; returns whether it was known."""
        if version not in self._spreads:
            return False
        self.forget(version)
        spread = self._spreads.get(self.newest)
        if spread is not None:
            spread.current = True
            for name in self._members.nodes:
                if self._target(name) == self.newest and name not in spread.tree:
                    spread.join(name)
        return True

    # --- workers

    def join(self, node: Node, transfers: Sequence[TransferProgress] = ()) -> None:
        """A worker joins, holding `transfers`; with another endpoint it counts as a new one."""
        known = self._members.nodes.get(node.worker_id)
        if known == node:
            return
        if known is not None:
            self.leave(node.worker_id)
        self._members.add(node)
        self._members.set_held(node.worker_id, transfers)
        spread = self._spreads.get(self._target(node.worker_id))
        if spread is not None:
            spread.join(node.worker_id)

    def leave(self, worker_id: str) -> None:
        """A worker is gone; its children get other parents."""
        if worker_id not in self._members.nodes:
            return
        for spread in self._spreads.values():
            spread.leave(worker_id)
        self._links.forget(self._members.remove(worker_id))
        self._routing.drop(worker_id)
        self._paces.drop(worker_id)

    def target(self, worker_id: str, version: int | None) -> None:
        """Set the target version of a worker, joined or not; None: the newest."""
        before = self._target(worker_id)
        if version is None:
            self._targets.pop(worker_id, None)
        else:
            self._targets[worker_id] = version
        after = self._target(worker_id)
        if before == after or worker_id not in self._members.nodes:
            return
        if before in self._spreads and not self._members.whole(worker_id, before):
            self._spreads[before].leave(worker_id)
        if after in self._spreads:
            self._spreads[after].join(worker_id)

    # --- progress and reports

    def progress(self, worker_id: str, transfers: Sequence[TransferProgress]) -> bool:
        """All versions that a worker holds, whole or in part; returns whether the tree changed.

        A worker that lags far behind its sender becomes a leaf, as if it had complained: receivers
        cannot detect a link that was slow from the start.
        """
        node = self._members.nodes.get(worker_id)
        if node is None:
            return False
        if self._members.set_held(worker_id, transfers):
            self._members.clear(node.endpoint, "suspect")
        number = self._target(worker_id)
        held = self._members.held(worker_id).get(number)
        spread = self._spreads.get(number)
        if held is None or spread is None or worker_id not in spread.tree:
            return False
        parent = spread.tree.parent(worker_id)
        self._paces.observe(
            worker_id, number, held.num_ready, senders=held.sources, now=self._clock()
        )
        sender = self._members.nodes.get(parent)
        if sender is None or sender.site != node.site or not spread.tree.children(worker_id):
            return False
        if sender.endpoint not in held.sources or not self._paces.lags(worker_id, parent):
            return False
        self._slow(node, parent, sender.endpoint, spread)
        return True

    def report(self, report: TransferReport) -> bool:
        """A receiver's report on a sender; a complaint changes its route.

        Returns whether routes may have changed: it complains about its target version, or about
        damaged bytes.
        """
        receiver = self._members.nodes.get(report.worker_id)
        spread = self._spreads.get(report.version)
        if receiver is None:
            return False
        if report.num_chunks > 0:
            progress = TransferProgress(report.version, report.num_ready, report.num_chunks)
            self._members.advance(report.worker_id, progress)
        self._measure(report, receiver, spread)
        if spread is None or not self._is_complaint(report):
            return False
        self._complain(report, receiver, spread)
        return True

    # --- routes

    def route(self, worker_id: str) -> Route | None:
        """A worker's route, without the key; None: unknown worker, or nothing to pull."""
        spread = self._spreads.get(self._target(worker_id))
        if spread is None or worker_id not in spread.tree:
            return None
        return self._routing.route(worker_id, spread, base=lambda: self._base(worker_id, spread))

    def view(self) -> BroadcastView:
        """Versions, newest first, and holders: seeds first, then workers by id."""
        versions = [
            RoutedVersion(
                s.version, s.chunk_bytes, s.plan.shape, s.plan.predicted_s, self._codec.ratio
            )
            for _, s in sorted(self._spreads.items(), reverse=True)
        ]
        newest = self._spreads.get(self.newest)
        seeds = [RoutedHolder("", newest.site, s.endpoint) for s in newest.seeds] if newest else []
        workers = [self._holder(name) for name in sorted(self._members.nodes)]
        return BroadcastView(tuple(versions), (*seeds, *workers))

    # --- internal

    def _spread(self, version: int) -> Spread:
        if version not in self._spreads:
            raise NotFoundError(f"version {version} is not known: have {self.versions}")
        return self._spreads[version]

    def _target(self, worker_id: str) -> int:
        return self._targets.get(worker_id, self.newest)

    def _lay(self, spread: Spread) -> None:
        number, num_bytes = spread.version.version, max(1, spread.version.num_bytes)
        names = [n for n in self._members.nodes if self._target(n) == number]
        spread.delta = cost.delta_pays(self._bottleneck(names, spread.root()), self._codec)
        order = sorted(names, key=lambda n: self._rank(n, spread))
        wire = num_bytes * (self._codec.ratio if spread.delta else 1.0)
        load = BroadcastLoad(wire, math.ceil(num_bytes / spread.chunk_bytes))
        spread.lay([self._members.nodes[n] for n in order], load=load)

    def _bottleneck(self, names: Sequence[str], root: Root) -> float:
        """The lowest rate of any of these workers, as relay or straight from the seeds."""
        nodes = [self._members.nodes[n] for n in names]
        rates = [min(self._links.relay(n), self._links.rate(root.node, n)) for n in nodes]
        return min(rates, default=root.up_bytes_per_s)

    def _rank(self, name: str, spread: Spread) -> tuple[bool, bool, bool, float, str]:
        """Sort key: holders first, then who can start at once, has the base, has good links."""
        number = spread.version.version
        return (
            not self._members.whole(name, number),
            self._members.finishing(name, number),
            spread.delta and self._base(name, spread, sender=ROOT) < 0,
            -self._links.relay(self._members.nodes[name]),
            name,
        )

    def _base(self, worker_id: str, spread: Spread, *, sender: str | None = None) -> int:
        """The newest version of the same layout that both ends hold whole; -1: none.

        Also -1 if sending the full bytes is faster over the link between them.
        """
        parent = spread.tree.parent(worker_id) if sender is None else sender
        if not spread.delta or not self._delta_pays(worker_id, parent, spread):
            return -1
        common = [v for v in self._members.held(worker_id) if self._is_base(v, worker_id, spread)]
        served = sorted(self._spreads)[-self._seed_keeps :]
        if parent == ROOT:
            return max((v for v in common if v in served), default=-1)
        return max((v for v in common if self._members.whole(parent, v)), default=-1)

    def _delta_pays(self, worker_id: str, parent: str, spread: Spread) -> bool:
        """Whether differences are faster for one worker: over fast links they are not."""
        node = self._members.nodes[worker_id]
        if parent == ROOT:
            root = spread.root()
            uplink, rate = root.up_bytes_per_s, root_rate(root, node, self._links)
        else:
            sender = self._members.nodes[parent]
            uplink, rate = self._links.up(sender), self._links.rate(sender, node)
        share = uplink / max(1, spread.num_waiting(parent))
        return cost.delta_pays(min(rate, share), self._codec)

    def _is_base(self, version: int, worker_id: str, spread: Spread) -> bool:
        base = self._spreads.get(version)
        return (
            base is not None
            and version < spread.version.version
            and base.version.num_bytes == spread.version.num_bytes
            and self._members.whole(worker_id, version)
        )

    def _prune(self) -> None:
        wanted = {self._target(n) for n in self._members.nodes} | set(self._targets.values())
        kept = wanted | set(sorted(self._spreads)[-max(2, self._seed_keeps) :])
        for version in [v for v in self._spreads if v not in kept]:
            self.forget(version)

    def _edge(self, report: TransferReport, spread: Spread | None) -> _Edge | None:
        """The sender and how many flows share its uplink; None: no present worker or seed."""
        sender = self._members.at(report.endpoint)
        if sender is not None:
            inside = spread is not None and sender.worker_id in spread.tree
            waiting = spread.num_waiting(sender.worker_id) if spread and inside else 1
            return _Edge(sender, max(1, waiting))
        for known in self._spreads.values():
            if report.endpoint in {s.endpoint for s in known.seeds}:
                return _Edge(Node("", report.endpoint, known.site), 1)
        return None

    def _measure(self, report: TransferReport, receiver: Node, spread: Spread | None) -> None:
        edge = self._edge(report, spread)
        if edge is None:
            return
        self._links.observe(
            edge.sender,
            receiver,
            wire_bytes=report.wire_bytes,
            busy_s=report.busy_s,
            sharers=edge.sharers,
        )
        self._links.observe_latency(edge.sender, receiver, report.latency_s)
        if report.base_version >= 0 and report.num_bytes > 0:
            ratio = self._codec.ratio
            ratio += 0.3 * (report.wire_bytes / report.num_bytes - ratio)
            self._codec = self._codec._replace(ratio=ratio)

    def _is_complaint(self, report: TransferReport) -> bool:
        """Whether a report counts against the sender, which may drop versions without target."""
        if report.event in QUIET_EVENTS:
            return False
        return report.event is TransferEvent.DAMAGED or report.version == self._target(
            report.worker_id
        )

    def _complain(self, report: TransferReport, receiver: Node, spread: Spread) -> None:
        name, endpoint, members = report.worker_id, report.endpoint, self._members
        sender = members.at(endpoint)
        parent = ROOT if sender is None else sender.worker_id
        if sender is None and endpoint not in {s.endpoint for s in spread.seeds}:
            return
        if report.event is TransferEvent.SLOW:
            self._slow(receiver, parent, endpoint, spread)
            return
        members.complain(
            endpoint, "damaged" if report.event is TransferEvent.DAMAGED else "suspect", by=name
        )
        if parent == ROOT:
            spread.check_seed(endpoint)
        if report.event is TransferEvent.DAMAGED:
            self._quarantine(name, parent, spread)
        else:
            spread.lost(name, parent)

    def _slow(self, receiver: Node, parent: str, endpoint: str, spread: Spread) -> None:
        """One complaint demotes the receiver; with a second one it is the sender."""
        self._members.complain(endpoint, "late", by=receiver.worker_id)
        if not spread.is_late(parent):
            self._members.complain(receiver.endpoint, "slow", by=ROOT)
        elif parent != ROOT:
            self._members.complain(endpoint, "slow", by=ROOT)
            self._clear_slow(self._members.accusers(endpoint, "late"))
        spread.slow(receiver.worker_id, parent)

    def _quarantine(self, name: str, parent: str, spread: Spread) -> None:
        """Route nobody to a peer that has sent damaged bytes, for any version."""
        if parent == ROOT or spread.is_false_accuser(name):
            for endpoint in self._members.accused(name, "damaged"):
                self._members.clear(endpoint, "damaged")
            if spread.feeds(parent, name):
                spread.demote(name)
            return
        for other in self._spreads.values():
            if parent in other.tree and other.tree.children(parent):
                other.demote(parent)

    def _clear_slow(self, accusers: set[str]) -> None:
        """Clear the marks of receivers whose sender was the slow one."""
        for name in accusers & self._members.nodes.keys():
            self._members.clear(self._members.nodes[name].endpoint, "slow")

    def _holder(self, name: str) -> RoutedHolder:
        node, route = self._members.nodes[name], self.route(name)
        sources = () if route is None else route.sources
        sender = self._members.at(sources[0].endpoint) if sources else None
        newest = self._spreads.get(self.newest)
        if sender is None and sources and newest:
            sender = Node("", sources[0].endpoint, newest.site)
        return RoutedHolder(
            name,
            node.site,
            node.endpoint,
            tuple(t for _, t in sorted(self._members.held(name).items(), reverse=True)),
            sources,
            self._links.measured(sender, node) if sender else 0.0,
            ", ".join(self._members.marks(node.endpoint)),
        )
