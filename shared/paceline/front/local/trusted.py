"""A folder of plug-ins that the user of this machine trusts, used without being installed.

Its modules can be imported by all processes that are started afterwards, which run them as the
user. What it declares as entry points in `pyproject.toml` are plug-ins as if it were installed.
"""

from __future__ import annotations

import ast
import atexit
import importlib
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from paceline.errors import ConfigError
from paceline.plugins import registry

_VARIABLE = "PYTHONPATH"
_PROJECT, _SOURCES = "pyproject.toml", "src"


def trust(folder: Path) -> list[str]:
    """Have this process, and those that it starts, import from a folder.

    Returns the functions of its modules, as `module:function`, which jobs may then name as rewards
    and slots of the objective.

    Raises:
        ConfigError: there is no such folder, or no module in it, or one that hides another.
    """
    root = folder.resolve()
    if not root.is_dir() or os.pathsep in str(root):
        raise ConfigError(f"--trust {folder}: is not a folder, or has {os.pathsep!r} in its path")
    sources = root / _SOURCES if (root / _SOURCES).is_dir() else root
    modules = dict(_modules(sources))
    if not modules:
        raise ConfigError(f"--trust {folder}: there are no Python files in {sources}")
    for name in sorted({module.partition(".")[0] for module in modules}):
        if name in sys.stdlib_module_names or find_spec(name) is not None:
            raise ConfigError(
                f"--trust {folder}: {name!r} is a module that is installed or of Python; rename it"
            )
    targets = [
        f"{name}:{function}" for name, path in modules.items() for function in _functions(path)
    ]
    _import_from(str(sources))
    if (root / _PROJECT).is_file():
        _import_from(str(_described(root / _PROJECT)))
    return targets


def _import_from(folder: str) -> None:
    sys.path.insert(0, folder)
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = os.pathsep.join(filter(None, (folder, before)))
    importlib.invalidate_caches()
    registry.refresh()


def _modules(folder: Path) -> Iterator[tuple[str, Path]]:
    """Modules that can be imported from a folder, with their files."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        packages = (folder.joinpath(*parts[:depth]) for depth in range(1, len(parts)))
        inside = all((package / "__init__.py").is_file() for package in packages)
        if inside and all(part.isidentifier() for part in parts):
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _functions(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", 0)
        raise ConfigError(f"--trust: {path}:{line}: {error.args[0]}") from None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def _described(project: Path) -> Path:
    """A folder with the entry points of a project, as an installation would write them."""
    try:
        content = tomllib.loads(project.read_text())
    except (ValueError, OSError) as error:
        raise ConfigError(f"--trust: {project}: {error}") from None
    groups: Any = content.get("project", {}).get("entry-points", {})
    lines = list(_entry_points(cast("Mapping[str, Mapping[str, str]]", groups)))
    folder = Path(tempfile.mkdtemp(prefix="paceline-trusted-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    metadata = folder / "paceline_trusted-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: paceline-trusted\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return folder


def _entry_points(groups: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for group, points in groups.items():
        if group.startswith("paceline."):
            yield f"[{group}]"
            yield from (f"{name} = {target}" for name, target in points.items())
