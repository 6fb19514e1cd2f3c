"""The pytest plug-in behind `make slowest-tests`: `pytest -p paceline_harness.slowest.plugin`.

For each test: seconds, processor seconds of the test process and of all processes that it started,
and the lines of tests and harness at which it stood longest. Works with pytest-xdist.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline_harness.slowest.places import Places

_ATTRIBUTE = "paceline_cost"


@dataclass(slots=True)
class Cost:
    """What was spent, in seconds; `own_s` and `children_s` are processor time."""

    wall_s: float = 0.0
    own_s: float = 0.0
    children_s: float = 0.0
    places: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def wait_s(self) -> float:
        """Time in which neither the test nor what it started can have been the cause."""
        return max(0.0, self.wall_s - self.own_s - self.children_s)

    def add(self, other: Cost) -> None:
        """Add what was spent elsewhere."""
        self.wall_s += other.wall_s
        self.own_s += other.own_s
        self.children_s += other.children_s
        for place, seconds in other.places.items():
            self.places[place] += seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--slowest`."""
    parser.addoption("--slowest", type=int, default=40, help="rows of the table of tests")


def pytest_configure(config: pytest.Config) -> None:
    """Measure in processes that run tests, collect in the one that reports."""
    if not config.getoption("numprocesses", None):
        config.pluginmanager.register(Measuring(config.rootpath / "tests"))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Table(int(config.getoption("slowest") or 0)))


class Measuring:
    """Attaches the cost of each phase to its report."""

    def __init__(self, tests: Path) -> None:
        self._places = Places(tests)
        self._process = psutil.Process()
        self._fixtures: dict[str, list[float]] = {}

    def pytest_sessionstart(self) -> None:
        """Begin to look at what tests do."""
        self._places.start()

    def pytest_sessionfinish(self) -> None:
        """End the thread."""
        self._places.stop()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """Note how long a fixture takes; those that it needs are set up before."""
        began = time.perf_counter()
        try:
            return (yield)
        finally:
            entry = self._fixtures.setdefault(fixturedef.argname, [0.0, 0])
            entry[0] += time.perf_counter() - began
            entry[1] += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        """Begin a test."""
        self._wall, self._own, self._children = self._now()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach what this phase has cost."""
        report = yield
        wall, own, children = self._now()
        places = self._places.take()
        spent = [wall - self._wall, own - self._own, max(0.0, children - self._children)]
        fixtures, self._fixtures = self._fixtures, {}
        setattr(report, _ATTRIBUTE, {"spent": spent, "places": places, "fixtures": fixtures})
        self._wall, self._own, self._children = wall, own, children
        return report

    def _now(self) -> tuple[float, float, float]:
        own = self._process.cpu_times()
        children = own.children_user + own.children_system
        for process in self._process.children(recursive=True):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            children += times.user + times.system + times.children_user + times.children_system
        return time.perf_counter(), own.user + own.system, children


class Table:
    """Adds up reports, and prints tables at the end."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._tests: defaultdict[str, Cost] = defaultdict(Cost)
        self._modules: defaultdict[str, Cost] = defaultdict(Cost)
        self._fixtures: defaultdict[str, Cost] = defaultdict(Cost)
        self._uses: defaultdict[str, int] = defaultdict(int)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the cost of a phase."""
        cost: dict[str, Any] | None = getattr(report, _ATTRIBUTE, None)
        if cost is None:
            return
        places = defaultdict(float, cost["places"])
        for row in (self._tests[report.nodeid], self._modules[report.nodeid.partition("::")[0]]):
            row.add(Cost(*cost["spent"], places=places))
        for name, (seconds, times) in cost["fixtures"].items():
            self._fixtures[name].wall_s += seconds
            self._uses[name] += int(times)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print tests, modules and fixtures, longest first."""
        write = terminalreporter.write_line
        for title, costs, rows in (
            ("tests", self._tests, self._rows),
            ("modules", self._modules, self._rows),
        ):
            terminalreporter.section(f"slowest {title}")
            write("seconds   own CPU  children   waiting  where the time went")
            for name, cost in _longest(costs.items(), rows):
                spent = (cost.own_s, cost.children_s, cost.wait_s)
                write(f"{cost.wall_s:7.1f}{''.join(f'{each:10.1f}' for each in spent)}  {name}")
                for place, seconds in sorted(cost.places.items(), key=lambda item: -item[1])[:3]:
                    if seconds > cost.wall_s / 20:
                        write(f"{'':38}  {seconds:6.1f} at {place}")
        terminalreporter.section("slowest fixtures")
        write("seconds     times  fixture")
        for name, cost in _longest(self._fixtures.items(), self._rows):
            write(f"{cost.wall_s:7.1f} {self._uses[name]:9}  {name}")
        total = Cost()
        for cost in self._modules.values():
            total.add(cost)
        write(
            f"{total.wall_s:.0f} s in all: {total.own_s:.0f} s of processor time of tests,"
            f" {total.children_s:.0f} s of what they started, {total.wait_s:.0f} s waiting"
        )


def _longest(costs: Iterable[tuple[str, Cost]], rows: int) -> list[tuple[str, Cost]]:
    return sorted(costs, key=lambda item: -item[1].wall_s)[:rows]
