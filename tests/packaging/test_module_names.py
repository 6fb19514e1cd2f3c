"""Modules that sources name as strings, such as programs of child processes, exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("shared", "services", "deploy", "dev", "benchmarks", "tests")
DOTTED = re.compile(r"paceline(_\w+)?(\.[A-Za-z_]\w*){2,}")
NO_MODULES = ("paceline.options.", "paceline.example.")  # groups of entry points, and a domain


def _trees() -> Iterator[ast.Module]:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            yield ast.parse(path.read_text())


def _named(tree: ast.Module) -> Iterator[str]:
    """Names with at least three parts: those with two may be groups, fields or files."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            if DOTTED.fullmatch(name) and _exists(name.partition(".")[0]):
                yield name


def _programs(tree: ast.Module) -> Iterator[str]:
    """What follows `-m` in a command."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            for flag, module in pairwise(node.elts):
                if ast.unparse(flag) == "'-m'" and isinstance(module, ast.Constant):
                    yield str(module.value)


def _exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_what_is_named_in_strings_is_a_module_or_in_one() -> None:
    names = {name for tree in _trees() for name in _named(tree) if not name.startswith(NO_MODULES)}
    assert sum(map(_exists, names)) > 20
    assert any(name.endswith("child") for name in names)
    assert not [n for n in names if not _exists(n) and not _exists(n.rpartition(".")[0])]


def test_programs_that_are_started_exist() -> None:
    names = {name for tree in _trees() for name in _programs(tree)}
    own = {name for name in names if name.startswith("paceline")}
    assert len(own) > 2
    assert not [name for name in own if not _exists(name)]


@pytest.mark.parametrize("group", ["paceline.plugins", "paceline.methods", "paceline.environments"])
def test_modules_of_entry_points_exist(group: str) -> None:
    modules = [point.module for point in entry_points(group=group) if point.module]
    own = [module for module in modules if module.startswith("paceline.")]
    assert len(own) > 5
    assert not [module for module in own if not _exists(module)]
