"""Options of plug-ins, checked without importing what is heavy.

What a plug-in takes is told by the entry point of its name in the group `paceline.options.<kind>`:
a pydantic model, or a function or class whose keyword parameters are the options. It must be light
to import. A plug-in without one is checked where it runs, which for those that run in the process
that asks is here, by their own parameters.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from paceline import plugins
from paceline.config.load import shown
from paceline.errors import InvalidError

MAX_FIELD = 200  # characters of a field that a message quotes
# Of each kind: how many positional arguments it is given, and which keywords beside its options.
_GIVEN: dict[str, tuple[int, frozenset[str]]] = {
    "advantages": (3, frozenset()),
    "filters": (1, frozenset()),
    "rewards": (1, frozenset()),
    "samplers": (1, frozenset({"seed", "epochs"})),
    "tasks": (0, frozenset({"seed"})),
    "trackers": (1, frozenset()),
}


def wrong_options(
    field: str, kind: str, name: str, options: Mapping[str, Any], *, itself: bool = False
) -> Iterator[str]:
    """A line for each option that a plug-in does not take as it is.

    `itself`: if nothing tells its options, the plug-in is imported and asked for its parameters.
    """
    try:
        told = plugins.options_of(kind, name)
        if told is None and itself:
            told = plugins.find(kind, name)
        model = None if told is None else model_of(told, kind)
    except InvalidError as error:
        yield f"{field}: {error}"
        return
    except (Exception, SystemExit) as error:  # the boundary of a plug-in's import
        yield f"{field}: {name!r} cannot be imported: {type(error).__name__}: {error}"
        return
    if model is not None:
        yield from _refusals(field, name, model, options)


@cache
def model_of(told: Any, kind: str) -> type[BaseModel]:
    """The model of the options of a plug-in: what is told, or made of its parameters."""
    if isinstance(told, type) and issubclass(told, BaseModel):
        return told
    positional, keywords = _GIVEN.get(kind, (0, frozenset[str]()))
    parameters = list(inspect.signature(told).parameters.values())
    hints = _hints(told)
    others = any(each.kind is each.VAR_KEYWORD for each in parameters)
    fields: dict[str, Any] = {}
    for place, each in enumerate(parameters):
        given = each.name in keywords or (each.kind is not each.KEYWORD_ONLY and place < positional)
        if given or each.kind in {each.VAR_KEYWORD, each.VAR_POSITIONAL, each.POSITIONAL_ONLY}:
            continue
        default = ... if each.default is each.empty else each.default
        # By alias: a parameter may have a name that models keep for themselves.
        fields[f"option{place}"] = (hints.get(each.name, Any), Field(default, alias=each.name))
    config = ConfigDict(
        extra="allow" if others else "forbid",
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
    )
    return create_model("Options", __config__=config, **fields)


def _hints(told: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(
            told.__init__ if isinstance(told, type) else told, include_extras=True
        )
    except Exception:  # annotations are anything; without them only names are checked
        return {}


def _refusals(
    field: str, name: str, model: type[BaseModel], options: Mapping[str, Any]
) -> Iterator[str]:
    try:
        # As JSON, in which options come and go: a list is a tuple there, a text no number.
        model.model_validate_json(json.dumps(options))
    except (TypeError, ValueError, RecursionError) as error:
        if not isinstance(error, ValidationError):
            yield f"{field}: options of {name!r} are not JSON: {error}"
            return
        for item in error.errors(include_url=False):
            where = f"{field}.{'.'.join(map(str, item['loc']))}"[:MAX_FIELD].rstrip(".")
            if item["type"] == "extra_forbidden" and len(item["loc"]) == 1:
                allowed = ", ".join(_names(model)) or "none"
                yield f"{where}: unknown option of {name!r}; allowed: {allowed}"
            elif item["type"] == "missing":
                yield f"{where}: is missing"
            else:
                text = item["msg"].removeprefix("Value error, ")
                yield f"{where}: {text} (got {shown(item['input'])})"


def _names(model: type[BaseModel]) -> list[str]:
    return sorted(field.alias or name for name, field in model.model_fields.items())
