"""Python modules of a tree as syntax trees, with their imports: for scripts that check a tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "paceline"
GENERATED = ("shared/paceline/v1/", "shared/paceline/front/client/operations.py")


@dataclass(frozen=True)
class Module:
    """One source file; `name` is dotted and without `__init__`, `place` relative to the tree."""

    name: str
    place: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text)

    @property
    def num_lines(self) -> int:
        """Lines, with those that are empty."""
        return self.text.count("\n")

    @property
    def is_generated(self) -> bool:
        """Whether a script wrote it."""
        return self.place.startswith(GENERATED)

    @property
    def keeps_old_name(self) -> bool:
        """Whether it only makes a module importable by a former name, for a release."""
        return (ast.get_docstring(self.tree) or "").startswith("Former name of ")

    @property
    def imported(self) -> set[str]:
        """Dotted names after `import` and `from … import`, those for type checkers included."""
        return set(self._imported())

    def _imported(self) -> Iterator[str]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def shipped(root: Path) -> list[Module]:
    """Modules of the library and of the services, generated ones included."""
    return [*_below(root, "shared"), *_below(root, "services")]


def tests(root: Path) -> list[Module]:
    """Modules of the tests and of their harness."""
    return _below(root, "tests")


def _below(root: Path, folder: str) -> list[Module]:
    return [_module(path, root, folder) for path in sorted((root / folder).rglob("*.py"))]


def _module(path: Path, root: Path, folder: str) -> Module:
    parts = path.relative_to(root / folder).with_suffix("").parts
    name = ".".join(part for part in parts if part != "__init__")
    return Module(name, path.relative_to(root).as_posix(), path.read_text())


def resolved(modules: list[Module]) -> dict[str, set[str]]:
    """Modules that each module of the list imports from the list, by name."""
    names = {module.name for module in modules}
    return {module.name: _targets(module, names) for module in modules}


def _targets(module: Module, names: set[str]) -> set[str]:
    targets: set[str] = set()
    for name in module.imported:
        if name in names:
            targets.add(name)
        elif (parent := name.rpartition(".")[0]) in names:
            targets.add(parent)
    return targets - {module.name}
