"""What a job names of its own code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.config import JobSpec
from paceline.config.job import RewardSpec

FUNCTION = "function"  # the option of the reward `python`
_MOST_NAMED = 20


def own_function(part: RewardSpec) -> tuple[str, str] | None:
    """The `module:attribute` that a reward part calls and the field that names it, if it does."""
    if ":" in part.kind:
        return "kind", part.kind
    target = part.options.get(FUNCTION) if part.kind == "python" else None
    return ("options.function", target) if isinstance(target, str) else None


def missing_modules(spec: JobSpec, names: Sequence[str]) -> Iterator[str]:
    """A line for each module that the job names and that is not among the files of its code."""
    files = set(names)
    for index, part in enumerate(spec.reward):
        if (found := own_function(part)) is None:
            continue
        field, target = found
        module = target.partition(":")[0]
        path = module.replace(".", "/")
        if not files & {f"{path}.py", f"{path}/__init__.py"}:
            there = sorted(name for name in files if name.endswith(".py"))
            listed = ", ".join(there[:_MOST_NAMED]) or "none"
            yield (
                f"reward.{index}.{field}: module {module!r} is not in the job's code; "
                f"Python files in it: {listed}"
            )
