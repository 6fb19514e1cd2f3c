"""Generates shared/paceline/v1 from the protos."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from google.api import http_pb2

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "protos"
TARGET = ROOT / "shared"
# The usual annotations of HTTP routes lie beside the code that is made from them.
GOOGLE = Path(http_pb2.__file__).parents[2]


def files() -> dict[Path, str]:
    """Path and content of every generated module."""
    protos = sorted(SOURCES.glob("paceline/v1/*.proto"))
    services = [path for path in protos if "\nservice " in path.read_text()]
    with tempfile.TemporaryDirectory() as folder:
        _compile(protos, f"--python_out={folder}", f"--mypy_out=quiet:{folder}")
        _compile(services, f"--grpc_python_out={folder}", f"--mypy_grpc_out=quiet:{folder}")
        made = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {TARGET / path.relative_to(folder): path.read_text() for path in made}


def _compile(protos: list[Path], *out: str) -> None:
    # The plug-ins of protoc lie beside the interpreter.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{SOURCES}",
        f"-I{GOOGLE}",
        *out,
        *map(str, protos),
    ]
    subprocess.run(command, env={**os.environ, "PATH": path}, check=True)
