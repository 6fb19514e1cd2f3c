"""`import paceline` is light and offers what programs need."""

import subprocess
import sys

from paceline_harness.patience import PATIENCE_S

LAZY = """
import sys, paceline
heavy = {"grpc", "httpx", "numpy", "pydantic", "torch", "yaml"}
print(sorted(heavy & set(sys.modules)), sorted(paceline.__all__), paceline.__version__ != "")
from paceline import *
from paceline.front.client.client import AsyncClient as A, Client as C
from paceline.config import JobSpec as J
print((AsyncClient, Client, JobSpec) == (A, C, J), {"Client", "JobSpec"} <= set(dir(paceline)))
print(hasattr(paceline, "Klient"), "torch" in sys.modules)
"""


def test_names_are_imported_lazily() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAZY], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.splitlines() == [
        "[] ['AsyncClient', 'Client', 'JobSpec', '__version__'] True",
        "True True",
        "False False",
    ], done.stderr
