"""Who takes part, what each holds and what was said against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.weights.route import TransferProgress
from paceline.weights.routes.links import Node

Mark = Literal["damaged", "suspect", "slow", "late"]

MARKED_S: dict[Mark, float] = {"damaged": 300.0, "suspect": 30.0, "slow": 120.0, "late": 30.0}
_UNFIT: tuple[Mark, ...] = ("damaged", "suspect", "slow")  # `late` is one receiver's view only
_SILENT: tuple[Mark, ...] = ("damaged", "suspect")


@dataclass(frozen=True, slots=True)
class _Said:
    mark: Mark
    by: str
    until: float


class Members:
    """Nodes by id and site, their holdings, and marks that fade."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.nodes: dict[str, Node] = {}
        self._by_site: dict[str, dict[str, None]] = {}
        self._by_endpoint: dict[str, str] = {}
        self._held: dict[str, dict[int, TransferProgress]] = {}
        self._said: dict[str, list[_Said]] = {}
        self._sweep_at = 0.0

    def add(self, node: Node) -> None:
        """A worker is there."""
        self.nodes[node.worker_id] = node
        self._by_site.setdefault(node.site, {})[node.worker_id] = None
        self._by_endpoint[node.endpoint] = node.worker_id
        self._held[node.worker_id] = {}

    def remove(self, worker_id: str) -> Node:
        """A worker is gone; what was said against its endpoint stays until it fades."""
        node = self.nodes.pop(worker_id)
        del self._by_site[node.site][worker_id]
        if not self._by_site[node.site]:
            del self._by_site[node.site]
        if self._by_endpoint.get(node.endpoint) == worker_id:
            del self._by_endpoint[node.endpoint]
        del self._held[worker_id]
        return node

    def at(self, endpoint: str) -> Node | None:
        """The worker that serves there."""
        name = self._by_endpoint.get(endpoint)
        return None if name is None else self.nodes[name]

    def mates(self, site: str) -> Sequence[str]:
        """Workers of a site, in the order in which they came."""
        return list(self._by_site.get(site, ()))

    def num_sites(self) -> int:
        """Sites that have workers."""
        return len(self._by_site)

    def held(self, worker_id: str) -> dict[int, TransferProgress]:
        """By version."""
        return self._held[worker_id]

    def hold(self, worker_id: str, transfers: Sequence[TransferProgress]) -> bool:
        """All that a worker holds; whether it has got further since."""
        old = self._held[worker_id]
        new = {t.version: t for t in transfers}
        self._held[worker_id] = new
        return any(t.num_ready > old[v].num_ready for v, t in new.items() if v in old)

    def got(self, worker_id: str, progress: TransferProgress) -> None:
        """One transfer went on; counts only grow until the version is dropped."""
        held = self._held[worker_id]
        old = held.get(progress.version)
        if old is None or progress.num_ready >= old.num_ready:
            held[progress.version] = progress

    def share(self, worker_id: str, version: int) -> float:
        """Of the chunks of a version, 0 to 1."""
        held = self._held[worker_id].get(version)
        if held is None or held.num_chunks <= 0:
            return 0.0
        return held.num_ready / held.num_chunks

    def whole(self, worker_id: str, version: int) -> bool:
        """Whether it has every chunk."""
        return self.share(worker_id, version) >= 1.0

    def finishing(self, worker_id: str, version: int) -> bool:
        """Whether it will end an older transfer before it begins `version`."""
        held = self._held[worker_id].values()
        return any(
            t.version < version and t.num_chunks / 2 <= t.num_ready < t.num_chunks for t in held
        )

    def say(self, endpoint: str, mark: Mark, *, by: str) -> None:
        """`by` complains of who serves at `endpoint`."""
        now = self._clock()
        if now >= self._sweep_at:
            self._sweep(now)
        fresh = [s for s in self._said.get(endpoint, []) if s.until > now]
        others = [s for s in fresh if (s.mark, s.by) != (mark, by)]
        self._said[endpoint] = [*others, _Said(mark, by, now + MARKED_S[mark])]

    def _sweep(self, now: float) -> None:
        """Endpoints of which everything said has faded may be gone: forget them."""
        self._sweep_at = now + min(MARKED_S.values())
        live = {e: [s for s in said if s.until > now] for e, said in self._said.items()}
        self._said = {endpoint: said for endpoint, said in live.items() if said}

    def clear(self, endpoint: str, *marks: Mark) -> None:
        """Forget these marks of an endpoint."""
        kept = [s for s in self._said.get(endpoint, []) if s.mark not in marks]
        if kept:
            self._said[endpoint] = kept
        else:
            self._said.pop(endpoint, None)

    def accusers(self, endpoint: str, mark: Mark) -> set[str]:
        """Who said that, and it has not faded."""
        now = self._clock()
        said = self._said.get(endpoint, ())
        return {s.by for s in said if s.mark == mark and s.until > now}

    def accused(self, by: str, mark: Mark) -> set[str]:
        """Endpoints of workers of which one worker, and nobody else, said that."""
        mine = [e for e, said in self._said.items() if any(s.by == by for s in said)]
        return {e for e in mine if e in self._by_endpoint and self.accusers(e, mark) == {by}}

    def marks(self, endpoint: str) -> list[Mark]:
        """What keeps others from an endpoint, worst first; empty: nothing."""
        now = self._clock()
        live = {s.mark for s in self._said.get(endpoint, ()) if s.until > now}
        return [mark for mark in _UNFIT if mark in live]

    def num_marked(self) -> int:
        """Endpoints of which something is remembered."""
        return len(self._said)

    def fit(self, worker_id: str) -> bool:
        """Whether others may be sent to it."""
        endpoint = self.nodes[worker_id].endpoint
        return endpoint not in self._said or not self.marks(endpoint)

    def damaged(self, endpoint: str) -> bool:
        """Whether it served bytes that do not fit their digests."""
        return endpoint in self._said and "damaged" in self.marks(endpoint)

    def suspects(self) -> list[str]:
        """Workers that are not believed to send anything now."""
        now = self._clock()
        live = [
            self.at(endpoint)
            for endpoint, said in self._said.items()
            if any(s.until > now and s.mark in _SILENT for s in said)
        ]
        return [node.worker_id for node in live if node is not None]
