"""`config.json` among the proofs of weights: trainer and engine have to compute the same model.

Log-probs show some differences badly (the base of RoPE, a window longer than the text of the
canary) and others not at all (the ids that end a turn).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

MAX_CHARS = 64 << 10
NAMED = 3  # differences, in a message
_MAX_SHOWN = 80
# Neither says what the model computes.
_VOLATILE = frozenset(
    {
        *("_commit_hash", "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype"),
        *("transformers_version", "use_cache"),
    }
)


def canonical(path: Path) -> str:
    """What a `config.json` says, equal for equal models; its digest if that is long.

    Empty if there is no such file, or it is no object.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return ""
    if not isinstance(found, dict):
        return ""
    content = cast("dict[str, Any]", found)
    said = {key: value for key, value in content.items() if key not in _VOLATILE}
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    if len(text) <= MAX_CHARS:
        return text
    return json.dumps({"(digest)": hashlib.sha256(text.encode()).hexdigest()})


def difference(own: str, trainers: str) -> str:
    """How two `canonical` texts differ, for people; empty: not at all, or one is not known."""
    if not own or not trainers or own == trainers:
        return ""
    mine, theirs = _flat(json.loads(own)), _flat(json.loads(trainers))
    keys = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
    some = [
        f"{key} is {_shown(mine.get(key))} here and {_shown(theirs.get(key))} in the trainer"
        for key in keys[:NAMED]
    ]
    if len(keys) > NAMED:
        some.append(f"{len(keys) - NAMED} more differ")
    return f"config.json: {'; '.join(some)}"


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Values as JSON, by the path of their keys."""
    found: dict[str, str] = {}
    for key, value in content.items():
        if isinstance(value, dict) and value:
            found |= _flat(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = json.dumps(value)
    return found


def _shown(value: str | None) -> str:
    if value is None:
        return "missing"
    return value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}..."
