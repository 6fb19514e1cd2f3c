"""Checks options of plug-ins without importing the plug-ins themselves.

The descriptor of a plug-in, or its entry point in `paceline.options.<kind>`, names what describes
the options: a pydantic model, or a function or class whose keyword parameters are the options. It
must be cheap to import. A plug-in without one is checked against its own parameters, in the process
that runs it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import ErrorDetails

from paceline.errors import InvalidError, plugin_boundary
from paceline.errors.wording import refusal, shown
from paceline.plugins import EnvironmentPlugin, registry
from paceline.plugins.allowed import NO_TARGETS, AllowedTargets
from paceline.plugins.declared import provided, type_hints
from paceline.plugins.slot_options import slot_options

MAX_FIELD = 200  # characters of a field that a message quotes
# Conversions of pydantic where it is not strict: "no" to false, "0.5" to 0.5. Plug-ins are called
# with the values of the job, to which "no" is true.
_CONVERTED = frozenset({"bool_type", "float_type", "int_type"})
# By kind: the number of positional arguments, and the keywords passed in addition to the options.
_GIVEN: dict[str, tuple[int, frozenset[str]]] = {
    "advantages": (2, frozenset()),
    "environments": (0, frozenset({"seed"})),
    "filters": (1, frozenset()),
    "rewards": (1, frozenset({"programs", "endpoints"})),
    "allocators": (0, frozenset({"group_size"})),
    "samplers": (1, frozenset({"seed", "epochs"})),
    "topologies": (1, frozenset()),
    "transforms": (2, frozenset()),
    "trackers": (1, frozenset()),
}


def wrong_options(
    field: str,
    kind: str,
    name: str,
    options: Mapping[str, Any],
    *,
    import_plugin: bool = False,
    allowed: AllowedTargets = NO_TARGETS,
) -> Iterator[str]:
    """A line for each option that a plug-in refuses.

    `import_plugin`: if nothing describes its options, import it and use its own parameters.
    `allowed`: functions of installed modules whose source may be looked at, and run in part.
    """
    try:
        source = options_source(kind, name, import_plugin=import_plugin, allowed=allowed)
        model = None if source is None else model_of(source, kind)
    except InvalidError as error:
        yield f"{field}: {error}"
        return
    if model is not None:
        yield from _refusals(field, name, model, options)


def refused_options(
    field: str, kind: str, name: str, options: Mapping[str, Any], *, source: Any
) -> Iterator[str]:
    """A line for each option that a plug-in refuses, described by `source` (see `model_of`)."""
    yield from _refusals(field, name, model_of(source, kind), options)


def options_source(
    kind: str, name: str, *, import_plugin: bool = False, allowed: AllowedTargets = NO_TARGETS
) -> Any:
    """The model or callable that describes the options of a plug-in and carries its declarations.

    None if there is none.

    Raises:
        InvalidError: it cannot be imported.
    """
    with plugin_boundary(f"{name!r} cannot be imported", passes=(InvalidError,)):
        source = registry.options_of(kind, name)
        if source is None and kind in registry.SLOTS and name in allowed:
            return slot_options(name)
        if source is None and import_plugin:
            source = registry.find(kind, name)
            if isinstance(source, EnvironmentPlugin):
                source = source.load_tasks()
        return source


def marked(kind: str, name: str, marker: type) -> Iterator[str]:
    """Options of a plug-in that are annotated with a marker; none if it cannot be imported."""
    try:
        source = options_source(kind, name)
    except InvalidError:  # reported by the check of its options
        return
    fields = {} if source is None else model_of(source, kind).model_fields
    for own, field in fields.items():
        if any(isinstance(annotation, marker) for annotation in field.metadata):
            yield field.alias or own


@cache
def model_of(source: Any, kind: str) -> type[BaseModel]:
    """The options model of a plug-in: `source` itself, or a model built from its parameters."""
    if isinstance(source, type) and issubclass(source, BaseModel):
        return source
    positional, keywords = _GIVEN.get(kind, (0, frozenset[str]()))
    parameters = list(inspect.signature(source).parameters.values())
    hints = type_hints(source, include_extras=True)
    ours = provided(source) if kind == "environments" else ""
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    fields: dict[str, Any] = {}
    for index, parameter in enumerate(parameters):
        is_filled = parameter.name in keywords or parameter.name == ours
        is_filled = is_filled or (
            parameter.kind is not parameter.KEYWORD_ONLY and index < positional
        )
        if is_filled or parameter.kind in {
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
            parameter.POSITIONAL_ONLY,
        }:
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        # By alias: a parameter may have a name that pydantic reserves.
        fields[f"option{index}"] = (
            hints.get(parameter.name, Any),
            Field(default, alias=parameter.name),
        )
    config = ConfigDict(
        extra="allow" if takes_any else "forbid",
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
    )
    return create_model("Options", __config__=config, **fields)


def _refusals(
    field: str, name: str, model: type[BaseModel], options: Mapping[str, Any]
) -> Iterator[str]:
    try:
        errors = _errors(model, options)
    except (TypeError, ValueError, RecursionError) as error:
        yield f"{field}: options of {name!r} are not JSON: {error}"
        return
    for item in errors:
        where = f"{field}.{'.'.join(map(str, item['loc']))}"[:MAX_FIELD].rstrip(".")
        if item["type"] == "extra_forbidden" and len(item["loc"]) == 1:
            allowed = ", ".join(_names(model)) or "none"
            yield f"{where}: unknown option of {name!r}; allowed: {allowed}"
        elif item["type"] == "missing":
            yield f"{where}: is missing"
        else:
            yield f"{where}: {refusal(item)} (got {shown(item['input'])})"


def _errors(model: type[BaseModel], options: Mapping[str, Any]) -> list[ErrorDetails]:
    """The errors of options that a model refuses; raises those of `json.dumps`."""
    strict = [item for item in _of(model, options, strict=True) if item["type"] in _CONVERTED]
    places = {item["loc"] for item in strict}
    # An error of no single option may follow from a conversion.
    return strict + [
        item
        for item in _of(model, options, strict=None)
        if item["loc"] not in places and (item["loc"] or not strict)
    ]


def _of(
    model: type[BaseModel], options: Mapping[str, Any], *, strict: bool | None
) -> list[ErrorDetails]:
    try:
        # Validate JSON, the form in which options travel: lists may be tuples.
        model.model_validate_json(json.dumps(options), strict=strict)
    except ValidationError as error:
        return error.errors(include_url=False)
    return []


def _names(model: type[BaseModel]) -> list[str]:
    return sorted(field.alias or name for name, field in model.model_fields.items())
