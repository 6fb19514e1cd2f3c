"""What pydantic says of a refused value, in the words of the file that the value is in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

_WORDS = (
    (r"a valid dictionary or (instance of \w+|object to extract fields from)", "a mapping"),
    (r"a valid (dictionary|mapping)", "a mapping"),
    (r"a valid (tuple|list|array|set|frozenset)", "a list"),
    (r"^(Tuple|Set|Frozenset|Array) should", "List should"),
    (r"^(Dictionary|Object) should", "Mapping should"),
    (r" after validation", ""),
    (r"should be None", "should be null"),
)
_SHAPES = ("mapping", "list")
_OURS = ("value_error", "assertion_error")
_MOST_CHARS = 80  # of a value that an example repeats
_NUMBER = 10
MAX_SHOWN = 200
"""Characters of a value in a message."""


def shown(value: Any) -> str:
    """A value as quoted in messages, truncated: input may be long."""
    plain = value.decode(errors="replace") if isinstance(value, bytes) else value
    text = "null" if plain is None else repr(plain)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def refusal(item: ErrorDetails) -> str:
    """Why a value is refused, without types of Python."""
    if item["type"] in _OURS:
        return item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    text = item["msg"]
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    return text


def instead(item: ErrorDetails, field: FieldInfo | None) -> str:
    """What a field of the wrong shape could be, as `name: value` in YAML; empty if unknown.

    The value itself in a shape that is accepted, or else a small example.
    """
    is_shape = refusal(item).endswith(tuple(f"Input should be a {each}" for each in _SHAPES))
    if field is None or not is_shape or not field.repr:
        return ""
    bounds = tuple(field.metadata)
    kind: Any = Annotated[(field.annotation, *bounds)] if bounds else field.annotation
    accepts: TypeAdapter[Any] = TypeAdapter(kind)
    for candidate in _candidates(field.annotation, item["input"]):
        with suppress(ValidationError):
            accepts.validate_python(candidate)
            text = yaml.safe_dump(candidate, default_flow_style=True, width=1000, sort_keys=False)
            return f"{item['loc'][-1]}: {text.strip()}"
    return ""


def _candidates(annotation: Any, value: Any) -> Iterator[Any]:
    """The value as an item, or as that of a field; then examples without it."""
    model = _model_in(annotation)
    fields = {} if model is None else _open_fields(model)
    is_plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    if (is_plain or isinstance(value, Mapping)) and len(repr(value)) <= _MOST_CHARS:
        named = [{name: value} for name in fields] if is_plain else []
        yield from named
        yield [value]
        yield from ([each] for each in named)
    needed = {name: field for name, field in fields.items() if field.is_required()}
    small = {name: _sample(field) for name, field in needed.items()}
    for example in (small, *({name: _sample(field)} for name, field in fields.items())):
        if example:
            yield example
            yield [example]


def _sample(field: FieldInfo) -> Any:
    """A value for a field: its default, a choice that it allows, or a number."""
    default = field.get_default(call_default_factory=False)
    if isinstance(default, (str, int, float)) and default != "":
        return default
    choices = next(_literals(field.annotation), ())
    return choices[0] if choices else _NUMBER


def _literals(annotation: Any) -> Iterator[tuple[Any, ...]]:
    if get_origin(annotation) is Literal:
        yield get_args(annotation)
    for inner in get_args(annotation):
        yield from _literals(inner)


def _open_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Fields by their names in files, without secret ones."""
    fields = model.model_fields.items()
    return {field.alias or name: field for name, field in fields if field.repr}


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_model_in(each) for each in get_args(annotation))
    return next((found for found in inner if found is not None), None)
