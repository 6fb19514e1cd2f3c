"""Puts the files of examples/plugins into docs/plugins, as a complete example on each page."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "plugins"
EXAMPLE = ROOT / "examples" / "plugins"
BEGIN = "<!-- example: written by dev/plugin_pages.py -->\n"
END = "<!-- end of example -->\n"
LANGUAGES = {".py": "python", ".yaml": "yaml"}
INSTALL = """\
[`examples/plugins`](../../examples/plugins) is a distribution with this and the other examples.
Copy it, keep what you need, and install it:

```sh
.venv/bin/pip install ./examples/plugins
.venv/bin/python -m pytest examples/plugins/tests
.venv/bin/paceline plugins
```
"""


@dataclass(frozen=True, slots=True)
class Example:
    """What a page shows: files, the use in a job file, and tests of the distribution."""

    sources: tuple[str, ...]
    job: str
    tests: tuple[str, ...] = ()


EXAMPLES = {
    "advantage": Example(
        ("advantage.py",),
        "experience: {advantage: {kind: batch_mean, limit: 2.0}}",
        ("advantage",),
    ),
    "allocator": Example(
        ("allocator.py",),
        "experience: {group_size: 8, allocator: {kind: second_try, temperature: 1.2}}",
        ("allocator",),
    ),
    "engine": Example(
        ("engine.py",), "rollout: {engine: {kind: metered, inner: torch}}", ("engine",)
    ),
    "environment": Example(
        ("copying/__init__.py", "copying/tasks.py", "copying/world.py"),
        "tasks: {environment: copying, options: {digits: 3}}\n"
        "eval: {every: 10, tasks: 100, options: {split: heldout}}\n"
        "reward: [environment]",
        ("environment",),
    ),
    "filter": Example(
        ("filter.py",), "experience: {filters: [{kind: solved, at_least: 1.0}]}", ("filter",)
    ),
    "objective": Example(
        ("surrogate.py", "options.py"),
        "trainer: {objective: {surrogate: {kind: capped, cap: 2.0}, corrections: []}}",
        ("surrogate",),
    ),
    "recipe": Example(
        (
            "rarity/__init__.py",
            "rarity/advantage.py",
            "rarity/correction.py",
            "rarity/recipe.yaml",
        ),
        "recipe: rarity",
        ("advantage", "correction"),
    ),
    "replay": Example(
        ("replay.py",),
        "experience: {replay: {kind: best, per_task: 4, pool_bytes: 16777216}}",
        ("replay",),
    ),
    "reward": Example(("reward.py",), "reward: [{kind: beginning, partial: 0.5}]", ("reward",)),
    "sampler": Example(("sampler.py",), "experience: {sampler: in_order}", ("sampler",)),
    "topology": Example(
        ("topology.py",), 'sampling: {topology: {kind: stripped, of: " \\n"}}', ("topology",)
    ),
    "tracker": Example(("tracker.py",), 'tracking: [{kind: csv, separator: ";"}]', ("tracker",)),
    "transform": Example(
        ("transform.py",),
        "tasks: {environment: arithmetic, transform: {kind: addressed, names: [Ada, Alan]}}",
        ("transform",),
    ),
}


def files() -> dict[Path, str]:
    """Path and content of the pages."""
    return dict(_page(PAGES / f"{name}.md", each) for name, each in EXAMPLES.items())


def _page(path: Path, example: Example) -> tuple[Path, str]:
    head, _, rest = path.read_text().partition(BEGIN)
    parts = [*map(_source, example.sources), _entry_points(example), _job(example)]
    if example.tests:
        parts.append(_tests(example.tests))
    return path, head + BEGIN + "\n".join([*parts, INSTALL]) + END + rest.partition(END)[2]


def _source(name: str) -> str:
    path = EXAMPLE / "src" / "paceline_example" / name
    return f"`{path.relative_to(EXAMPLE)}`:\n\n{_fence(path.suffix, path.read_text())}"


def _fence(suffix: str, text: str) -> str:
    return f"```{LANGUAGES.get(suffix, suffix)}\n{text.rstrip()}\n```\n"


def _entry_points(example: Example) -> str:
    """Those that lead to the files of an example."""
    modules = {_module(name) for name in example.sources}
    lines: list[str] = []
    groups = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, points in groups.items():
        own = {k: v for k, v in points.items() if v.partition(":")[0] in modules}
        if own:
            lines += [f'[project.entry-points."{group}"]']
            lines += [f'{name} = "{target}"' for name, target in own.items()]
    return "Its entry points in `pyproject.toml`:\n\n" + _fence("toml", "\n".join(lines))


def _module(name: str) -> str:
    parts = ("paceline_example", *Path(name).with_suffix("").parts)
    return ".".join(part for part in parts if part != "__init__")


def _job(example: Example) -> str:
    return "In a job file:\n\n" + _fence(".yaml", example.job)


def _tests(names: tuple[str, ...]) -> str:
    """Tests of the distribution, with the imports that they need."""
    source = (EXAMPLE / "tests" / "test_plugins.py").read_text()
    tree = ast.parse(source)
    wanted = {f"test_{name}" for name in names} | {"engine"} & {*names}
    bodies = [
        ast.get_source_segment(source, node) or ""
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in wanted
    ]
    text = "\n\n\n".join(bodies)
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    imports = "\n".join(_imports(tree, used))
    return "Its test:\n\n" + _fence(".py", f"{imports}\n\n\n{text}")


def _imports(tree: ast.Module, used: set[str]) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            kept = [each for each in node.names if each.name in used]
            if kept:
                node.names = kept
                yield ast.unparse(node)
