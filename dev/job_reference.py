"""Generates the tables of docs/job-file.md from the models of the job file."""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from paceline.config import JobSpec
from paceline.config.base import PluginSpec
from paceline.config.options import model_of, options_source
from paceline.plugins import registry

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "job-file.md"
BEGIN = "<!-- tables: written by dev/job_reference.py -->\n"
END = "<!-- end of tables -->\n"
NAMES = {int: "integer", float: "number", str: "string", bool: "true or false", Any: "anything"}
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
LENGTHS = {"min_length": "at least", "max_length": "at most"}
# Kinds of plug-ins and the fields that name them, in the order of a job file.
KINDS = {
    "environments": "tasks.environment",
    "transforms": "tasks.transform",
    "topologies": "sampling.topology",
    "rewards": "reward",
    "samplers": "experience.sampler",
    "allocators": "experience.allocator",
    "replays": "experience.replay",
    "filters": "experience.filters",
    "advantages": "experience.advantage",
    "engines": "rollout.engine",
    "proximals": "trainer.objective.proximal",
    "corrections": "trainer.objective.corrections",
    "surrogates": "trainer.objective.surrogate",
    "regularisers": "trainer.objective.regularisers",
    "aggregations": "trainer.objective.aggregation",
    "trackers": "tracking",
}
PAGES = {
    "topologies": "topology",
    **dict.fromkeys(
        ("proximals", "corrections", "surrogates", "regularisers", "aggregations"), "objective"
    ),
}
Row = tuple[str, ...]
Places = dict[type[BaseModel], str]


def files() -> dict[Path, str]:
    """Path and content of the page."""
    head, _, rest = DOCUMENT.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    parts = [*_sections(JobSpec, "", {}), *_plugins()]
    return {DOCUMENT: head + BEGIN + "\n" + "\n".join(parts) + "\n" + END + tail}


def _sections(model: type[BaseModel], path: str, places: Places) -> Iterator[str]:
    """The table of a section, then those of the sections in it; each model has one."""
    yield f"{'#' * min(2 + path.count('.'), 4)} {path or 'The whole file'}\n"
    if path:
        more = " Further keys are options of the plug-in." if issubclass(model, PluginSpec) else ""
        yield f"{_first_paragraph(model)}{more}\n"
    inner = {name: _section_in(field.annotation) for name, field in model.model_fields.items()}
    todo = [name for name, each in inner.items() if each and each not in places]
    for name, each in inner.items():
        if each:
            places.setdefault(each, f"{path}.{name}".lstrip("."))
    rows = (_row(model, name, field, places) for name, field in model.model_fields.items())
    yield _table(("field", "type", "default", "allowed", "what"), rows)
    for name in todo:
        if (each := inner[name]) and places[each] == f"{path}.{name}".lstrip("."):
            yield from _sections(each, places[each], places)


def _row(model: type[BaseModel], name: str, field: FieldInfo, places: Places) -> Row:
    inner = _section_in(field.annotation)
    text = documented(model, name) or (_first_paragraph(inner) if inner else "")
    if not text:
        raise ValueError(f"{model.__name__}.{name}: has no docstring")
    if inner:
        text += f" [Fields](#{places[inner].replace('.', '')})."
    return (
        f"`{field.alias or name}`",
        _type(field.annotation),
        _default(field),
        ", ".join(_allowed(field.annotation, field.metadata)),
        text,
    )


