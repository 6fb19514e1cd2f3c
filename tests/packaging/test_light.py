"""Light services and the command line import neither torch nor anything missing in their images."""

import functools
import subprocess
import sys
from importlib.metadata import packages_distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from paceline_harness.patience import PATIENCE_S

LIGHT = ("controller", "environment", "experience", "gateway", "reward", "tracking")
PROBE = r"""
import importlib, pkgutil, re, sys
# What of a method runs in the trainer alone, and what prepares weights there and in workers.
ELSEWHERE = (
    r"paceline\.(weights\.(adapters|names)|methods\.objective\..*|methods\.(\w+\.(correction|hook|proximal|regulariser|shaping|surrogate)|"
    r"parts\.(aggregation|batch|proximal|slots|surrogates|uniform|whole_batch)))"
)
# What is made of a library that only tests of its own install.
ELSEWHERE += r"|paceline\.environments\.verifiers\.(loaded|policy|world)"
for package in map(importlib.import_module, sys.argv[1:]):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if re.fullmatch(ELSEWHERE, found.name):
            continue
        if not found.name.endswith("__main__") and ".v1" not in found.name:
            importlib.import_module(found.name)
    heavy = [name for name in ("torch", "transformers", "sglang") if name in sys.modules]
    assert not heavy, (package.__name__, heavy)
"""


def said_by(code: str, *arguments: str) -> str:
    """Run code in a new Python process; returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_module_of_them_imports_torch() -> None:
    # In one process: what none of them has imported, no module of one has.
    said_by(PROBE, "paceline", *(f"paceline_{kind}" for kind in LIGHT))


WITHOUT = """
import importlib, sys

asked = set()

class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[2:]:
            asked.add(name.partition(".")[0])
            raise ModuleNotFoundError(f"not in this image: {name}")

sys.meta_path.insert(0, Hidden)
importlib.import_module(sys.argv[1] + ".service")
# What moves weights is for trainers and rollout workers.
if sys.argv[1] not in ("paceline_controller", "paceline_tracking"):
    moves = {"aiohttp", "blake3", "torch", "zstandard"} & {*sys.modules, *asked}
    assert not moves, moves
"""


def installed_with(extra: str) -> set[str]:
    """Distributions of one of our extras, including dependencies."""
    found: set[str] = set()
    left = [("paceline", extra)]
    while left:
        name, wanted = left.pop()
        for text in requires(name) or ():
            needed = Requirement(text)
            if needed.marker is not None and not needed.marker.evaluate({"extra": wanted}):
                continue
            key = canonicalize_name(needed.name)
            more = [(key, each) for each in (*needed.extras, "")]
            left += [each for each in more if each[0] == "paceline" or key not in found]
            found.add(key)
    return found


OPTIONS = """
from paceline.plugins import registry
from paceline.config.options import model_of

for kind in registry.KINDS:
    described = {n: registry.options_of(kind, n) for n in registry.built_in(kind)}
    assert described
    for name, source in described.items():
        assert source is None or model_of(source, kind)
assert not registry.unreadable()
"""


DESCRIPTORS = """
import sys
from paceline.plugins import registry

registry.check("rewards", "exact")
assert "paceline.methods.tis" not in sys.modules
empty = [kind for kind in ("recipes", *registry.KINDS) if not registry.built_in(kind)]
assert not empty, empty
assert not registry.unreadable()
heavy = {"numpy", "sympy", "torch", "transformers"} & sys.modules.keys()
assert not heavy, heavy
assert "paceline.methods.tis" in sys.modules
assert "paceline.methods.tis.correction" not in sys.modules
"""


def test_descriptors_are_read_without_what_they_name() -> None:
    """Who looks for a reward does not read those of methods; no list of built-ins is empty."""
    said_by(DESCRIPTORS)


@functools.cache
def owners() -> dict[str, set[str]]:
    """The distributions of each top-level module of this environment."""
    return {
        name: {canonicalize_name(each) for each in found}
        for name, found in packages_distributions().items()
    }


@pytest.mark.parametrize("kind", LIGHT)
def test_a_service_starts_with_what_its_image_has(kind: str) -> None:
    """The gateway can read the options of every plug-in, too."""
    there = {*installed_with(kind), "paceline"}
    hidden = [name for name, found in owners().items() if not there & found]
    assert {"torch", "pytest"} <= set(hidden)
    assert kind != "gateway" or "numpy" in hidden
    said_by(WITHOUT + OPTIONS * (kind == "gateway"), f"paceline_{kind}", *hidden)
