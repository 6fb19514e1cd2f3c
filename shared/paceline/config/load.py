"""Reads job files and settings; every error names the field, the value and what is allowed."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from paceline.config.documents import read_yaml
from paceline.config.job import JobSpec
from paceline.config.service import ServiceSettings
from paceline.errors import ConfigError, InvalidError

Model = TypeVar("Model", bound=BaseModel)
# Where settings come from: a file or a `--set`, and what it says.
Layer = tuple[str, dict[str, Any]]
_ABSENT = object()
MAX_LINES = 20
MAX_SHOWN = 200
_FILE_HELP = "settings; sections of later files are merged into those of earlier ones"
_SET_HELP = "one setting, above all files: --set options.incarnation=3"


def load_job(path: Path, overrides: dict[str, Any] | None = None) -> JobSpec:
    """The job in a YAML file; `overrides` are dotted paths (`trainer.optimizer.lr`) and values."""
    raw = _read_yaml(path)
    for dotted, value in (overrides or {}).items():
        _set_path(raw, dotted, value)
    return validate(JobSpec, raw)


def parse_job(raw: Any) -> JobSpec:
    """The job in a decoded JSON or YAML document."""
    return validate(JobSpec, raw)


def load_settings(*paths: Path, overrides: Sequence[str] = ()) -> ServiceSettings:
    """The settings of one service process; as `load`."""
    return load(ServiceSettings, *paths, overrides=overrides)


def load(model: type[Model], *paths: Path, overrides: Sequence[str] = ()) -> Model:
    """What files say together.

    Sections of later files are merged into those of earlier ones. `overrides` are `FIELD=VALUE`:
    a dotted path and a YAML value, or the text as it stands where the field takes text.

    Raises:
        ConfigError: names the file or the override, the field and what is allowed.
    """
    layers = [(str(path), _read_settings(path)) for path in paths]
    layers += [_read_override(text, model) for text in overrides]
    raw: dict[str, Any] = {}
    for _, content in layers:
        raw = _merged(raw, content)
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain(error, model, layers)) from None


def parse_arguments(arguments: Sequence[str], *, program: str) -> ServiceSettings:
    """The settings that a command line names.

    Raises:
        ConfigError: as `load_settings`.
        SystemExit: after help (0) or a wrong command line (2).
    """
    parser = ArgumentParser(prog=program, description="One service of Paceline.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=_FILE_HELP)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="FIELD=VALUE",
        help=_SET_HELP,
    )
    known = parser.parse_intermixed_args(arguments)
    return load_settings(*known.files, overrides=known.overrides)


def validate(model: type[Model], raw: Any) -> Model:
    """Check `raw` against a closed model; raises `ConfigError`."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain(error, model)) from None


def explain(error: ValidationError, model: type[BaseModel], layers: Sequence[Layer] = ()) -> str:
    """One line for each wrong field, with the last of the layers that sets it."""
    lines: list[str] = []
    found = error.errors(include_url=False)
    for item in found[:MAX_LINES]:
        where = _source(layers, item["loc"])
        where += ".".join(map(_part, item["loc"])) or model.__name__
        if item["type"] == "extra_forbidden":
            allowed = ", ".join(_siblings(model, item["loc"]))
            lines.append(f"{where}: unknown field; allowed here: {allowed}")
        elif item["type"] == "missing":
            lines.append(f"{where}: is missing")
        else:
            text = item["msg"].removeprefix("Value error, ")
            secret = _is_secret(model, item["loc"])
            told = item["type"] == "value_error" or secret
            got = "" if told else f" (got {shown(item['input'])})"
            lines.append(f"{where}: {text}{got}" if item["loc"] else text)
    if len(found) > MAX_LINES:
        lines.append(f"and {len(found) - MAX_LINES} more")
    return "; ".join(lines)


def shown(value: Any) -> str:
    """A value as messages quote it: what is sent may be long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _part(part: int | str) -> str:
    text = str(part)
    return text if len(text) <= MAX_SHOWN and text.isprintable() else shown(text)


def _siblings(model: type[BaseModel], loc: Sequence[int | str]) -> list[str]:
    return sorted(_fields_around(model, loc))


def _is_secret(model: type[BaseModel], loc: Sequence[int | str]) -> bool:
    """Whether the value must not be told: whoever keeps it out of `repr` says so."""
    field = _fields_around(model, loc).get(str(loc[-1])) if loc else None
    return field is not None and not field.repr


def _takes_text(model: type[BaseModel], loc: Sequence[int | str]) -> bool:
    field = _fields_around(model, loc).get(str(loc[-1]))
    return field is not None and (field.annotation is str or field.annotation is Path)


def _fields_around(model: type[BaseModel], loc: Sequence[int | str]) -> dict[str, FieldInfo]:
    """The fields of the section that holds the last part of `loc`."""
    here: Any = model
    for part in loc[:-1]:
        if isinstance(part, int):
            continue
        found = getattr(here, "model_fields", {}).get(part)
        here = _model_of(found.annotation) if found is not None else None
    return getattr(here, "model_fields", {})


def _model_of(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_model_of(arg) for arg in getattr(annotation, "__args__", ()))
    return next((found for found in inner if found is not None), None)


def _source(layers: Sequence[Layer], loc: Sequence[int | str]) -> str:
    """The last layer that sets a field; all of them for one that none sets."""
    for name, content in reversed(layers):
        here: Any = content
        for part in loc:
            here = here.get(part, _ABSENT) if isinstance(here, dict) else _ABSENT
        if here is not _ABSENT:
            return f"{name}: "
    names = [name for name, _ in layers if not name.startswith("--set")]
    return f"{', '.join(names)}: " if names else ""


def _merged(base: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in above.items():
        below: Any = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = _merged(below, value) if both else value
    return merged


def _read_settings(path: Path) -> dict[str, Any]:
    raw = _read_yaml(path)
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: is a {type(raw).__name__}; a mapping of fields is needed")
    return cast(dict[str, Any], raw)


def _read_override(text: str, model: type[BaseModel]) -> Layer:
    dotted, equals, value = text.partition("=")
    parts = dotted.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {dotted}: is not FIELD=VALUE, for example logs.level=DEBUG")
    name = f"--set {dotted}"
    content: Any = value if _takes_text(model, parts) else _parse_yaml(value, name)
    for part in reversed(parts):
        content = {part: content}
    return name, content


def _read_yaml(path: Path) -> Any:
    try:
        return _parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not YAML: not UTF-8") from None


def _parse_yaml(text: str, name: str) -> Any:
    try:
        return read_yaml(text, what=name)
    except InvalidError as error:
        raise ConfigError(error.message) from None


def _set_path(raw: Any, dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    here = raw
    for key in parents:
        if not isinstance(here, dict):
            raise ConfigError(f"{dotted}: {key} is not a section")
        here = here.setdefault(key, {})
    if not isinstance(here, dict):
        raise ConfigError(f"{dotted}: the part before {last} is not a section")
    here[last] = value
