"""Wheels that are in no index."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    files: Mapping[str, str] | None = None,
    requires: Sequence[str] = (),
    fields: Sequence[str] = (),
) -> Path:
    """Write a pure wheel with `files`, by default one module of its name; the same every time.

    `fields`: further lines of its `METADATA`. Files of its `.dist-info` replace the usual ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = files if files is not None else {f"{name}.py": f'VERSION = "{version}"\n'}
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"{each}\n" for each in (*fields, *(f"Requires-Dist: {r}" for r in requires)))
    found = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **own,
    }
    listed = "".join(f"{each},,\n" for each in [*found, f"{info}/RECORD"])
    made = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, text in {**found, f"{info}/RECORD": listed}.items():
            wheel.writestr(zipfile.ZipInfo(path, _EPOCH), text)
    return made
