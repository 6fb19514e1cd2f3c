"""What a job names of its own code."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

from paceline.config import JobSpec
from paceline.config.named import named_function, own_ledger_parts, own_transform

_MOST_NAMED = 20


def own_targets(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Fields of a job and the `module:attribute` of its code that they name."""
    if spec.has_own_environment:
        yield "tasks.environment", spec.tasks.environment
    if (transform := own_transform(spec)) is not None:
        yield "tasks.transform.kind", transform.kind
    for index, part in enumerate(spec.reward):
        if (found := named_function(part)) is not None:
            yield f"reward.{index}.{found[0]}", found[1]
    for each in own_ledger_parts(spec):
        yield each.field, each.name


def missing_modules(targets: Iterable[tuple[str, str]], names: Sequence[str]) -> Iterator[str]:
    """A line for each module of `own_targets` that is not among the files of the code.

    And for each that would be hidden by one of Python or Paceline.
    """
    files = set(names)
    roots = {name.partition("/")[0].removesuffix(".py") for name in files if name.endswith(".py")}
    for name in sorted(roots & (sys.stdlib_module_names | {"paceline"})):
        yield f"code: {name!r} is a module that Python or Paceline has; rename it"
    for field, target in targets:
        module = target.partition(":")[0]
        path = module.replace(".", "/")
        if not files & {f"{path}.py", f"{path}/__init__.py"}:
            there = sorted(name for name in files if name.endswith(".py"))
            listed = ", ".join(there[:_MOST_NAMED]) or "none"
            yield (
                f"{field}: module {module!r} is not in the job's code; Python files in it: {listed}"
            )
