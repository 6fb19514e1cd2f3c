"""Reads job files and settings; every error names the field, the value and what is allowed."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from paceline.config.documents import read_yaml
from paceline.config.job import JobSpec
from paceline.config.precision import Dtype, with_dtype
from paceline.config.recipes import with_recipes
from paceline.config.service import ServiceSettings
from paceline.errors import ConfigError, InvalidError
from paceline.errors.wording import MAX_SHOWN, instead, refusal, shown

Model = TypeVar("Model", bound=BaseModel)
# A source of settings, a file or a `--set`, and its content.
Layer = tuple[str, dict[str, Any]]
_ABSENT = object()
MAX_LINES = 20
_FILE_HELP = "settings file; sections of later files are merged into those of earlier ones"
_SET_HELP = "one setting, which overrides all files: --set options.incarnation=3"


def load_job(path: Path, overrides: dict[str, Any] | None = None) -> JobSpec:
    """Read a job file; `overrides` maps dotted paths (`trainer.optimizer.lr`) to values.

    `dtype: auto` stays as it is: the installation that the job is submitted to decides.
    """
    raw = _read_yaml(path)
    for dotted, value in (overrides or {}).items():
        _set_path(raw, dotted, value)
    return validate(JobSpec, with_recipes(raw, folder=path.parent))


def resolve_job(raw: Any, *, dtype: Dtype = "auto") -> JobSpec:
    """Validate a job as users write it, with the values of its recipes.

    `dtype` replaces `auto` in the job; itself `auto`, it is what this machine computes fast.

    Raises:
        ConfigError: names the fields and what is allowed.
    """
    return with_dtype(validate(JobSpec, with_recipes(raw)), dtype)


def parse_job(raw: Any) -> JobSpec:
    """Validate an accepted job, which has all values; its recipes need not be installed.

    One that no gateway has seen may still say `dtype: auto`: it is float32, for all services.
    """
    return with_dtype(validate(JobSpec, raw), "float32")


class StoredJob(Protocol):
    """A record with the spec of an accepted job, as JSON."""

    @property
    def spec(self) -> str:
        """JSON of a `JobSpec`."""
        ...


def job_of(record: StoredJob) -> JobSpec:
    """The spec of a job's record, parsed as by `parse_job`.

    Raises:
        ConfigError: this version cannot parse it.
    """
    try:
        return with_dtype(JobSpec.model_validate_json(record.spec), "float32")
    except ValidationError as error:
        raise ConfigError(f"its record has no job file: {explain(error, JobSpec)}") from None


def load_settings(*paths: Path, overrides: Sequence[str] = ()) -> ServiceSettings:
    """Load the settings of one service process, as `load` does."""
    return load(ServiceSettings, *paths, overrides=overrides)


def load(model: type[Model], *paths: Path, overrides: Sequence[str] = ()) -> Model:
    """Load and validate layered settings files.

    Sections of later files are merged into those of earlier ones. `overrides` are `FIELD=VALUE`:
    a dotted path and a YAML value, or the literal text where the field is a string.

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
    """Load the settings that a command line names.

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
    """Validate `raw` against a closed model; raises `ConfigError`."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain(error, model)) from None


def explain(error: ValidationError, model: type[BaseModel], layers: Sequence[Layer] = ()) -> str:
    """One line for each invalid field, naming the last layer that sets it."""
    lines: list[str] = []
    listed = ""  # what is allowed, said once for neighbours
    errors = error.errors(include_url=False)
    for item in errors[:MAX_LINES]:
        where = _source(layers, item["loc"])
        where += ".".join(map(_part, item["loc"])) or model.__name__
        if item["type"] == "extra_forbidden":
            allowed = ", ".join(_siblings(model, item["loc"]))
            also = "" if allowed == listed else f"; allowed here: {allowed}"
            lines.append(f"{where}: unknown field{also}")
            listed = allowed
        elif item["type"] == "missing":
            lines.append(f"{where}: is missing")
        else:
            field = _field_at(model, item["loc"])
            secret = field is not None and not field.repr
            omit_value = item["type"] == "value_error" or secret
            got = "" if omit_value else f" (got {shown(item['input'])})"
            example = instead(item, field)
            text = refusal(item) + (f", for example `{example}`" if example else "")
            lines.append(f"{where}: {text}{got}" if item["loc"] else text)
    if len(errors) > MAX_LINES:
        lines.append(f"and {len(errors) - MAX_LINES} more")
    return "; ".join(lines)


def _part(part: int | str) -> str:
    text = str(part)
    return text if len(text) <= MAX_SHOWN and text.isprintable() else shown(text)


def _siblings(model: type[BaseModel], loc: Sequence[int | str]) -> list[str]:
    return sorted(_fields_around(model, loc))


def _field_at(model: type[BaseModel], loc: Sequence[int | str]) -> FieldInfo | None:
    """The field at a place; with `repr=False`, its value must not appear in messages."""
    return _fields_around(model, loc).get(str(loc[-1])) if loc else None


def _takes_text(model: type[BaseModel], loc: Sequence[int | str]) -> bool:
    field = _field_at(model, loc)
    return field is not None and (field.annotation is str or field.annotation is Path)


def _fields_around(model: type[BaseModel], loc: Sequence[int | str]) -> dict[str, FieldInfo]:
    """The fields of the section that holds the last part of `loc`, by their names in files."""
    section: Any = model
    for part in loc[:-1]:
        if isinstance(part, int):
            continue
        field = _fields_of(section).get(part)
        section = _model_of(field.annotation) if field is not None else None
    return _fields_of(section)


def _fields_of(section: Any) -> dict[str, FieldInfo]:
    fields: dict[str, FieldInfo] = getattr(section, "model_fields", {})
    return {field.alias or name: field for name, field in fields.items()}


def _model_of(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_model_of(arg) for arg in getattr(annotation, "__args__", ()))
    return next((argument for argument in inner if argument is not None), None)


def _source(layers: Sequence[Layer], loc: Sequence[int | str]) -> str:
    """A message prefix naming the last layer that sets a field, or all files if none does."""
    for name, content in reversed(layers):
        value: Any = content
        for part in loc:
            value = value.get(part, _ABSENT) if isinstance(value, dict) else _ABSENT
        if value is not _ABSENT:
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
        raise ConfigError(f"{path}: is a {type(raw).__name__}; expected a mapping of fields")
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
    section = raw
    for key in parents:
        if not isinstance(section, dict):
            raise ConfigError(f"{dotted}: {key} is not a section")
        section = section.setdefault(key, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{dotted}: the part before {last} is not a section")
    section[last] = value
