"""The five light services and the command line never import torch."""

import subprocess
import sys

import pytest

LIGHT = ("controller", "environment", "experience", "gateway", "reward")
PROBE = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not found.name.endswith("__main__") and ".v1" not in found.name:
        importlib.import_module(found.name)
print([name for name in ("torch", "transformers", "sglang") if name in sys.modules])
"""


@pytest.mark.parametrize("package", [f"paceline_{kind}" for kind in LIGHT] + ["paceline"])
def test_no_module_of_it_imports_torch(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, package], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


MOVES_BYTES = """
import importlib, sys
importlib.import_module(sys.argv[1] + ".service")
print([name for name in ("aiohttp", "blake3", "torch", "zstandard") if name in sys.modules])
"""


@pytest.mark.parametrize("kind", ["environment", "experience", "gateway", "reward"])
def test_what_moves_weights_is_for_trainers_and_rollout_workers(kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MOVES_BYTES, f"paceline_{kind}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
