"""What a message says about a module that is missing can be run, and brings the module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from paceline.errors import InvalidError
from paceline.errors.extras import EXTRAS, not_installed
from paceline.platform.object_stores import installing_store
from paceline.plugins.loading import attribute

ROOT = Path(__file__).parents[4]
NAMES = {
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "mlflow": "mlflow-skinny",
    "opentelemetry": "opentelemetry-sdk",
    "yaml": "pyyaml",
}
# Brought by one that is named here, or imported only below a guard that says what it is for.
OTHERS = {"huggingface_hub", "triton", "sglang", "uvloop", "torchao"}


def brought_by(extra: str) -> set[str]:
    """Distributions that an extra installs, without what they require themselves."""
    found: set[str] = set()
    pending = [extra]
    requirements = [Requirement(text) for text in distribution("paceline").requires or ()]
    while pending:
        wanted = {"extra": pending.pop()}
        for each in requirements:
            if each.marker is not None and each.marker.evaluate(wanted):
                found.add(canonicalize_name(each.name))
                pending += each.extras if each.name == "paceline" else []
    return found


def always() -> set[str]:
    """Distributions that are there without an extra."""
    requirements = [Requirement(text) for text in distribution("paceline").requires or ()]
    return {canonicalize_name(each.name) for each in requirements if each.marker is None}


def imported() -> set[str]:
    """Top-level modules that Paceline imports, of others than Python and itself."""
    found: set[str] = set()
    for folder in ("shared", "services"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {each.name.partition(".")[0] for each in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module.partition(".")[0])
    return {each for each in found - sys.stdlib_module_names if not each.startswith("paceline")}


def test_every_module_of_an_extra_has_one() -> None:
    there = with_theirs(always())
    needed = {module for module in imported() if distribution_of(module) not in there}
    assert needed - EXTRAS.keys() - OTHERS == set()
    for module, extra in EXTRAS.items():
        assert distribution_of(module) in with_theirs(brought_by(extra)), (module, extra)


def distribution_of(module: str) -> str:
    return NAMES.get(module, canonicalize_name(module))


def with_theirs(names: Iterable[str]) -> set[str]:
    """Distributions with what they require themselves, such as packages that they wrap."""
    found: set[str] = set()
    pending = [*names]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        with suppress(PackageNotFoundError):  # of an extra that is not installed here
            needed = [Requirement(text) for text in distribution(name).requires or ()]
            pending += [
                canonicalize_name(each.name)
                for each in needed
                if each.marker is None or each.marker.evaluate({"extra": ""})
            ]
    return found


def test_a_module_that_is_missing_names_the_extra_that_has_it() -> None:
    def told(module: str, extra: str = "") -> str:
        error = ModuleNotFoundError(f"No module named {module!r}", name=module)
        return not_installed(error, extra=extra)

    assert told("pyarrow.parquet") == "pyarrow is not installed; pip install 'paceline[data]'"
    assert told("psutil", "local") == "psutil is not installed; pip install 'paceline[local]'"
    assert told("my_rewards") == "No module named 'my_rewards'"  # a user's
    assert installing_store("s3") == "pip install 'paceline[s3]'"
    assert installing_store("gs") == "pip install gcsfs"
    with pytest.raises(InvalidError, match=r"^cannot import 'nowhere:x': No module named 'nowhere"):
        attribute("nowhere:x")


def test_a_command_names_the_extra_of_what_it_needs(tmp_path: Path) -> None:
    """As in an environment without the package: it is hidden from the interpreter."""
    hidden = "import sys; sys.modules['matplotlib'] = sys.modules['psutil'] = None; "
    run = hidden + "from paceline.front.cli.entry import main; sys.exit(main(sys.argv[1:]))"
    (tmp_path / "store").mkdir()
    command = [sys.executable, "-c", run, "list", "--run-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "pip install 'paceline[local]'" in done.stderr) == (2, True)
