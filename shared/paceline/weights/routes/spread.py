"""How one version spreads: who is behind whom, and what changes when somebody comes, goes or fails.

Nothing moves but what must: a place in the tree is kept until its parent is gone or complained of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from paceline.types import PolicyVersion
from paceline.weights.route import Source
from paceline.weights.routes.links import Links, Node
from paceline.weights.routes.members import Mark, Members
from paceline.weights.routes.plan import Load, Plan, Root, choose
from paceline.weights.routes.tree import ROOT, Tree

_CROWD = 2  # so many of one sender's children agree: it is the sender
_GRAVE: tuple[Mark, ...] = ("suspect", "damaged")
_MANY = 64  # so many hosts are compared for a place, however many there are
_LIAR = 3  # so many senders accused by one receiver alone: it is the receiver


class Spread:
    """The tree of one version and its repairs."""

    def __init__(
        self,
        version: PolicyVersion,
        *,
        chunk_bytes: int,
        seeds: Sequence[Source],
        site: str,
        members: Members,
        links: Links,
    ) -> None:
        self.version = version
        self.chunk_bytes = chunk_bytes
        self.seeds = list(seeds)
        self.site = site
        self.tree = Tree()
        self.plan = Plan("unicast", {})
        self.current = True  # the newest: whoever has a place in the tree will have the bytes
        self.delta = False
        self._dropped: set[str] = set()  # seeds of parts that were lost
        self._turn = 0
        self._members = members
        self._links = links

    # --- the seeds

    def sources(self, name: str = "") -> tuple[Source, ...]:
        """Who together has everything: seeds of parts, a full seed where a part is missing.

        A worker that has complained of a seed of a part is not sent to it, others are.
        """
        full = [s for s in self.seeds if s.parts <= 1]
        lost = self._dropped | {s.endpoint for s in self.seeds if self._accuses(name, s.endpoint)}
        there = [s for s in self.seeds if not full or s.endpoint not in lost]
        parts = {s.part: s for s in there if s.parts > 1}
        if not parts:
            if len(full) == 1:
                return (Source(full[0].endpoint),)
            return tuple(Source(s.endpoint, i, len(full)) for i, s in enumerate(full))
        num_parts = next(iter(parts.values())).parts
        if not full:
            return tuple(parts[i] for i in sorted(parts))
        first = full[0].endpoint
        return tuple(
            Source(parts[i].endpoint if i in parts else first, i, num_parts)
            for i in range(num_parts)
        )

    def root(self) -> Root:
        """The seeds as one sender; its uplink is what all of them bring together."""
        sources = self.sources()
        nodes = [Node("", source.endpoint, self.site) for source in sources]
        if not nodes:
            return Root(Node("", "", self.site), self._links.priors.bytes_per_s)
        shares = {n.endpoint: sum(m.endpoint == n.endpoint for m in nodes) for n in nodes}
        slowest = min(self._links.up(n) / shares[n.endpoint] for n in nodes)
        return Root(nodes[0], slowest * len(nodes))

    def seed(self, source: Source) -> bool:
        """One more seed, or one that is back; whether that is news."""
        before = self.sources()
        self._dropped.discard(source.endpoint)
        if source not in self.seeds:
            self.seeds.append(source)
        return self.sources() != before

    def reseed(self, seeds: Sequence[Source], *, site: str) -> None:
        """These serve it from now on, and nobody else."""
        self.seeds, self.site = list(seeds), site
        self._dropped.clear()

    def doubt_seed(self, endpoint: str) -> None:
        """A seed of a part is lost if several say so: a full one, if there, answers for it."""
        if len(self._accusers(endpoint)) >= _CROWD:
            self._dropped.add(endpoint)

    def _accuses(self, name: str, endpoint: str) -> bool:
        return bool(name) and name in self._accusers(endpoint)

    def _accusers(self, endpoint: str) -> set[str]:
        return {name for mark in _GRAVE for name in self._members.accusers(endpoint, mark)}

    # --- places

    def lay(self, order: Sequence[Node], *, load: Load) -> None:
        """The plan for everybody who is there when the version appears."""
        fit = [node for node in order if self._members.fit(node.worker_id)]
        self.plan = choose(fit, self.root(), links=self._links, load=load)
        for name, parent in self.plan.parents.items():
            self.tree.attach(name, parent)
        for node in order:
            if node.worker_id not in self.tree:
                self.join(node.worker_id)

    def join(self, name: str) -> None:
        """A late joiner becomes a leaf of the best peer; the trainer feeds it if there is none."""
        if name not in self.tree:
            self.tree.attach(name, self._host(name))

    def leave(self, name: str) -> None:
        """Its children go on without it."""
        if name in self.tree:
            self._vacate(name)
            self.tree.remove(name)

    # --- complaints; each returns after the receiver has another parent, if there is one

    def lost(self, name: str, parent: str) -> None:
        """`name` gets nothing from `parent`, of whom the members know that already."""
        if not self.feeds(parent, name):
            return
        if parent == ROOT:
            if not self._seeds_are("suspect"):
                self.demote(name)
        elif self.is_liar(name):
            self.demote(name)
        else:
            self.tree.move(name, self._rescuer(name))
            if not self.tree.children(parent):
                self.demote(parent)

    def slow(self, name: str, parent: str) -> None:
        """`name` gets less from `parent` than the link should carry.

        It becomes a leaf, so that nobody waits behind it, unless another child says the same.
        """
        if not self.feeds(parent, name):
            return
        if self.is_late(parent):
            if parent != ROOT:
                self.demote(parent)
        elif self.tree.children(name):
            self.demote(name)

    def demote(self, name: str) -> None:
        """Make it a leaf at the end; one of its children takes its place."""
        self._vacate(name)
        self.tree.move(name, self._host(name))

    def feeds(self, parent: str, name: str) -> bool:
        """Whether that is its place."""
        return name in self.tree and self.tree.parent(name) == parent

    def is_late(self, name: str) -> bool:
        """Whether several receivers say so of a worker, or of a seed."""
        if name == ROOT:
            return self._seeds_are("late")
        return self._crowd(self._members.nodes[name].endpoint, "late")

    def _crowd(self, endpoint: str, mark: Mark) -> bool:
        return len(self._members.accusers(endpoint, mark)) >= _CROWD

    def _seeds_are(self, mark: Mark) -> bool:
        """Whether several workers say so of a seed: then no other worker would do better."""
        return any(self._crowd(seed.endpoint, mark) for seed in self.seeds)

    def is_liar(self, name: str) -> bool:
        """Whether a worker accuses so many that it is the one with the trouble."""
        accused = {endpoint for mark in _GRAVE for endpoint in self._members.accused(name, mark)}
        return len(accused) >= _LIAR

    # --- choices

    def _vacate(self, name: str) -> None:
        """Leave the place to a child: of the same site, fit, with the most chunks."""
        children = self.tree.children(name)
        if not children:
            return
        site = self._members.nodes[name].site
        heir = max(children, key=lambda c: (self._fit(c), self._site(c) == site, self._share(c)))
        above = self._above(name)
        self.tree.move(heir, above)
        beside = heir if self._fit(heir) else above
        for child in children:
            if child != heir:
                below = self._below(heir, child) if self._pulls(child) else beside
                self.tree.move(child, below or above)

    def _above(self, name: str) -> str:
        """The first ancestor that is fit to feed others."""
        return next((a for a in self.tree.ancestors(name) if self._fit(a)), ROOT)

    def _below(self, top: str, child: str) -> str | None:
        """The first free place for `child` in the subtree of `top`, level by level."""
        level = [top]
        while level:
            for name in level:
                if self._fit(name) and self._is_free(name, child):
                    return name
            level = [c for name in level for c in self.tree.children(name)]
        return top if self._fit(top) else None

    def _rescuer(self, name: str) -> str:
        """Who feeds `name` when its parent does not, though others have no complaint of it.

        A peer of its site if one has more, so that a slow link is not crossed again for what the
        site has; else the next one up.
        """
        parent = self.tree.parent(name)
        above = self._above(parent)
        if above != ROOT and self._site(above) == self._site(name):
            return above
        mates = [m for m in self._members.mates(self._site(name)) if m != parent]
        near = [m for m in self._some(name, mates) if self._share(m) >= self._share(name)]
        return max(near, key=lambda m: self._merit(m, name), default=above)

    def _host(self, name: str) -> str:
        """The peer for a new leaf: of its site, else any; with a free uplink and most chunks."""
        near = self._some(name, self._members.mates(self._site(name)))
        hosts = near or self._some(name, list(self.tree))
        return max(hosts, key=lambda h: self._merit(h, name), default=ROOT)

    def _some(self, name: str, hosts: Sequence[str]) -> list[str]:
        """Hosts for `name`: all of a few, of many those at the ends of chains and some between."""
        if len(hosts) <= _MANY:
            return list(self._can_feed(name, hosts))
        self._turn += 1
        ends = [*islice(self._can_feed(name, self._ends(set(hosts))), _MANY // 2)]
        others = self._can_feed(name, spaced(hosts, _MANY // 2, self._turn))
        return list(dict.fromkeys([*ends, *islice(others, _MANY // 2)]))

    def _ends(self, among: set[str]) -> list[str]:
        """Where chains end, but for those in trouble: whose uplink is likely to be free."""
        fit = (self._end(leaf) for leaf in self.tree.leaves() if leaf in among)
        return spaced([e for e in dict.fromkeys(fit) if e in among], _MANY // 2, self._turn)

    def _end(self, leaf: str) -> str:
        return leaf if self._fit(leaf) else self._above(leaf)

    def _can_feed(self, name: str, hosts: Iterable[str]) -> Iterator[str]:
        """Those of `hosts` that have or will have the bytes, and not through `name`."""
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

    def _merit(self, host: str, child: str) -> tuple[int, float, float, int, int]:
        waiting = self.num_waiting(host)
        free = 0 if self._is_free(host, child) else -waiting
        rate = self._links.rate(self._members.nodes[host], self._members.nodes[child])
        return (free, self._share(host), rate, -waiting, -len(self.tree.children(host)))

    def _is_free(self, host: str, child: str) -> bool:
        """Whether the uplink has room for one more of this kind: of the same site or of another.

        Children in trouble take little of it.
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
        """Children that have not got everything yet."""
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


def spaced(names: Sequence[str], count: int, turn: int) -> list[str]:
    """All names, so ordered that the first `count` are spread over them; others each turn."""
    step = max(1, len(names) // count)
    return [name for k in range(step) for name in names[(k + turn) % step :: step]]
