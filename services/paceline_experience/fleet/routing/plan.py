"""Plans the tree by which a version is distributed: the candidate of least predicted time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.weights.cost import Hop, shares
from paceline.weights.route import RouteShape
from paceline_experience.fleet.routing.links import Links, Node
from paceline_experience.fleet.routing.tree import ROOT

_COPY_PENALTY = 0.05  # another copy from the trainer must save more than this share of the time
_MIN_GAIN = (
    0.01  # a less simple plan must be faster by this share: simple ones are easier to repair
)
_FANOUTS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class BroadcastLoad:
    """The size of a broadcast, in bytes on the wire."""

    num_bytes: float
    num_chunks: int

    @property
    def chunk_bytes(self) -> float:
        """Bytes of a chunk on the wire."""
        return self.num_bytes / self.num_chunks


@dataclass(frozen=True, slots=True)
class BroadcastPlan:
    """Parents by worker id, parents before children; ROOT is the trainer's seeds."""

    shape: RouteShape
    parents: Mapping[str, str]
    fanout: int = 1  # children of a node in its own site
    gateways: int = 1  # children of a node in other sites
    predicted_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Root:
    """The trainer's seeds as one sender."""

    node: Node
    up_bytes_per_s: float


def choose(
    order: Sequence[Node], root: Root, *, links: Links, load: BroadcastLoad
) -> BroadcastPlan:
    """The candidate of least predicted time for workers in this order, best relays first.

    A plan that takes more copies from the trainer, or is less simple, must be clearly faster.
    """
    best: BroadcastPlan | None = None
    best_score = 0.0
    for plan in candidates(order, root.node, links=links):
        seconds = predict(plan.parents, order, root, links=links, load=load)
        copies = sum(parent == ROOT for parent in plan.parents.values())
        score = seconds * (1 + _COPY_PENALTY * max(0, copies - 1))
        if best is None or score < best_score * (1 - _MIN_GAIN):
            best = BroadcastPlan(plan.shape, plan.parents, plan.fanout, plan.gateways, seconds)
            best_score = score
    return best or BroadcastPlan(RouteShape.UNICAST, {})


def candidates(order: Sequence[Node], root: Node, *, links: Links) -> list[BroadcastPlan]:
    """Chain, gateways per site with chains or trees inside, unicast; simplest first."""
    sites = _sites(order, root, links)
    ids = [node.worker_id for site in sites for node in site]
    plans = [BroadcastPlan(RouteShape.CHAIN, fill(ids, 1))]
    if len(sites) == 1:
        plans += [
            BroadcastPlan(RouteShape.TREE, fill(ids, f), f) for f in _FANOUTS if 1 < f < len(ids)
        ]
        plans += [
            BroadcastPlan(RouteShape.TREE, fill(ids, f, roots=f), f)
            for f in _FANOUTS
            if 1 < f < len(ids)
        ]
    else:
        plans += [_by_site(_widest(sites, root, links), 1, 1)]
        plans += [_by_site(sites, g, f) for g in _FANOUTS for f in _FANOUTS if g < len(sites)]
        plans += [_by_site(sites, 1, f, roots=len(sites)) for f in _FANOUTS]
    if len(ids) > 1:
        plans.append(
            BroadcastPlan(RouteShape.UNICAST, dict.fromkeys(ids, ROOT), len(ids), len(sites))
        )
    return plans


def fill(ids: Sequence[str], fanout: int, *, roots: int = 1) -> dict[str, str]:
    """A tree filled level by level; the first `roots` ids are children of the root."""
    return {name: ROOT if i < roots else ids[(i - roots) // fanout] for i, name in enumerate(ids)}


def predict(
    parents: Mapping[str, str],
    order: Sequence[Node],
    root: Root,
    *,
    links: Links,
    load: BroadcastLoad,
) -> float:
    """Seconds until the last worker has everything, by the general formula of `cost.path_s`.

    Flows of one sender share its uplink; flows between two sites share the link between them.
    """
    nodes = {node.worker_id: node for node in order} | {ROOT: root.node}
    hops = _hops(parents, nodes, root, links=links)
    begin: dict[str, tuple[float, float]] = {ROOT: (0.0, 0.0)}
    worst = 0.0
    for name, parent in parents.items():
        first, slowest = begin[parent]
        once = load.chunk_bytes / hops[name].bytes_per_s
        begin[name] = (first + once + hops[name].latency_s, max(slowest, once))
        worst = max(worst, begin[name][0] + (load.num_chunks - 1) * begin[name][1])
    return worst


def _hops(
    parents: Mapping[str, str], nodes: Mapping[str, Node], root: Root, *, links: Links
) -> dict[str, Hop]:
    children: dict[str, list[str]] = defaultdict(list)
    crossings: Counter[tuple[str, str]] = Counter()
    for name, parent in parents.items():
        children[parent].append(name)
        crossings[nodes[parent].site, nodes[name].site] += 1
    hops: dict[str, Hop] = {}
    for parent, names in children.items():
        sender = nodes[parent]
        caps: list[float] = []
        for name in names:
            receiver = nodes[name]
            alone = root_rate(root, receiver, links) if parent == ROOT else None
            rate = links.rate(sender, receiver) if alone is None else alone
            far = sender.site != receiver.site
            caps.append(rate / (crossings[sender.site, receiver.site] if far else 1))
        up = root.up_bytes_per_s if parent == ROOT else links.up(sender)
        for name, rate in zip(names, shares(up, caps), strict=True):
            hops[name] = Hop(rate, links.latency(sender, nodes[name]))
    return hops


def root_rate(root: Root, receiver: Node, links: Links) -> float:
    """Bytes per second of a single worker that pulls from all seeds at once."""
    alone = links.rate(root.node, receiver)
    if root.up_bytes_per_s <= links.up(root.node):
        return min(alone, root.up_bytes_per_s)
    return min(root.up_bytes_per_s, max(alone, links.down(receiver)))


def _sites(order: Sequence[Node], root: Node, links: Links) -> list[list[Node]]:
    """Workers by site: the trainer's site first, then by what a site can relay to others."""
    sites: dict[str, list[Node]] = {}
    for node in order:
        sites.setdefault(node.site, []).append(node)
    return sorted(
        sites.values(), key=lambda site: (site[0].site != root.site, -links.wan(site[0].site))
    )


def _widest(sites: Sequence[list[Node]], root: Node, links: Links) -> list[list[Node]]:
    """Sites in a chain: each is followed by the one that its gateway reaches fastest."""
    left, at, chain = list(sites), root, list[list[Node]]()
    while left:
        best = max(left, key=lambda site: (site[0].site == root.site, links.rate(at, site[0])))
        left.remove(best)
        chain.append(best)
        at = best[0]
    return chain


def _by_site(
    sites: Sequence[Sequence[Node]], gateways: int, fanout: int, *, roots: int = 1
) -> BroadcastPlan:
    heads = [site[0].worker_id for site in sites]
    parents = fill(heads, gateways, roots=roots)
    for site in sites:
        ids = [node.worker_id for node in site]
        inside = fill(ids, fanout)
        parents |= {name: inside[name] for name in ids[1:]}
    return BroadcastPlan(RouteShape.SITES, parents, fanout, gateways)
