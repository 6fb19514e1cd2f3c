"""Time for a snapshot to reach all workers: in network namespaces, on loopback, simulated.

Usage: python benchmarks/broadcast.py [--json PATH] [--only NAME ...] [--rounds N]

Each row is the best of its rounds, which it also lists. With `--only`, PATH keeps its rows of other
scenarios; `loopback` and `simulated` stand for several rows. Networks need root; without it their
rows are omitted, and `skipped` has the reason.

`bound_seconds` is the lower bound set by the links (bytes / rate, or the cost formula with several
sites); `fanout_seconds` is direct fan-out by the same code in the same run, measured once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleet.hops import hops
from fleet.scenarios import Scenario, freeze, join, kill, measure, slow, supersede
from rig.smoke import arguments

from paceline.weights.cost import Hop, path_s
from paceline_harness.broadcast import rows as simulated
from paceline_harness.network import Network

REPAIR_MIB = 128
HOP_BYTES, SMOKE_BYTES = 256 << 20, 1 << 20
SMOKE = Scenario("smoke", mib=1, hosts=(3,), fans_out=True)
SCENARIOS = [
    Scenario("star8-200", mib=256, fans_out=True),
    Scenario("star8-200-64", mib=64, fans_out=True),
    Scenario("star8-500", mib=256, mbit=500, fans_out=True),
    Scenario("two-sites", mib=64, hosts=(4, 4), between_mbit=50),
    Scenario("seeds", mib=128, hosts=(8,), seeds=2, seed_mbit=100),
    Scenario("delta", mib=256, change=1e-6),
    Scenario("repair-none", mib=REPAIR_MIB),
    Scenario("repair-kill", mib=REPAIR_MIB, disturb=kill),
    Scenario("repair-freeze", mib=REPAIR_MIB, disturb=freeze),
    Scenario("repair-slow", mib=REPAIR_MIB, disturb=slow),
    Scenario("repair-late", mib=REPAIR_MIB, hosts=(10,), late=2, disturb=join),
    Scenario("repair-newer", mib=REPAIR_MIB, disturb=supersede),
]


def bound_seconds(scenario: Scenario, chunk_bytes: int) -> float:
    """Lower bound set by the links: bytes / rate, or with several sites the cost formula.

    The slowest path crosses the link between the sites and a chain through the far site.
    """
    rate = scenario.mbit * 1e6 / 8
    if scenario.between_mbit is None:
        return scenario.num_bytes / rate
    between = Hop(scenario.between_mbit * 1e6 / 8)
    hops = [between, *[Hop(rate)] * (scenario.hosts[-1] - 1)]
    num_chunks = math.ceil(scenario.num_bytes / chunk_bytes)
    return path_s(hops, chunk_bytes=chunk_bytes, num_chunks=num_chunks)


def row(scenario: Scenario, rounds: int) -> dict[str, Any]:
    """Row with the best of several rounds."""
    load = os.getloadavg()[0]
    found = measure(scenario, rounds)
    best = min(found, key=lambda each: each["seconds"])
    bound_s = bound_seconds(scenario, best["chunk_bytes"])
    return {
        "scenario": scenario.name,
        "bytes": scenario.num_bytes,
        "workers": sum(scenario.hosts) - scenario.seeds,
        "link_mbit": scenario.mbit,
        "bound_seconds": bound_s,
        "ratio": best["seconds"] / bound_s,
        **best,
        "digest_ok": all(each["digest_ok"] for each in found),
        "load_before": load,
        "rounds": found,
    }


def show(found: dict[str, Any]) -> None:
    """Print a row as one line."""
    parts = [
        f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={value}"
        for name, value in found.items()
        if name != "rounds"
    ]
    print(" ".join(parts), flush=True)


def machine() -> dict[str, Any]:
    """The machine, and the time."""
    return {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


class Report:
    """Rows of this run, and rows in the same file that it does not measure again."""

    def __init__(self, path: Path | None, only: Sequence[str]) -> None:
        self._path = path
        self._only = only
        self._content: dict[str, Any] = {"machine": machine(), "rows": []}
        if only and path is not None and path.exists():
            self._content["rows"] = json.loads(path.read_text())["rows"]

    def wants(self, name: str) -> bool:
        """Whether a scenario is to be measured."""
        return not self._only or name in self._only

    def add(self, found: dict[str, Any]) -> None:
        """Add a row, replacing an older one of the same scenario."""
        show(found)
        others = [each for each in self._content["rows"] if each["scenario"] != found["scenario"]]
        self._content["rows"] = [*others, found]
        self._write()

    def skip(self, reason: str) -> None:
        """Record why networks are not available."""
        print(f"skipped: {reason}")
        self._content["skipped"] = reason
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self._content, indent=1) + "\n")


def main() -> None:
    """Measure the requested scenarios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    # Simulations have a test of their own.
    given = arguments(parser, rounds=1, only=["loopback", "smoke"])
    report = Report(given.json, given.only)
    if report.wants("loopback"):
        size, lengths = (SMOKE_BYTES, (1,)) if given.smoke else (HOP_BYTES, (1, 3))
        for found in hops(size, given.rounds, lengths=lengths):
            report.add(found)
    if report.wants("simulated"):
        for found in simulated():
            report.add(found)
    reason = Network.unavailable_reason()
    if reason:
        report.skip(reason)
        return
    for scenario in [SMOKE] if given.smoke else SCENARIOS:
        if report.wants(scenario.name):
            report.add(row(scenario, given.rounds))


if __name__ == "__main__":
    main()
