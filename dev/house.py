"""Measures the proportions of a tree: size, rooms, promises, words; compare two with --json.

    python dev/house.py [--root TREE] [--details] [--json FILE]

* **Lines** are those of Python files, blank ones included. *Shipped*: `shared/` and `services/`;
  *handwritten*: without `shared/paceline/v1` and `front/client/operations.py`.
* **RL** is what `RL` below lists: methods, environments, rewards, data, the trainer's step, the
  engines, and generation: episodes, which task next, how many, which group is kept, what it is
  worth.
* **Rooms** of the library are the folders and modules of `shared/paceline`, without former names
  of modules that are kept for a release. An *arrow* is an import
  between two rooms, counted once, those for type checkers and inside functions included. *Floors*:
  rooms on the longest chain of arrows, where a cycle of rooms counts as one.
* **Pairs** are rooms of one service, or of the library, that import each other directly.
* **Child processes**: a *program* is a module that runs as a script, whose name ends in `child` or
  that imports `KIT`, a source given to `-c`, or a fork of `multiprocessing`; services, the command
  line and scripts for people are none. Its *starters* are modules that name it in a string. A
  *protocol* is a way to call functions in a program: all programs that import `KIT` have the same
  one, whose other half is beside it; of any other program it is assumed that it has its own. The
  lines are those of programs and starters; those of the kit, which both share, are in a row of
  their own.
* **Sources per method**: modules `options.py` below `methods/`, and entry points
  `paceline.options.*` of `pyproject.toml` that point into the library.
* **Tests**: the *harness* is `tests/support/`; the *Kubernetes double* is a distribution of its
  own, whose tests count as tests too.
* **Messages**: modules that import `paceline.v1.*_pb2` (not the stubs, `_pb2_grpc`) but are neither
  `servicer.py`, `wire.py` nor in `api/` or `routes/`; and those of them that the contract in
  `pyproject.toml` does not list.
* **Handlers and patches**: see `dev/promises.py`.
* **Dialect**: see `dev/english.py`; of its names only the variables.
* **Walk**: calls that pass a job's spec on, from `JobService.submit`. A *stop* is the call of a
  function of the tree with an argument that is the spec or a part of it; callees of methods are
  looked up by the class that the attribute is annotated with, or by a name that only one class has.
  A *return* is a stop in a module that the walk had left. Calls are followed depth first in the
  order of the source, every function once.

The minutes of `.ci/run` are measured by running it.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from english import VAGUE, Lapse, subjectless, vague
from modules import LIBRARY, ROOT, Module, resolved, shipped, tests
from promises import broad_handlers, own_patches
from walk import walk

RL = (
    *(f"shared/paceline/{room}/" for room in ("methods", "environments", "rewards")),
    *(f"shared/paceline/{room}/" for room in ("data", "generation")),
    "services/paceline_trainer/step/",
    "services/paceline_rollout/engines/",
    *(f"services/paceline_environment/{room}/" for room in ("episodes", "rollouts", "worlds")),
    *(f"services/paceline_experience/ledger/{room}/" for room in ("generation", "advantages")),
    *(f"services/paceline_experience/ledger/{room}/" for room in ("filters", "replay")),
)
HARNESS = "tests/support/"
DOUBLE = "tests/kubernetes-double/"
CONTRACT = "Messages stay at the edge"
KIT = "paceline.isolation.child"
_KIT_FOLDER = f"shared/{KIT.rpartition('.')[0].replace('.', '/')}"
_NO_PROGRAMS = (
    "paceline.front.cli.",
    "paceline.platform.server.issue_keys",
    "paceline_trainer.smoke_test",
)
_FORKS = ("multiprocessing.get_context", "multiprocessing.Process")


@dataclass(frozen=True)
class Row:
    """One measured thing; `details` name what was counted."""

    name: str
    value: float | str
    details: list[str] = field(default_factory=list[str])


class Tree:
    """The modules of a checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.shipped = shipped(root)
        self.written = [module for module in self.shipped if not module.is_generated]
        self.tests = tests(root)
        self.names = {module.name for module in self.shipped if not module.keeps_old_name}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Modules that each shipped module imports."""
        return resolved(self.shipped)

    @cached_property
    def project(self) -> dict[str, Any]:
        """The parsed `pyproject.toml`."""
        return tomllib.loads((self.root / "pyproject.toml").read_text())

    def room(self, name: str) -> tuple[str, str]:
        """Package and room of a module: `("paceline", "weights")`."""
        package, _, rest = name.partition(".")
        return package, rest.partition(".")[0]

    def arrows(self) -> set[tuple[tuple[str, str], tuple[str, str]]]:
        """Pairs of rooms of one package of which the first imports the second."""
        pairs = {
            (self.room(source), self.room(target))
            for source, targets in self.imports.items()
            for target in targets
            if {source, target} <= self.names
        }
        return {(a, b) for a, b in pairs if a != b and a[0] == b[0] and a[1] and b[1]}


def main() -> int:
    """Print the rows, or write them."""
    parser = argparse.ArgumentParser(description="Measures the proportions of a tree.")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--details", action="store_true", help="name what was counted")
    parser.add_argument("--json", type=Path, help="write rows with details to a file")
    arguments = parser.parse_args()
    tree = Tree(arguments.root)
    rows = [row for measure in MEASURES for row in measure(tree)]
    for row in rows:
        print(f"{row.name:64} {row.value:>10}")
        if arguments.details:
            print("".join(f"    {line}\n" for line in row.details), end="")
    if arguments.json:
        values = {row.name: {"value": row.value, "details": row.details} for row in rows}
        arguments.json.write_text(json.dumps(values, indent=2) + "\n")
    return 0


def _sizes(tree: Tree) -> Iterator[Row]:
    total = _lines(tree.written)
    learning = _lines(module for module in tree.written if module.place.startswith(RL))
    yield Row("handwritten shipped lines", total)
    yield Row("share that is RL, %", round(100 * learning / total, 1), [f"{learning} lines"])


def _rooms(tree: Tree) -> Iterator[Row]:
    rooms = sorted({tree.room(name)[1] for name in tree.names if tree.room(name)[0] == LIBRARY})
    arrows = [(a[1], b[1]) for a, b in tree.arrows() if a[0] == LIBRARY]
    rooms = [room for room in rooms if room]
    yield Row("library: rooms", len(rooms), rooms)
    yield Row("library: floors", _floors(rooms, arrows))
    yield Row("library: arrows", len(arrows), sorted(f"{a} -> {b}" for a, b in arrows))


def _floors(rooms: list[str], arrows: list[tuple[str, str]]) -> int:
    """Rooms on the longest chain, with rooms of one cycle as one."""
    reach = {room: _reached(room, arrows) for room in rooms}

    def below(room: str) -> set[str]:
        return {other for other in reach[room] if room not in reach[other]}

    depth: dict[str, int] = {}
    for room in sorted(rooms, key=lambda room: len(below(room))):
        depth[room] = 1 + max((depth[other] for other in below(room)), default=0)
    return max(depth.values(), default=0)


def _reached(room: str, arrows: list[tuple[str, str]]) -> set[str]:
    reached: set[str] = set()
    ahead = [room]
    while ahead:
        here = ahead.pop()
        for source, target in arrows:
            if source == here and target not in reached:
                reached.add(target)
                ahead.append(target)
    return reached - {room}


def _pairs(tree: Tree) -> Iterator[Row]:
    arrows = tree.arrows()
    pairs = sorted(f"{a[0]}: {a[1]}, {b[1]}" for a, b in arrows if (b, a) in arrows and a < b)
    yield Row("pairs of rooms that import each other", len(pairs), pairs)


def _experience(tree: Tree) -> Iterator[Row]:
    package = "paceline_experience"
    modules = [module for module in tree.written if tree.room(module.name)[0] == package]
    yield Row("experience: lines", _lines(modules))
    sizes = Counter[str]()
    for module in modules:
        sizes[tree.room(module.name)[1]] += module.num_lines
    for room, lines in sizes.most_common():
        yield Row(f"experience: lines of {room or '__init__'}", lines)


def _children(tree: Tree) -> Iterator[Row]:
    programs = dict(sorted(_programs(tree)))
    speaks = {name for name in programs if KIT in tree.imports.get(name, ())}
    kit = [module for module in tree.written if _is_in_kit(module)]
    named = {name for program, starters in programs.items() for name in (program, *starters)}
    details = [
        f"{f'{KIT}: ' if program in speaks else ''}{program} <- {', '.join(starters)}"
        for program, starters in programs.items()
    ]
    yield Row("programs of child processes", len(programs), details)
    own = [program for program in programs if program not in speaks]
    protocols = [*own, KIT] if speaks else own
    yield Row("protocols of child processes", len(protocols), protocols)
    lines = _lines(module for module in tree.written if module.name in named)
    yield Row("protocols of child processes: lines of programs and starters", lines)
    yield Row("protocols of child processes: lines of the kit", _lines(kit))


def _programs(tree: Tree) -> Iterator[tuple[str, list[str]]]:
    named: dict[str, set[str]] = {}
    for module in tree.written:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.setdefault(node.value, set()).add(module.name)
    for module in tree.written:
        if _is_in_kit(module):
            continue
        if _is_program(module) or KIT in tree.imports.get(module.name, ()):
            file = module.place.rpartition("/")[2]
            starters = named.get(module.name, set()) | named.get(file, set())
            yield module.name, sorted(starters - {module.name})
        if '"-c"' in module.text:
            yield f"{module.name}:-c", [module.name]
        if any(fork in module.text for fork in _FORKS):
            yield f"{module.name}:fork", [module.name]


def _is_in_kit(module: Module) -> bool:
    """Whether a module is one of the kit itself, not in a folder beside its modules."""
    return module.place.rpartition("/")[0] == _KIT_FOLDER


def _is_program(module: Module) -> bool:
    if module.keeps_old_name or module.name.startswith(_NO_PROGRAMS):
        return False
    if module.name.endswith("__main__"):
        return False
    return '__name__ == "__main__"' in module.text or module.name.endswith(("_child", ".child"))


def _methods(tree: Tree) -> Iterator[Row]:
    options = [
        module.name
        for module in tree.written
        if module.name.startswith(f"{LIBRARY}.methods.") and module.name.endswith(".options")
    ]
    groups: dict[str, dict[str, str]] = tree.project["project"].get("entry-points", {})
    second = [
        f"{group}: {name}"
        for group, entries in groups.items()
        for name, target in entries.items()
        if group.startswith("paceline.options.") and target.startswith(f"{LIBRARY}.")
    ]
    yield Row("methods: modules options.py", len(options), options)
    yield Row("methods: second entry points", len(second), second)


def _tests(tree: Tree) -> Iterator[Row]:
    harness = [module for module in tree.tests if module.place.startswith(HARNESS)]
    yield Row("tests: lines", _lines(tree.tests))
    yield Row("tests: lines of the harness", _lines(harness))
    double = [module for module in tree.tests if module.place.startswith(DOUBLE)]
    parts = [module for module in double if not module.place.startswith(f"{DOUBLE}tests/")]
    details = [f"{_lines(double) - _lines(parts)} lines of its own tests"]
    yield Row("tests: lines of the Kubernetes double", _lines(parts), details)
    patches = [patch for module in tree.tests for patch in own_patches(module)]
    details = [f"{patch.place}:{patch.line}: {patch.target}" for patch in patches]
    yield Row("tests: patches of our own code", len(patches), details)


def _handlers(tree: Tree) -> Iterator[Row]:
    handlers = [handler for module in tree.written for handler in broad_handlers(module)]
    silent = [item for item in handlers if not (item.logs or item.raises or item.names_boundary)]
    yield Row("handlers of all exceptions", len(handlers))
    details = [f"{item.place}:{item.line}" for item in silent]
    yield Row("handlers that neither log, raise nor name a boundary", len(silent), details)


def _messages(tree: Tree) -> Iterator[Row]:
    importers = sorted(name for name, to in tree.imports.items() if any(map(_is_message, to)))
    inside = [name for name in importers if not name.startswith(f"{LIBRARY}.v1")]
    outside = [name for name in inside if not _is_edge(name)]
    listed = _listed(tree)
    unlisted = [name for name in outside if not any(_is_in(name, package) for package in listed)]
    yield Row("modules beyond the edge that import messages", len(outside), outside)
    yield Row("modules that import messages and are not listed", len(unlisted), unlisted)


def _is_message(name: str) -> bool:
    return name.startswith(f"{LIBRARY}.v1.") and name.endswith("_pb2")


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _is_edge(name: str) -> bool:
    parts = name.split(".")
    return parts[-1] in ("servicer", "wire") or bool({"api", "routes"} & set(parts[:-1]))


def _listed(tree: Tree) -> list[str]:
    contracts = tree.project["tool"]["importlinter"]["contracts"]
    return [
        name
        for contract in contracts
        if contract["name"] == CONTRACT
        for name in contract["allowed_importers"]
    ]


def _words(tree: Tree) -> Iterator[Row]:
    docstrings = [lapse for module in tree.written for lapse in subjectless(module)]
    names = [lapse for module in tree.written for lapse in vague(module) if lapse.text in VAGUE]
    yield Row("dialect: docstrings without a subject", len(docstrings), _shown(docstrings))
    yield Row("dialect: vague variables", len(names), _shown(names))


def _shown(lapses: list[Lapse]) -> list[str]:
    return [f"{lapse.place}:{lapse.line}: {lapse.text}" for lapse in lapses]


def _walk(tree: Tree) -> Iterator[Row]:
    stops = walk(tree.written, "JobService", "submit", "spec")
    modules: list[str] = []
    returns = 0
    for stop in stops:
        if modules and stop.module == modules[-1]:
            continue
        returns += stop.module in modules
        modules.append(stop.module)
    yield Row("walk of a spec: stops", len(stops), [str(stop) for stop in stops])
    yield Row("walk of a spec: modules", len(set(modules)))
    yield Row("walk of a spec: returns", returns)


def _lines(modules: Iterable[Module]) -> int:
    return sum(module.num_lines for module in modules)


MEASURES: tuple[Callable[[Tree], Iterator[Row]], ...] = (
    *(_sizes, _rooms, _pairs, _experience, _children, _methods),
    *(_tests, _handlers, _messages, _words, _walk),
)

if __name__ == "__main__":
    sys.exit(main())
