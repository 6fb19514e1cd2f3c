"""The distribution tree of one version, and its repairs when a worker joins, leaves or fails.

Nothing moves needlessly: a worker keeps its parent until that is gone or complained about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from paceline.types import PolicyVersion
from paceline.weights.route import ChunkSource, RouteShape
from paceline_experience.fleet.routing.links import Links, Node
from paceline_experience.fleet.routing.members import Mark, Members
from paceline_experience.fleet.routing.plan import BroadcastLoad, BroadcastPlan, Root, choose
from paceline_experience.fleet.routing.tree import ROOT, Tree

_QUORUM = 2  # if this many children of a sender complain, the sender is at fault
_GRAVE: tuple[Mark, ...] = ("suspect", "damaged")
_MAX_CANDIDATES = 64  # hosts compared for a new child
_MAX_ACCUSED = 3  # a receiver that alone accuses this many senders is itself at fault


class Spread:
    """The tree of one version and its repairs."""

    def __init__(
        self,
        version: PolicyVersion,
        *,
        chunk_bytes: int,
        seeds: Sequence[ChunkSource],
        site: str,
        members: Members,
        links: Links,
    ) -> None:
        self.version = version
        self.chunk_bytes = chunk_bytes
        self.seeds = list(seeds)
        self.site = site
        self.tree = Tree()
        self.plan = BroadcastPlan(RouteShape.UNICAST, {})
        self.current = True  # the newest version: whoever is in the tree will get the bytes
        self.delta = False
        self._dropped: set[str] = set()  # endpoints of lost seeds of parts
        self._rotation = 0
        self._members = members
        self._links = links

    # --- the seeds

    def sources(self, name: str = "") -> tuple[ChunkSource, ...]:
        """Sources that together have everything: seeds of parts, a full seed for missing parts.

        Leaves out seeds of parts that worker `name` has complained about.
        """
        full = [s for s in self.seeds if s.parts <= 1]
        lost = self._dropped | {s.endpoint for s in self.seeds if self._accuses(name, s.endpoint)}
        usable = [s for s in self.seeds if not full or s.endpoint not in lost]
        parts = {s.part: s for s in usable if s.parts > 1}
        if not parts:
            if len(full) == 1:
                return (ChunkSource(full[0].endpoint),)
            return tuple(ChunkSource(s.endpoint, i, len(full)) for i, s in enumerate(full))
        num_parts = next(iter(parts.values())).parts
        if not full:
            return tuple(parts[i] for i in sorted(parts))
        first = full[0].endpoint
        return tuple(
            ChunkSource(parts[i].endpoint if i in parts else first, i, num_parts)
            for i in range(num_parts)
        )

    def root(self) -> Root:
        """The seeds as one sender with their combined uplink."""
        sources = self.sources()
        nodes = [Node("", source.endpoint, self.site) for source in sources]
        if not nodes:
            return Root(Node("", "", self.site), self._links.priors.bytes_per_s)
        shares = {n.endpoint: sum(m.endpoint == n.endpoint for m in nodes) for n in nodes}
        slowest = min(self._links.up(n) / shares[n.endpoint] for n in nodes)
        return Root(nodes[0], slowest * len(nodes))

    def seed(self, source: ChunkSource) -> bool:
        """Add a seed, or one that is back; returns whether the sources changed."""
        before = self.sources()
        self._dropped.discard(source.endpoint)
        if source not in self.seeds:
            self.seeds.append(source)
        return self.sources() != before

    def reseed(self, seeds: Sequence[ChunkSource], *, site: str) -> None:
        """Replace all seeds."""
        self.seeds, self.site = list(seeds), site
        self._dropped.clear()

    def check_seed(self, endpoint: str) -> None:
        """Drop a seed of a part if several workers accuse it; a full seed then serves its part."""
        if len(self._accusers(endpoint)) >= _QUORUM:
            self._dropped.add(endpoint)

    def _accuses(self, name: str, endpoint: str) -> bool:
        return bool(name) and name in self._accusers(endpoint)

    def _accusers(self, endpoint: str) -> set[str]:
        return {name for mark in _GRAVE for name in self._members.accusers(endpoint, mark)}

    # --- the tree

    def lay(self, order: Sequence[Node], *, load: BroadcastLoad) -> None:
        """Choose a plan for the workers that are present when the version is published."""
        fit = [node for node in order if self._members.fit(node.worker_id)]
        self.plan = choose(fit, self.root(), links=self._links, load=load)
        for name, parent in self.plan.parents.items():
            self.tree.attach(name, parent)
        for node in order:
            if node.worker_id not in self.tree:
                self.join(node.worker_id)

    def join(self, name: str) -> None:
        """A late joiner becomes a leaf of the best peer, or of the seeds if there is none."""
        if name not in self.tree:
            self.tree.attach(name, self._host(name))

    def leave(self, name: str) -> None:
        """Remove a worker; its children get other parents."""
        if name in self.tree:
            self._vacate(name)
            self.tree.remove(name)

    # --- complaints; each returns after the receiver has another parent, if there is one

    def lost(self, name: str, parent: str) -> None:
        """`name` gets nothing from `parent`; the complaint is already recorded."""
        if not self.feeds(parent, name):
            return
        if parent == ROOT:
            if not self._seeds_are("suspect"):
                self.demote(name)
        elif self.is_false_accuser(name):
            self.demote(name)
        else:
            self.tree.move(name, self._new_parent(name))
            if not self.tree.children(parent):
                self.demote(parent)

    def slow(self, name: str, parent: str) -> None:
        """`name` gets less from `parent` than the link should carry.

        It becomes a leaf, so that nobody waits behind it, unless other children complain too.
        """
        if not self.feeds(parent, name):
            return
        if self.is_late(parent):
            if parent != ROOT:
                self.demote(parent)
        elif self.tree.children(name):
            self.demote(name)

    def demote(self, name: str) -> None:
        """Make it a leaf; one of its children takes its place."""
        self._vacate(name)
        self.tree.move(name, self._host(name))

    def feeds(self, parent: str, name: str) -> bool:
        """Whether `parent` is the parent of `name`."""
        return name in self.tree and self.tree.parent(name) == parent

    def is_late(self, name: str) -> bool:
        """Whether several receivers call a worker, or a seed, late."""
        if name == ROOT:
            return self._seeds_are("late")
        return self._has_quorum(self._members.nodes[name].endpoint, "late")

    def _has_quorum(self, endpoint: str, mark: Mark) -> bool:
        return len(self._members.accusers(endpoint, mark)) >= _QUORUM

    def _seeds_are(self, mark: Mark) -> bool:
        """Whether several workers mark a seed: then no other worker would do better."""
        return any(self._has_quorum(seed.endpoint, mark) for seed in self.seeds)

    def is_false_accuser(self, name: str) -> bool:
        """Whether a worker accuses so many senders that it is itself at fault."""
        accused = {endpoint for mark in _GRAVE for endpoint in self._members.accused(name, mark)}
        return len(accused) >= _MAX_ACCUSED

    # --- choices

    def _vacate(self, name: str) -> None:
        """Give its place to a child: preferably fit, of its site, with the most chunks."""
        children = self.tree.children(name)
        if not children:
            return
        site = self._members.nodes[name].site
        heir = max(children, key=lambda c: (self._fit(c), self._site(c) == site, self._share(c)))
        above = self._above(name)
        self.tree.move(heir, above)
        fallback = heir if self._fit(heir) else above
        for child in children:
            if child != heir:
                below = self._below(heir, child) if self._pulls(child) else fallback
                self.tree.move(child, below or above)

    def _above(self, name: str) -> str:
        """The first ancestor that is fit to feed others."""
        return next((a for a in self.tree.ancestors(name) if self._fit(a)), ROOT)

    def _below(self, top: str, child: str) -> str | None:
        """The first node with a free slot for `child` in the subtree of `top`, level by level."""
        level = [top]
        while level:
            for name in level:
                if self._fit(name) and self._is_free(name, child):
                    return name
            level = [c for name in level for c in self.tree.children(name)]
        return top if self._fit(top) else None

    def _new_parent(self, name: str) -> str:
        """Another parent for `name` when only it has a complaint about the present one.

        A peer of its site if one has more, so that bytes that the site has do not cross a slow
        link again; else the next ancestor.
        """
        parent = self.tree.parent(name)
        above = self._above(parent)
        if above != ROOT and self._site(above) == self._site(name):
            return above
        local = [m for m in self._members.at_site(self._site(name)) if m != parent]
        near = [m for m in self._candidates(name, local) if self._share(m) >= self._share(name)]
        return max(near, key=lambda m: self._score(m, name), default=above)

    def _host(self, name: str) -> str:
        """The peer for a new leaf: of its site, else any; with a free uplink and most chunks."""
        near = self._candidates(name, self._members.at_site(self._site(name)))
        hosts = near or self._candidates(name, list(self.tree))
        return max(hosts, key=lambda h: self._score(h, name), default=ROOT)

    def _candidates(self, name: str, hosts: Sequence[str]) -> list[str]:
        """Usable hosts for `name`; of many only some: ends of chains and a rotating sample."""
        if len(hosts) <= _MAX_CANDIDATES:
            return list(self._can_feed(name, hosts))
        self._rotation += 1
        ends = [*islice(self._can_feed(name, self._ends(set(hosts))), _MAX_CANDIDATES // 2)]
        others = self._can_feed(name, spaced(hosts, _MAX_CANDIDATES // 2, self._rotation))
        return list(dict.fromkeys([*ends, *islice(others, _MAX_CANDIDATES // 2)]))

    def _ends(self, among: set[str]) -> list[str]:
        """Leaves, or their fit ancestors: hosts whose uplink is likely to be free."""
        fit = (self._end(leaf) for leaf in self.tree.leaves() if leaf in among)
        return spaced(
            [e for e in dict.fromkeys(fit) if e in among], _MAX_CANDIDATES // 2, self._rotation
        )

    def _end(self, leaf: str) -> str:
        return leaf if self._fit(leaf) else self._above(leaf)

    def _can_feed(self, name: str, hosts: Iterable[str]) -> Iterator[str]:
        """Those of `hosts` that have or will get the bytes, and not through `name`."""
        suspects = self._members.suspects() if self.current else []
        starved = self.tree.below(s for s in suspects if s in self.tree)
        placed = name in self.tree
        return (
            host
            for host in hosts
            if host != name
            and host in self.tree
            and self._fit(host)
            and not (placed and self.tree.behind(host, name))
            and (self._whole(host) or (self.current and host not in starved))
        )

    def _score(self, host: str, child: str) -> tuple[int, float, float, int, int]:
        waiting = self.num_waiting(host)
        free = 0 if self._is_free(host, child) else -waiting
        rate = self._links.rate(self._members.nodes[host], self._members.nodes[child])
        return (free, self._share(host), rate, -waiting, -len(self.tree.children(host)))

    def _is_free(self, host: str, child: str) -> bool:
        """Whether the uplink has capacity for one more child of the same, or of another, site.

        Children with complaints take little of it and are not counted.
        """
        near = self._site(host) == self._site(child)
        limit = self.plan.fanout if near else self.plan.gateways
        taken = [
            c
            for c in self.tree.children(host)
            if c != child and (self._site(c) == self._site(host)) == near and self._pulls(c)
        ]
        return len(taken) < limit

    def num_waiting(self, host: str) -> int:
        """Number of children that do not have everything yet."""
        return sum(not self._whole(c) for c in self.tree.children(host))

    def _pulls(self, name: str) -> bool:
        return not self._whole(name) and self._fit(name)

    def _site(self, name: str) -> str:
        return self._members.nodes[name].site

    def _fit(self, name: str) -> bool:
        return self._members.fit(name)

    def _whole(self, name: str) -> bool:
        return self._members.whole(name, self.version.version)

    def _share(self, name: str) -> float:
        return self._members.share(name, self.version.version)


def spaced(names: Sequence[str], count: int, rotation: int) -> list[str]:
    """All names, ordered so that the first `count` are evenly spaced; `rotation` shifts them."""
    step = max(1, len(names) // count)
    return [name for k in range(step) for name in names[(k + rotation) % step :: step]]
