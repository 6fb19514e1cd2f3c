"""The nodes of a broadcast, what each holds, and the complaints about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.weights.route import TransferProgress
from paceline_experience.fleet.routing.links import Node

Mark = Literal["damaged", "suspect", "slow", "late"]

MARKED_S: dict[Mark, float] = {"damaged": 300.0, "suspect": 30.0, "slow": 120.0, "late": 30.0}
_UNFIT: tuple[Mark, ...] = ("damaged", "suspect", "slow")  # `late` is one receiver's view only
_SILENT: tuple[Mark, ...] = ("damaged", "suspect")


@dataclass(frozen=True, slots=True)
class _Complaint:
    mark: Mark
    by: str
    until: float


class Members:
    """Nodes by id and site, their transfers, and marks that expire."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.nodes: dict[str, Node] = {}
        self._by_site: dict[str, dict[str, None]] = {}
        self._by_endpoint: dict[str, str] = {}
        self._held: dict[str, dict[int, TransferProgress]] = {}
        self._complaints: dict[str, list[_Complaint]] = {}
        self._sweep_at = 0.0

    def add(self, node: Node) -> None:
        """A worker has joined."""
        self.nodes[node.worker_id] = node
        self._by_site.setdefault(node.site, {})[node.worker_id] = None
        self._by_endpoint[node.endpoint] = node.worker_id
        self._held[node.worker_id] = {}

    def remove(self, worker_id: str) -> Node:
        """A worker is gone; complaints about its endpoint stay until they expire."""
        node = self.nodes.pop(worker_id)
        del self._by_site[node.site][worker_id]
        if not self._by_site[node.site]:
            del self._by_site[node.site]
        if self._by_endpoint.get(node.endpoint) == worker_id:
            del self._by_endpoint[node.endpoint]
        del self._held[worker_id]
        return node

    def at(self, endpoint: str) -> Node | None:
        """The worker that serves at `endpoint`."""
        name = self._by_endpoint.get(endpoint)
        return None if name is None else self.nodes[name]

    def at_site(self, site: str) -> Sequence[str]:
        """Workers of a site, in the order in which they joined."""
        return list(self._by_site.get(site, ()))

    def num_sites(self) -> int:
        """Number of sites with workers."""
        return len(self._by_site)

    def held(self, worker_id: str) -> dict[int, TransferProgress]:
        """A worker's transfers by version."""
        return self._held[worker_id]

    def set_held(self, worker_id: str, transfers: Sequence[TransferProgress]) -> bool:
        """Replace all transfers of a worker; returns whether it has made progress since."""
        old = self._held[worker_id]
        new = {t.version: t for t in transfers}
        self._held[worker_id] = new
        return any(t.num_ready > old[v].num_ready for v, t in new.items() if v in old)

    def advance(self, worker_id: str, progress: TransferProgress) -> None:
        """Update one transfer; its count never decreases."""
        held = self._held[worker_id]
        old = held.get(progress.version)
        if old is None or progress.num_ready >= old.num_ready:
            held[progress.version] = progress

    def share(self, worker_id: str, version: int) -> float:
        """Share of a version's chunks that a worker has, 0 to 1."""
        held = self._held[worker_id].get(version)
        if held is None or held.num_chunks <= 0:
            return 0.0
        return held.num_ready / held.num_chunks

    def whole(self, worker_id: str, version: int) -> bool:
        """Whether a worker has every chunk of a version."""
        return self.share(worker_id, version) >= 1.0

    def finishing(self, worker_id: str, version: int) -> bool:
        """Whether a worker will finish an older transfer before it starts `version`."""
        held = self._held[worker_id].values()
        return any(
            t.version < version and t.num_chunks / 2 <= t.num_ready < t.num_chunks for t in held
        )

    def complain(self, endpoint: str, mark: Mark, *, by: str) -> None:
        """`by` complains about the sender at `endpoint`."""
        now = self._clock()
        if now >= self._sweep_at:
            self._sweep(now)
        fresh = [s for s in self._complaints.get(endpoint, []) if s.until > now]
        others = [s for s in fresh if (s.mark, s.by) != (mark, by)]
        self._complaints[endpoint] = [*others, _Complaint(mark, by, now + MARKED_S[mark])]

    def _sweep(self, now: float) -> None:
        """Forget endpoints without unexpired complaints: they may be gone."""
        self._sweep_at = now + min(MARKED_S.values())
        live = {
            e: [s for s in complaints if s.until > now]
            for e, complaints in self._complaints.items()
        }
        self._complaints = {
            endpoint: complaints for endpoint, complaints in live.items() if complaints
        }

    def clear(self, endpoint: str, *marks: Mark) -> None:
        """Forget these marks of an endpoint."""
        kept = [s for s in self._complaints.get(endpoint, []) if s.mark not in marks]
        if kept:
            self._complaints[endpoint] = kept
        else:
            self._complaints.pop(endpoint, None)

    def accusers(self, endpoint: str, mark: Mark) -> set[str]:
        """Who has an unexpired complaint of this kind about an endpoint."""
        now = self._clock()
        complaints = self._complaints.get(endpoint, ())
        return {s.by for s in complaints if s.mark == mark and s.until > now}

    def accused(self, by: str, mark: Mark) -> set[str]:
        """Endpoints of workers that `by`, and nobody else, complains about."""
        named = [
            e for e, complaints in self._complaints.items() if any(s.by == by for s in complaints)
        ]
        return {e for e in named if e in self._by_endpoint and self.accusers(e, mark) == {by}}

    def marks(self, endpoint: str) -> list[Mark]:
        """Marks for which others avoid an endpoint, worst first."""
        now = self._clock()
        live = {s.mark for s in self._complaints.get(endpoint, ()) if s.until > now}
        return [mark for mark in _UNFIT if mark in live]

    def num_marked(self) -> int:
        """Number of endpoints with complaints."""
        return len(self._complaints)

    def fit(self, worker_id: str) -> bool:
        """Whether others may be routed to a worker."""
        endpoint = self.nodes[worker_id].endpoint
        return endpoint not in self._complaints or not self.marks(endpoint)

    def damaged(self, endpoint: str) -> bool:
        """Whether an endpoint has served bytes that do not match their digests."""
        return endpoint in self._complaints and "damaged" in self.marks(endpoint)

    def suspects(self) -> list[str]:
        """Workers that are believed to send nothing at present."""
        now = self._clock()
        live = [
            self.at(endpoint)
            for endpoint, complaints in self._complaints.items()
            if any(s.until > now and s.mark in _SILENT for s in complaints)
        ]
        return [node.worker_id for node in live if node is not None]
