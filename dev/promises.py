"""Reports code that breaks promises of CONTRIBUTING which neither ruff nor import-linter can check.

* `except Exception` (or broader) stands only at a supervisor boundary, whose line says so with the
  comment `# the supervisor boundary of …`, and which logs the error, raises it or hands it on; or
  where something is put away and the same error raised again. Code of plug-ins runs inside
  `paceline.errors.plugin_boundary`.
* Tests never replace a part of our own code with `monkeypatch.setattr`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from modules import ROOT, Module, shipped, tests

BOUNDARY = "the supervisor boundary of "
PLUGINS = "paceline.errors.plugin_boundary"
OWN = ("paceline", "paceline_", "kubernetes_double")
_BROAD = {"Exception", "BaseException"}
_LOGS = {"exception", "error", "warning", "info", "debug", "print_exc"}


@dataclass(frozen=True)
class Handler:
    """An `except` clause for all errors, and what it does with them."""

    place: str
    line: int
    logs: bool
    raises: bool
    raises_again: bool
    hands_on: bool
    names_boundary: bool


@dataclass(frozen=True)
class Patch:
    """A call of `monkeypatch.setattr`; `target` is its first argument as written."""

    place: str
    line: int
    target: str


def main() -> int:
    """Print violations; returns 1 if there are any."""
    code = [module for module in shipped(ROOT) if not module.is_generated]
    lines = [*_unnamed(code), *_patched()]
    for line in lines:
        print(line)
    return 1 if lines else 0


def _unnamed(code: list[Module]) -> Iterator[str]:
    for module in code:
        for handler in broad_handlers(module):
            where = f"{handler.place}:{handler.line}"
            if handler.raises_again:
                continue
            if not handler.names_boundary:
                yield f"{where}: catch what can happen, use {PLUGINS} or say `# {BOUNDARY}…`"
            elif not (handler.logs or handler.raises or handler.hands_on):
                yield f"{where}: log the error, raise it or hand it on"


def _patched() -> Iterator[str]:
    for module in tests(ROOT):
        for patch in own_patches(module):
            yield f"{patch.place}:{patch.line}: {patch.target} is ours: make it an argument"


def broad_handlers(module: Module) -> Iterator[Handler]:
    """Handlers of `Exception`, `BaseException`, tuples with one of them, and bare ones."""
    lines = module.text.splitlines()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
            inside = [child for statement in node.body for child in ast.walk(statement)]
            yield Handler(
                place=module.place,
                line=node.lineno,
                logs=any(_logs(child) for child in inside),
                raises=any(isinstance(child, ast.Raise) for child in inside),
                raises_again=isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None,
                hands_on=any(
                    isinstance(child, ast.Name) and child.id == node.name for child in inside
                ),
                names_boundary=BOUNDARY in lines[node.lineno - 1],
            )


def _is_broad(kind: ast.expr | None) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(_is_broad(element) for element in kind.elts)
    return kind is None or (isinstance(kind, ast.Name) and kind.id in _BROAD)


def _logs(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _LOGS
        and ast.unparse(node.func.value).endswith(("log", "traceback"))
    )


def own_patches(module: Module) -> Iterator[Patch]:
    """Calls of `monkeypatch.setattr` but on what is imported from elsewhere.

    A target that is neither imported nor a dotted string, such as a local variable, counts as ours.
    """
    imported = dict(_origins(module.tree))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("monkeypatch.setattr"):
            target = ast.unparse(node.args[0])
            if _is_own(node.args[0], imported):
                yield Patch(module.place, node.lineno, target)


def _origins(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname or alias.name.partition(".")[0]), alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _is_own(target: ast.expr, imported: dict[str, str]) -> bool:
    if isinstance(target, ast.Constant):
        origin = str(target.value)
    else:
        root = target
        while isinstance(root, ast.Attribute):
            root = root.value
        origin = imported.get(ast.unparse(root), OWN[0])
    package = origin.partition(".")[0]
    return package == OWN[0] or package.startswith(OWN[1:])


if __name__ == "__main__":
    sys.exit(main())