def _table(head: Row, rows: Iterator[Row]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation; plug-ins have no fields but `kind`, unless they say so."""
    if isinstance(annotation, type):
        is_section = issubclass(annotation, BaseModel) and [*annotation.model_fields] != ["kind"]
        return annotation if is_section else None
    found = (_section_in(each) for each in get_args(annotation))
    return next((each for each in found if each is not None), None)


@cache
def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The strings below the fields of a class."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=told)):
                found[name] = " ".join(str(told).split())
            case _:
                pass
    return found


def documented(model: type[BaseModel], name: str) -> str:
    """What the models say of a field; empty if nothing does."""
    for each in model.__mro__:
        if issubclass(each, BaseModel) and each is not BaseModel and name in _docstrings(each):
            return _docstrings(each)[name]
    return ""


def _first_paragraph(model: type[BaseModel]) -> str:
    return " ".join((inspect.getdoc(model) or "").partition("\n\n")[0].split())


def _type(annotation: Any) -> str:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inside[0])
    if origin is Literal:
        return " or ".join(f"`{each}`" for each in inside)
    if origin in (Union, UnionType):
        return " or ".join("null" if each is NoneType else _type(each) for each in inside)
    if origin in (tuple, list):
        return f"list of {_type(inside[0])}"
    if origin is dict:
        return "mapping" if inside[1] is Any else f"mapping of names to {_type(inside[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "plug-in" if issubclass(annotation, PluginSpec) else "section"
    return NAMES.get(annotation, "any value")


def _allowed(annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[str]:
    """Bounds and patterns, also of what is in a list or a union."""
    of_text = annotation is str
    for each in metadata:
        yield from _bounds(each, "characters" if of_text else "entries")
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        extra = [m for each in inside[1:] for m in getattr(each, "metadata", (each,))]
        yield from _allowed(inside[0], extra)
    elif origin in (Union, UnionType):
        for each in inside:
            yield from _allowed(each)
    elif origin in (tuple, list):
        inner = ", ".join(_allowed(inside[0]))
        if inner and _section_in(inside[0]) is None:
            yield f"each {inner}"


def _bounds(bound: Any, unit: str) -> Iterator[str]:
    for name, sign in SIGNS.items():
        value = getattr(bound, name, None)
        if value is not None and abs(value) < sys.maxsize:
            yield f"{sign} {_number(value)}"
    for name, words in LENGTHS.items():
        value = getattr(bound, name, None)
        if value is not None:
            yield f"{words} {_number(value)} {unit}"
    pattern = getattr(bound, "pattern", None)
    if pattern:
        yield f"`{pattern}`"


def _number(value: float) -> str:
    if isinstance(value, float) and (abs(value) >= 1e7 or 0 < abs(value) < 1e-3):
        return f"{value:g}"
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value is PydanticUndefined else _shown(value)


def _shown(value: Any) -> str:
    """A default as YAML; that of a section is told by its own table."""
    if isinstance(value, PluginSpec):
        return f"`{value.kind}`"
    if isinstance(value, BaseModel):
        return "its own"
    if isinstance(value, (tuple, list)) and value and isinstance(value[0], PluginSpec):
        return ", ".join(map(_shown, value))
    return f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value, default=lambda model: model.model_dump(exclude_defaults=True))
    first, _, rest = value.partition("\n")
    return f"{first} …" if rest else first or '""'


def _plugins() -> Iterator[str]:
    """The options of the built-in plug-ins of each kind."""
    yield "## Options of built-in plug-ins\n"
    yield (
        "They stand beside `kind`, and in `tasks.options` for environments. "
        "`paceline plugins` lists what is installed.\n"
    )
    for kind, place in KINDS.items():
        rows = [_options(kind, name) for name in sorted(registry.built_in(kind))]
        yield f"### {kind.capitalize()}\n"
        yield f"`{place}`; [how to write one](plugins/{PAGES.get(kind, kind.rstrip('s'))}.md).\n"
        yield _table(("name", "options and defaults"), iter(rows))


def _options(kind: str, name: str) -> Row:
    source = options_source(kind, name, import_plugin=registry.options_of(kind, name) is None)
    fields = {} if source is None else model_of(source, kind).model_fields
    shown = (_option(field.alias or own, field) for own, field in fields.items())
    return f"`{name}`", ", ".join(shown)


def _option(name: str, field: FieldInfo) -> str:
    bounds = (each for each in _allowed(field.annotation, field.metadata) if "char" not in each)
    choices = [f"of {_type(field.annotation)}"] if get_origin(field.annotation) is Literal else []
    return f"`{name}` ({', '.join((_default(field), *choices, *bounds))})"
