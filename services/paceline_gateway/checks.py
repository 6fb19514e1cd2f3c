"""What can be found wrong with a job before anything starts; nothing is imported for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.config import JobSpec
from paceline.config.named import missing
from paceline.errors import ConfigError
from paceline.rpc import MAX_MESSAGE_BYTES

MODEL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
NEEDED = ("config.json", "tokenizer.json")
# They travel in one message together with the job.
MAX_FILES_BYTES = min(32 << 20, MAX_MESSAGE_BYTES - (1 << 20))


def check_plugins(spec: JobSpec) -> None:
    """Raise `ConfigError` for every plug-in that is not installed, by field."""
    problems = list(_problems(spec))
    if problems:
        raise ConfigError("; ".join(problems))


def _problems(spec: JobSpec) -> Iterator[str]:
    yield from missing(spec)
    for index, part in enumerate(spec.reward):
        if part.kind == "python" and not _is_path(part.options.get("function")):
            yield f"reward.{index}.function: kind 'python' needs 'module:function'"
        if part.kind == "regex":
            yield from _pattern_problems(f"reward.{index}.pattern", part.options.get("pattern"))


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and all(value.partition(":"))


def _pattern_problems(field: str, pattern: Any) -> Iterator[str]:
    if not isinstance(pattern, str):
        yield f"{field}: kind 'regex' needs a pattern (got {pattern!r})"
        return
    try:
        re.compile(pattern)
    except re.error as error:
        yield f"{field}: not a regular expression: {error} (got {pattern!r})"


def read_model(path: Path) -> dict[str, bytes]:
    """The small files of a model folder by name.

    Raises:
        ConfigError: it is no model folder, or has no tokenizer.
    """
    if not path.exists():
        raise ConfigError(f"model.path: {path} does not exist")
    if not path.is_dir():
        raise ConfigError(f"model.path: {path} is not a folder")
    found = [path / name for name in MODEL_FILES if (path / name).is_file()]
    total = sum(file.stat().st_size for file in found)
    if total > MAX_FILES_BYTES:
        raise ConfigError(f"model.path: {path}: {_too_large(total)}")
    return check_files({file.name: file.read_bytes() for file in found}, where=str(path))


def check_files(files: Mapping[str, bytes], *, where: str) -> dict[str, bytes]:
    """The files, if a tokenizer and a readable configuration are among them."""
    for name in NEEDED:
        if name not in files:
            raise ConfigError(f"model.path: {where} has no {name}")
    if unknown := sorted(set(files) - set(MODEL_FILES)):
        allowed = ", ".join(MODEL_FILES)
        raise ConfigError(f"files: {unknown[0]!r} is not a small model file; allowed: {allowed}")
    if (total := sum(map(len, files.values()))) > MAX_FILES_BYTES:
        raise ConfigError(f"files: {_too_large(total)}")
    for name in NEEDED:
        try:
            json.loads(files[name])
        except ValueError as error:
            raise ConfigError(f"model.path: {where}: {name} is not JSON: {error}") from None
    return dict(files)


def _too_large(total: int) -> str:
    return f"the small model files have {total} bytes; at most {MAX_FILES_BYTES} are allowed"
