"""Routes made of places in the tree, and kept until something makes them wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from paceline.weights.route import Route, Source
from paceline.weights.routes.links import Links
from paceline.weights.routes.members import Members
from paceline.weights.routes.plan import root_rate
from paceline.weights.routes.spread import Spread, spaced
from paceline.weights.routes.tree import ROOT

_NUM_FALLBACKS = 4  # peers, besides the seeds
_MANY = 32  # so many are looked at who might hold all of it, however many there are


@dataclass(frozen=True, slots=True)
class _Made:
    route: Route
    parent: str
    helpers: tuple[str, ...]  # worker ids of the fallbacks


class Routing:
    """One route by worker and version."""

    def __init__(self, *, members: Members, links: Links) -> None:
        self._members = members
        self._links = links
        self._made: dict[str, _Made] = {}

    def route(self, name: str, spread: Spread, *, base: Callable[[], int]) -> Route:
        """The same object as before, unless its sources or a fallback do not serve any more.

        `base`, the version for differences, is asked when a route is made and holds for it.
        """
        made = self._made.get(name)
        if made is None or not self._holds(made, name, spread):
            made = self._make(name, spread, base())
            self._made[name] = made
        return made.route

    def drop(self, name: str) -> None:
        """The worker is gone."""
        self._made.pop(name, None)

    def forget(self, version: int) -> None:
        """The version is gone."""
        for name in [n for n, m in self._made.items() if m.route.version.version == version]:
            del self._made[name]

    def _holds(self, made: _Made, name: str, spread: Spread) -> bool:
        parent = spread.tree.parent(name)
        return (
            made.route.version == spread.version
            and made.parent == parent
            and made.route.sources == self._sources(name, parent, spread)
            and all(self._helps(h, name, spread) for h in made.helpers)
        )

    def _sources(self, name: str, parent: str, spread: Spread) -> tuple[Source, ...]:
        if parent == ROOT:
            return spread.sources(name)
        return (Source(self._members.nodes[parent].endpoint),)

    def _helps(self, helper: str, name: str, spread: Spread) -> bool:
        return (
            helper in spread.tree
            and not spread.tree.behind(helper, name)
            and not self._members.damaged(self._members.nodes[helper].endpoint)
        )

    def _make(self, name: str, spread: Spread, base: int) -> _Made:
        parent = spread.tree.parent(name)
        sources = self._sources(name, parent, spread)
        helpers = self._helpers(name, parent, spread)
        ends = [self._members.nodes[h].endpoint for h in helpers]
        asked = {source.endpoint for source in sources}
        ends += [s.endpoint for s in spread.seeds if s.parts <= 1 and s.endpoint not in asked]
        rate = self._expected(name, parent, spread)
        return _Made(
            Route(spread.version, sources, tuple(ends), rate, base), parent, tuple(helpers)
        )

    def _helpers(self, name: str, parent: str, spread: Spread) -> list[str]:
        """Upstream is who has more for sure: the next two, the gateway of the site, one beyond."""
        site = self._members.nodes[name].site
        upstream = [a for a in spread.tree.ancestors(name) if self._members.fit(a)]
        inside = [a for a in upstream if self._members.nodes[a].site == site]
        beyond = [a for a in upstream if self._members.nodes[a].site != site]
        wanted = [*upstream[1:3], *inside[-1:], *beyond[:1]]
        if len(wanted) < 2:
            wanted += self._beside(name, spread)
        return list(dict.fromkeys(w for w in wanted if w != parent))[:_NUM_FALLBACKS]

    def _beside(self, name: str, spread: Spread) -> list[str]:
        """Two who hold all of it, of the site if there are such."""
        site, version = self._members.nodes[name].site, spread.version.version
        mates, all_ = self._members.mates(site), list(self._members.nodes)
        some = [*spaced(mates, _MANY, 0)[:_MANY], *spaced(all_, _MANY, 0)[:_MANY]]
        fit = (
            w
            for w in dict.fromkeys(some)
            if w != name and self._members.whole(w, version) and self._members.fit(w)
        )
        return list(islice((w for w in fit if self._helps(w, name, spread)), 2))

    def _expected(self, name: str, parent: str, spread: Spread) -> float:
        """What the link has shown, shared with the sender's other children; 0: nothing yet."""
        receiver = self._members.nodes[name]
        if parent == ROOT:
            root = spread.root()
            seen = self._links.measured(root.node, receiver)
            return root_rate(root, receiver, self._links) if seen else 0.0
        sender = self._members.nodes[parent]
        seen = self._links.measured(sender, receiver)
        near = sender.site == receiver.site
        return seen / max(1, spread.num_waiting(parent)) if near else seen
