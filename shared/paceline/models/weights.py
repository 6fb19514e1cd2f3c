"""Which files of a model are its weights, and whether they can be complete: safetensors only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.errors import ConfigError

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
WANTED = ("*.json", "*.jinja", "*.safetensors", "*.txt", "*.model")
"""Files of a repository or folder that are downloaded; none of them is code or a pickle."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_HEADER_BYTES = 100_000_000  # as safetensors itself allows


def is_wanted(name: str) -> bool:
    """Whether a file at the top of a model's folder is downloaded."""
    return "/" not in name and any(PurePosixPath(name).match(each) for each in WANTED)


def check_weights(
    sizes: Mapping[str, int], read: Callable[[str], bytes], *, source: str
) -> list[str]:
    """Names of the files with weights. `read` reads a small file of the model.

    Raises:
        ConfigError: there are only pickles, or none, or a file that the index names is missing.
    """
    if INDEX in sizes:
        return _listed(sizes, read, source)
    if WHOLE in sizes:
        return [WHOLE]
    pickles = sorted(name for name in sizes if name.endswith(_PICKLES))
    if pickles:
        raise ConfigError(
            f"model.path: {source} has its weights only as {pickles[0]}, a pickle, which can run "
            "code when it is loaded; convert it to safetensors (`save_pretrained` of transformers)"
        )
    raise ConfigError(f"model.path: {source} has neither {WHOLE} nor {INDEX}")


def _listed(sizes: Mapping[str, int], read: Callable[[str], bytes], source: str) -> list[str]:
    if sizes[INDEX] > MAX_INDEX_BYTES:
        raise ConfigError(f"model.path: {source}: {INDEX} has {sizes[INDEX]} bytes; too many")
    try:
        listed: Any = json.loads(read(INDEX))["weight_map"]
        names = sorted(set(map(str, listed.values())))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model.path: {source}: {INDEX} is damaged: {cause}") from None
    missing = [name for name in names if name not in sizes]
    if missing or not names:
        some = ", ".join(missing[:3]) or "any"
        raise ConfigError(
            f"model.path: {source} does not have {some}, of the {len(names)} files that {INDEX} "
            f"names; {len(missing)} are missing"
        )
    return names


def check_header(path: Path) -> None:
    """Check that a file has the size that its header says.

    Raises:
        ConfigError: it is cut, or no safetensors file.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ConfigError(f"model.path: {path} is no safetensors file, or is cut")
        text = file.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        ends = [int(e["data_offsets"][1]) for name, e in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, RecursionError):
        raise ConfigError(f"model.path: {path} is no safetensors file: bad header") from None
    expected = 8 + length + max(ends, default=0)
    if expected != size:
        raise ConfigError(
            f"model.path: {path} has {size} bytes; its header says {expected}, so it is damaged"
        )
