"""Parsers for user documents: JSON, or YAML with the scalars of JSON.

Parsing takes time and memory proportional to the length of a document, whatever its content: depth
and number of values are bounded, and nothing expands (no aliases, no tags, no base-60 numbers).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn, cast

import yaml

from paceline.errors import InvalidError, MalformedError

MAX_DEPTH = 64
MAX_VALUES = 20_000
MAX_INTEGER = 2**63 - 1
# Large integers are refused by `check`; converting more digits would take quadratic time.
_MAX_DIGITS = 1_000
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)", re.ASCII)
_FLOAT = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]*)?([eE][-+]?[0-9]+)?", re.ASCII)
_CONSTANTS: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}
_DIRECTIVE = re.compile(r"^%", re.MULTILINE)
_NOTHING = object()


def read_json(text: str | bytes, *, what: str) -> Any:
    """Parse a JSON document; `what` begins every message.

    Raises:
        MalformedError: it is not JSON.
        InvalidError: it is too deep or too large, or has values that cannot be stored.
    """
    try:
        document = json.loads(
            _decoded(text, what),
            object_pairs_hook=_mapping,
            parse_constant=_no_number,
            parse_int=_integer,
        )
    except RecursionError:
        raise InvalidError(_too_deep(what)) from None
    except ValueError as error:
        raise MalformedError(f"{what}: not JSON: {error}") from None
    return check(document, what=what)


def read_yaml(text: str | bytes, *, what: str) -> Any:
    """Parse a YAML document; keys are kept as text.

    Raises:
        MalformedError: it is not YAML.
        InvalidError: as `read_json`, or it has aliases, tags or directives; never quotes the text.
    """
    text = _decoded(text, what)
    if _DIRECTIVE.search(text):
        raise InvalidError(f"{what}: YAML directives (lines that begin with %) are not accepted")
    try:
        # libyaml's parser is the fast one; both yield the same events.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        return check(_Builder(what).build(yaml.parse(text, Loader=loader)), what=what)
    except yaml.YAMLError as error:
        raise MalformedError(f"{what}: not YAML{_at(error)}") from None


def check(value: Any, *, what: str) -> Any:
    """Return the value if it is within the bounds and can be stored and sent.

    Raises:
        InvalidError: otherwise.
    """
    level, count = [value], 0
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                mapping = cast(dict[str, Any], item)
                for key in mapping:
                    _check_text(key, what)
                below += mapping.values()
            elif isinstance(item, list):
                below += cast(list[Any], item)
            else:
                _check_scalar(item, what)
        if not below:
            return value
        level, count = below, count + len(below)
        if count > MAX_VALUES:
            raise InvalidError(_too_many(what))
    raise InvalidError(_too_deep(what))


class _Builder:
    """Builds a value from parser events, without recursion."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._open: list[list[Any] | dict[str, Any]] = []
        self._keys: list[Any] = []  # one per open collection; unused for lists
        self._root: Any = _NOTHING
        self._count = 0

    def build(self, events: Iterator[Any]) -> Any:
        for event in events:
            if isinstance(event, yaml.AliasEvent):
                self._refuse(event, "aliases (*name) are not accepted; write them out")
            elif isinstance(event, yaml.NodeEvent):
                self._count += 1
                if self._count > 2 * MAX_VALUES:  # keys too
                    raise InvalidError(_too_many(self._what))
                self._node(event)
            elif isinstance(event, yaml.CollectionEndEvent):
                self._open.pop()
                self._keys.pop()
        return None if self._root is _NOTHING else self._root

    def _node(self, event: Any) -> None:
        if event.tag is not None:
            self._refuse(event, "tags (!name) are not accepted")
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
            return
        if len(self._open) >= MAX_DEPTH:
            raise InvalidError(_too_deep(self._what))
        new: list[Any] | dict[str, Any] = [] if isinstance(event, yaml.SequenceStartEvent) else {}
        self._put(new, event)
        self._open.append(new)
        self._keys.append(_NOTHING)

    def _scalar(self, event: Any) -> None:
        if self._open and isinstance(self._open[-1], dict) and self._keys[-1] is _NOTHING:
            if event.value in self._open[-1]:
                self._refuse(event, "duplicate key in one section")
            self._keys[-1] = event.value
        else:
            # Quoted and block scalars are text.
            self._put(_plain(event.value) if event.implicit[0] else event.value, event)

    def _put(self, value: Any, event: Any) -> None:
        if not self._open:
            if self._root is not _NOTHING:
                self._refuse(event, "there is more than one document")
            self._root = value
            return
        container = self._open[-1]
        if isinstance(container, list):
            container.append(value)
        elif self._keys[-1] is _NOTHING:
            self._refuse(event, "a key must be text")
        else:
            container[self._keys[-1]] = value
            self._keys[-1] = _NOTHING

    def _refuse(self, event: Any, why: str) -> NoReturn:
        raise InvalidError(f"{self._what}: YAML{_at(event)}: {why}")


def _plain(text: str) -> Any:
    """The value of a plain YAML scalar: a JSON number or constant, else text."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        return _integer(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        return MAX_INTEGER + 1  # refused by `check` like any other that is too large
    return int(text)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("duplicate key in one object")
    return mapping


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check_scalar(value: Any, what: str) -> None:
    if isinstance(value, str):
        _check_text(value, what)
    elif isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise InvalidError(f"{what}: an integer does not fit into 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidError(f"{what}: a number is not finite")


def _check_text(text: str, what: str) -> None:
    if "\0" in text:
        raise InvalidError(f"{what}: a text contains the character NUL")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidError(f"{what}: a text contains half of a surrogate pair") from None


def _decoded(text: str | bytes, what: str) -> str:
    try:
        return text if isinstance(text, str) else text.decode()
    except UnicodeDecodeError as error:
        raise MalformedError(f"{what}: not UTF-8 at byte {error.start}") from None


def _at(where: Any) -> str:
    mark = getattr(where, "problem_mark", None) or getattr(where, "start_mark", None)
    return "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"


def _too_deep(what: str) -> str:
    return f"{what}: is nested too deeply; at most {MAX_DEPTH} levels are allowed"


def _too_many(what: str) -> str:
    return f"{what}: has too many values; at most {MAX_VALUES} are allowed"
