"""Makes routes from positions in the tree and caches them until they are wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from paceline.weights.route import ChunkSource, Route
from paceline_experience.fleet.routing.links import Links
from paceline_experience.fleet.routing.members import Members
from paceline_experience.fleet.routing.plan import root_rate
from paceline_experience.fleet.routing.spread import Spread, spaced
from paceline_experience.fleet.routing.tree import ROOT

_NUM_FALLBACKS = 4  # peers, besides the seeds
_MAX_CANDIDATES = 32  # workers examined as possible full holders


@dataclass(frozen=True, slots=True)
class _CachedRoute:
    route: Route
    parent: str
    helpers: tuple[str, ...]  # worker ids of the fallbacks


class Routing:
    """One cached route per worker."""

    def __init__(self, *, members: Members, links: Links) -> None:
        self._members = members
        self._links = links
        self._cache: dict[str, _CachedRoute] = {}

    def route(self, name: str, spread: Spread, *, base: Callable[[], int]) -> Route:
        """The cached route, unless its sources or a fallback have become unusable.

        `base` gives the version for differences; it is called when a route is made.
        """
        cached = self._cache.get(name)
        if cached is None or not self._is_valid(cached, name, spread):
            cached = self._make(name, spread, base())
            self._cache[name] = cached
        return cached.route

    def drop(self, name: str) -> None:
        """The worker is gone."""
        self._cache.pop(name, None)

    def forget(self, version: int) -> None:
        """The version is gone."""
        for name in [n for n, m in self._cache.items() if m.route.version.version == version]:
            del self._cache[name]

    def _is_valid(self, cached: _CachedRoute, name: str, spread: Spread) -> bool:
        parent = spread.tree.parent(name)
        return (
            cached.route.version == spread.version
            and cached.parent == parent
            and cached.route.sources == self._sources(name, parent, spread)
            and all(self._can_help(h, name, spread) for h in cached.helpers)
        )

    def _sources(self, name: str, parent: str, spread: Spread) -> tuple[ChunkSource, ...]:
        if parent == ROOT:
            return spread.sources(name)
        return (ChunkSource(self._members.nodes[parent].endpoint),)

    def _can_help(self, helper: str, name: str, spread: Spread) -> bool:
        return (
            helper in spread.tree
            and not spread.tree.behind(helper, name)
            and not self._members.damaged(self._members.nodes[helper].endpoint)
        )

    def _make(self, name: str, spread: Spread, base: int) -> _CachedRoute:
        parent = spread.tree.parent(name)
        sources = self._sources(name, parent, spread)
        helpers = self._helpers(name, parent, spread)
        fallbacks = [self._members.nodes[h].endpoint for h in helpers]
        used = {source.endpoint for source in sources}
        fallbacks += [s.endpoint for s in spread.seeds if s.parts <= 1 and s.endpoint not in used]
        rate = self._expected_rate(name, parent, spread)
        return _CachedRoute(
            Route(spread.version, sources, tuple(fallbacks), rate, base), parent, tuple(helpers)
        )

    def _helpers(self, name: str, parent: str, spread: Spread) -> list[str]:
        """Ancestors surely have more: the next two, the gateway of the site, one outside it."""
        site = self._members.nodes[name].site
        upstream = [a for a in spread.tree.ancestors(name) if self._members.fit(a)]
        inside = [a for a in upstream if self._members.nodes[a].site == site]
        outside = [a for a in upstream if self._members.nodes[a].site != site]
        wanted = [*upstream[1:3], *inside[-1:], *outside[:1]]
        if len(wanted) < 2:
            wanted += self._full_holders(name, spread)
        return list(dict.fromkeys(w for w in wanted if w != parent))[:_NUM_FALLBACKS]

    def _full_holders(self, name: str, spread: Spread) -> list[str]:
        """Up to two workers that hold all of it, preferably of the same site."""
        site, version = self._members.nodes[name].site, spread.version.version
        local, all_ = self._members.at_site(site), list(self._members.nodes)
        limit = _MAX_CANDIDATES
        some = [*spaced(local, limit, 0)[:limit], *spaced(all_, limit, 0)[:limit]]
        fit = (
            w
            for w in dict.fromkeys(some)
            if w != name and self._members.whole(w, version) and self._members.fit(w)
        )
        return list(islice((w for w in fit if self._can_help(w, name, spread)), 2))

    def _expected_rate(self, name: str, parent: str, spread: Spread) -> float:
        """Measured bytes per second, divided among the sender's children; 0: not measured yet."""
        receiver = self._members.nodes[name]
        if parent == ROOT:
            root = spread.root()
            seen = self._links.measured(root.node, receiver)
            return root_rate(root, receiver, self._links) if seen else 0.0
        sender = self._members.nodes[parent]
        seen = self._links.measured(sender, receiver)
        near = sender.site == receiver.site
        return seen / max(1, spread.num_waiting(parent)) if near else seen
