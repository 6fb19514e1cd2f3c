"""Reads job files and settings; every error names the field, the value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from paceline.config.job import JobSpec
from paceline.config.service import ServiceSettings
from paceline.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


def load_job(path: Path, overrides: dict[str, Any] | None = None) -> JobSpec:
    """The job in a YAML file; `overrides` are dotted paths (`trainer.optimizer.lr`) and values."""
    raw = _read_yaml(path)
    for dotted, value in (overrides or {}).items():
        _set_path(raw, dotted, value)
    return validate(JobSpec, raw)


def parse_job(raw: Any) -> JobSpec:
    """The job in a decoded JSON or YAML document."""
    return validate(JobSpec, raw)


def load_settings(path: Path) -> ServiceSettings:
    """The settings file of one service process."""
    return validate(ServiceSettings, _read_yaml(path))


def validate(model: type[Model], raw: Any) -> Model:
    """Check `raw` against a closed model; raises `ConfigError`."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain(error, model)) from None


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One line for each wrong field."""
    lines: list[str] = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"]) or model.__name__
        if item["type"] == "extra_forbidden":
            allowed = ", ".join(_siblings(model, item["loc"]))
            lines.append(f"{where}: unknown field; allowed here: {allowed}")
        elif item["type"] == "missing":
            lines.append(f"{where}: is missing")
        else:
            text = item["msg"].removeprefix("Value error, ")
            got = "" if item["type"] == "value_error" else f" (got {item['input']!r})"
            lines.append(f"{where}: {text}{got}" if item["loc"] else text)
    return "; ".join(lines)


def _siblings(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    here: Any = model
    for part in loc[:-1]:
        if isinstance(part, int):
            continue
        found = getattr(here, "model_fields", {}).get(part)
        here = _model_of(found.annotation) if found is not None else None
    return sorted(getattr(here, "model_fields", {}))


def _model_of(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_model_of(arg) for arg in getattr(annotation, "__args__", ()))
    return next((found for found in inner if found is not None), None)


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None


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
