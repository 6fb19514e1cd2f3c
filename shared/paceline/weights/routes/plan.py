"""The tree in which a version spreads: candidates, and the one of least predicted time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.weights.routes.cost import Hop, shares
from paceline.weights.routes.links import Links, Node
from paceline.weights.routes.tree import ROOT

_COPY_PENALTY = 0.05  # another copy out of the trainer must save more than this part of the time
_GAIN = 0.01  # so much quicker a plan must be than a simpler one, which is easier to repair
_FANOUTS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be moved, in bytes of the wire."""

    num_bytes: float
    num_chunks: int

    @property
    def chunk_bytes(self) -> float:
        """Of a chunk, on the wire."""
        return self.num_bytes / self.num_chunks


@dataclass(frozen=True, slots=True)
class Plan:
    """Parents by worker id, parents before children; ROOT stands for the trainer's seeds."""

    shape: str  # unicast, chain, tree, sites
    parents: Mapping[str, str]
    fanout: int = 1  # children of a node in its own site
    gateways: int = 1  # children of a node in other sites
    predicted_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Root:
    """The trainer's seeds as one sender."""

    node: Node
    up_bytes_per_s: float


def choose(order: Sequence[Node], root: Root, *, links: Links, load: Load) -> Plan:
    """The plan of least predicted time for workers in this order, best relays first.

    Candidates are those of `candidates`; a plan that takes more copies from the trainer must be
    clearly quicker, and so must one that is less simple.
    """
    best: Plan | None = None
    best_score = 0.0
    for plan in candidates(order, root.node, links=links):
        seconds = predict(plan.parents, order, root, links=links, load=load)
        copies = sum(parent == ROOT for parent in plan.parents.values())
        score = seconds * (1 + _COPY_PENALTY * max(0, copies - 1))
        if best is None or score < best_score * (1 - _GAIN):
            best = Plan(plan.shape, plan.parents, plan.fanout, plan.gateways, seconds)
            best_score = score
    return best or Plan("unicast", {})


def candidates(order: Sequence[Node], root: Node, *, links: Links) -> list[Plan]:
    """Chain, gateways per site with chains or trees inside, unicast; the simplest first."""
    sites = _sites(order, root, links)
    ids = [node.worker_id for site in sites for node in site]
    plans = [Plan("chain", fill(ids, 1))]
    if len(sites) == 1:
        plans += [Plan("tree", fill(ids, f), f) for f in _FANOUTS if 1 < f < len(ids)]
        plans += [Plan("tree", fill(ids, f, roots=f), f) for f in _FANOUTS if 1 < f < len(ids)]
    else:
        plans += [_by_site(_widest(sites, root, links), 1, 1)]
        plans += [_by_site(sites, g, f) for g in _FANOUTS for f in _FANOUTS if g < len(sites)]
        plans += [_by_site(sites, 1, f, roots=len(sites)) for f in _FANOUTS]
    if len(ids) > 1:
        plans.append(Plan("unicast", dict.fromkeys(ids, ROOT), len(ids), len(sites)))
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
    load: Load,
) -> float:
    """Seconds until the last worker has everything, by the general formula of `cost.path_s`.

    The flows of a sender share its uplink, and flows between two sites share what is between them.
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
    """Bytes per second of one worker that pulls from all seeds at once."""
    alone = links.rate(root.node, receiver)
    if root.up_bytes_per_s <= links.up(root.node):
        return min(alone, root.up_bytes_per_s)
    return min(root.up_bytes_per_s, max(alone, links.down(receiver)))


def _sites(order: Sequence[Node], root: Node, links: Links) -> list[list[Node]]:
    """Workers by site: the trainer's own first, then by what the site can pass on to others."""
    sites: dict[str, list[Node]] = {}
    for node in order:
        sites.setdefault(node.site, []).append(node)
    return sorted(
        sites.values(), key=lambda site: (site[0].site != root.site, -links.wan(site[0].site))
    )


def _widest(sites: Sequence[list[Node]], root: Node, links: Links) -> list[list[Node]]:
    """Each site followed by the one that its gateway reaches best."""
    left, at, chain = list(sites), root, list[list[Node]]()
    while left:
        best = max(left, key=lambda site: (site[0].site == root.site, links.rate(at, site[0])))
        left.remove(best)
        chain.append(best)
        at = best[0]
    return chain


def _by_site(
    sites: Sequence[Sequence[Node]], gateways: int, fanout: int, *, roots: int = 1
) -> Plan:
    heads = [site[0].worker_id for site in sites]
    parents = fill(heads, gateways, roots=roots)
    for site in sites:
        ids = [node.worker_id for node in site]
        inside = fill(ids, fanout)
        parents |= {name: inside[name] for name in ids[1:]}
    return Plan("sites", parents, fanout, gateways)
