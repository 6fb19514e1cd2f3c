"""Reports sizes beyond the limits in CONTRIBUTING, and ambiguous class names."""

from __future__ import annotations

import ast
import gc
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOUBLE = "tests/kubernetes-double/kubernetes_double"
FOLDERS = ("benchmarks", "deploy", "dev", "examples", "services", "shared", "tests/support", DOUBLE)
SHIPPED = ("services", "shared")
GENERATED = ROOT / "shared" / "paceline" / "v1"
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70
MAX_POSITIONAL = 9
MAX_MEDIAN_LINES = 10
MAX_NINTH_DECILE_LINES = 35
MAX_MODULES_OF_A_FOLDER = 20
MAX_CLASS_LINES = 350
MAX_CONSTRUCTOR_ARGUMENTS = 12
# Classes that still exceed a limit. Nothing may be added, and what no longer exceeds it goes.
LONG_CLASSES = frozenset(
    {
        "Broadcast",
        "JobLedger",
        "JobStore",
        "KubernetesRuntime",
        "Leases",
        "Reconciler",
        "SglangEngine",
        "Trainer",
        "TrainerService",
    }
)
WIDE_CONSTRUCTORS = frozenset({"ProcessRuntime", "SimulatedEngine", "TorchEngine"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> int:
    """Print violations; returns 1 if there are any."""
    gc.disable()  # it would walk the trees of all files again and again
    sources = sorted(
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if GENERATED not in path.parents
    )
    functions = {path: _functions(path) for path in sources}
    lengths = sorted(_lines(node) for nodes in functions.values() for node in nodes)
    found = [*_folders(sources), *_overall(lengths), *_names(sources), *_classes(sources)]
    for path, nodes in functions.items():
        found += _of_file(path, nodes)
    for line in found:
        print(line)
    return 1 if found else 0


def _functions(path: Path) -> list[Function]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def _lines(node: Function) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def _of_file(path: Path, functions: list[Function]) -> Iterator[str]:
    place = path.relative_to(ROOT)
    lines = path.read_text().count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{place}: {lines} lines; at most {MAX_FILE_LINES}"
    for node in functions:
        if _lines(node) > MAX_FUNCTION_LINES:
            yield f"{place}:{node.lineno}: {node.name}: at most {MAX_FUNCTION_LINES} lines"
        if len(node.args.args) > MAX_POSITIONAL and path.parts[-2] != "benchmarks":
            yield f"{place}:{node.lineno}: {node.name}: make parameters keyword-only"


def _folders(sources: list[Path]) -> Iterator[str]:
    folders = {path.parent for path in sources}
    for folder in sorted(folders):
        modules = [p for p in sources if p.parent == folder and not p.name.startswith("__")]
        if len(modules) > MAX_MODULES_OF_A_FOLDER:
            place = folder.relative_to(ROOT)
            yield f"{place}: {len(modules)} modules; at most {MAX_MODULES_OF_A_FOLDER}"


def _classes(sources: list[Path]) -> Iterator[str]:
    long, wide = set[str](), set[str]()
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            place = f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
            if (node.end_lineno or 0) - node.lineno + 1 > MAX_CLASS_LINES:
                long.add(node.name)
                if node.name not in LONG_CLASSES:
                    yield f"{place}: at most {MAX_CLASS_LINES} lines"
            if _constructor_arguments(node) > MAX_CONSTRUCTOR_ARGUMENTS:
                wide.add(node.name)
                if node.name not in WIDE_CONSTRUCTORS:
                    yield f"{place}: at most {MAX_CONSTRUCTOR_ARGUMENTS} arguments"
    for name in sorted((LONG_CLASSES - long) | (WIDE_CONSTRUCTORS - wide)):
        yield f"class {name} keeps to the limits: take it off its list in dev/budgets.py"


def _constructor_arguments(node: ast.ClassDef) -> int:
    """Number of arguments of `__init__`; 0: it has none, as that of a record."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name == "__init__":
            return len(child.args.posonlyargs + child.args.args + child.args.kwonlyargs) - 1
    return 0


def _names(sources: list[Path]) -> Iterator[str]:
    """Class names in shipped code; tests may name their fakes freely."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sources:
        place = path.relative_to(ROOT)
        if place.parts[0] in SHIPPED:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{place}:{node.lineno}")
    for name, found in sorted(places.items()):
        if len(found) > 1:
            yield f"class {name} means {len(found)} things: {', '.join(found)}"


def _overall(lengths: list[int]) -> Iterator[str]:
    for share, most in ((0.5, MAX_MEDIAN_LINES), (0.9, MAX_NINTH_DECILE_LINES)):
        if (seen := lengths[int(len(lengths) * share)]) > most:
            yield f"{share:.0%} of the functions have up to {seen} lines; at most {most}"


if __name__ == "__main__":
    sys.exit(main())
