"""Sizes that keep the code readable; the limits are those of CONTRIBUTING."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for folder in ("shared", "services", "examples", "benchmarks", "deploy")
    for path in (ROOT / folder).rglob("*.py")
    if "v1" not in path.parts
)


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    assert path.read_text().count("\n") <= 450
    for node in functions(path):
        assert (node.end_lineno or 0) - node.lineno < 70, node.name
        beyond_two = len(node.args.args) - 2
        if path.parts[-2] != "benchmarks":
            assert beyond_two <= 7, f"{node.name}: make parameters keyword-only"


def test_most_functions_are_short() -> None:
    lengths = sorted(
        (node.end_lineno or 0) - node.lineno + 1 for path in SOURCES for node in functions(path)
    )
    assert lengths[len(lengths) // 2] <= 10
    assert lengths[len(lengths) * 9 // 10] <= 35
