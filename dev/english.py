"""Reports docstrings without a subject, and names that do not say what they hold.

    python dev/english.py [--root TREE] [--write]

* A docstring begins with its noun or verb, never with a word of `SUBJECTLESS`.
* No variable is called by a word of `VAGUE`, and no function by one of them with an underscore or
  by a word of `PARTICIPLES`. A name counts once per function, or per module.

`dev/english.json` has the numbers of the folders that are not clean yet; all other folders have to
be. Numbers may only fall: `--write` records the present ones, unless there are more in all.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modules import ROOT, Module, shipped

SUBJECTLESS = ("Those", "Of", "As", "What")
VAGUE = ("found", "each", "told", "made", "given")
PARTICIPLES = ("_said", "_gone", "_listed", *(f"_{word}" for word in VAGUE))
ALLOWED = "dev/english.json"
SCRIPT = "dev/english.py"
_DEPTH = 3  # folders below the root, such as services/paceline_gateway/http
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Lapse:
    """A docstring or a name that breaks a rule."""

    place: str
    line: int
    rule: str
    """`docstrings` or `names`."""
    text: str

    @property
    def folder(self) -> str:
        """Folder whose numbers count it."""
        return "/".join(self.place.split("/")[:-1][:_DEPTH])


def main() -> int:
    """Print what exceeds the numbers of its folder; returns 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree (default: this one)")
    parser.add_argument("--write", action="store_true", help=f"record the numbers in {ALLOWED}")
    arguments = parser.parse_args()
    root: Path = arguments.root
    lapses = [lapse for module in shipped(root) for lapse in lapses_of(module)]
    counts = Counter((lapse.folder, lapse.rule) for lapse in lapses)
    allowed = _read(root / ALLOWED)
    if arguments.write:
        return _write(root / ALLOWED, counts, allowed)
    lines = list(_exceeding(lapses, counts, allowed))
    for line in lines:
        print(line)
    return 1 if lines else 0


def lapses_of(module: Module) -> Iterator[Lapse]:
    """Lapses of a module; none if it is generated."""
    if not module.is_generated:
        yield from subjectless(module)
        yield from vague(module)


def subjectless(module: Module) -> Iterator[Lapse]:
    """Docstrings of modules, classes and functions that begin with a word of `SUBJECTLESS`."""
    documented = (ast.Module, ast.ClassDef, *_FUNCTIONS)
    for node in ast.walk(module.tree):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        if text and text.split()[0].rstrip(",.:") in SUBJECTLESS:
            line = getattr(node, "lineno", 1)
            yield Lapse(module.place, line, "docstrings", text.splitlines()[0])


def vague(module: Module) -> Iterator[Lapse]:
    """Variables of `VAGUE` and functions of `PARTICIPLES`, at the line of their scope."""
    names: set[tuple[int, str]] = set()

    def visit(node: ast.AST, scope: int) -> None:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            names.add((scope, node.id))
        if isinstance(node, _FUNCTIONS) and node.name in PARTICIPLES:
            names.add((node.lineno, node.name))
        for child in ast.iter_child_nodes(node):
            visit(child, child.lineno if isinstance(child, _FUNCTIONS) else scope)

    visit(module.tree, 1)
    for line, name in sorted(names):
        yield Lapse(module.place, line, "names", name)


def _exceeding(
    lapses: list[Lapse], counts: Counter[tuple[str, str]], allowed: Counter[tuple[str, str]]
) -> Iterator[str]:
    for lapse in lapses:
        if counts[lapse.folder, lapse.rule] > allowed[lapse.folder, lapse.rule]:
            advice = "begin with the noun" if lapse.rule == "docstrings" else "say what it holds"
            yield f"{lapse.place}:{lapse.line}: {lapse.text}: {advice}"
    for (folder, rule), number in sorted((counts | allowed).items()):
        if counts[folder, rule] > allowed[folder, rule]:
            yield f"{folder}: {number} {rule}; at most {allowed[folder, rule]}"
        elif counts[folder, rule] < allowed[folder, rule]:
            now = counts[folder, rule]
            yield f"{folder}: {now} {rule}, not {number}; run python {SCRIPT} --write"


def _read(path: Path) -> Counter[tuple[str, str]]:
    numbers: dict[str, dict[str, int]] = json.loads(path.read_text())
    return Counter(
        {(folder, rule): n for folder, rules in numbers.items() for rule, n in rules.items()}
    )


def _write(path: Path, counts: Counter[tuple[str, str]], allowed: Counter[tuple[str, str]]) -> int:
    if counts.total() > allowed.total():
        print(f"{path}: {counts.total()} lapses in all; at most {allowed.total()}")
        return 1
    numbers: dict[str, dict[str, int]] = {}
    for (folder, rule), number in sorted(counts.items()):
        numbers.setdefault(folder, {})[rule] = number
    path.write_text(json.dumps(numbers, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
