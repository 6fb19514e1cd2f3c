"""Documents that people send: JSON, or YAML whose scalars are those of JSON.

What is read costs time and memory in proportion to its length, whatever it says: depth and number
of values are bounded, and nothing in a document stands for more than itself (no aliases, no tags,
no numbers of base 60).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn, cast

import yaml

from paceline.errors import InvalidError

MAX_DEPTH = 64
MAX_VALUES = 20_000
MAX_INTEGER = 2**63 - 1
# Numbers are refused by `_check`; more digits would take the square of their number to read.
_MAX_DIGITS = 1_000
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)", re.ASCII)
_FLOAT = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]*)?([eE][-+]?[0-9]+)?", re.ASCII)
_CONSTANTS: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}
_DIRECTIVE = re.compile(r"^%", re.MULTILINE)
_NOTHING = object()


def read_json(text: str | bytes, *, what: str) -> Any:
    """The value of a JSON document; `what` begins every message.

    Raises:
        InvalidError: it is not JSON, or too deep, too large, or has values that no store keeps.
    """
    try:
        found = json.loads(
            _decoded(text, what),
            object_pairs_hook=_mapping,
            parse_constant=_no_number,
            parse_int=_integer,
        )
    except RecursionError:
        raise InvalidError(_too_deep(what)) from None
    except ValueError as error:
        raise InvalidError(f"{what}: not JSON: {error}") from None
    return check(found, what=what)


def read_yaml(text: str | bytes, *, what: str) -> Any:
    """The value of a YAML document; keys are text, as they stand.

    Raises:
        InvalidError: as `read_json`; or it has aliases, tags or directives. Quotes nothing of it.
    """
    text = _decoded(text, what)
    if _DIRECTIVE.search(text):
        raise InvalidError(f"{what}: YAML directives (lines that begin with %) are not accepted")
    try:
        # Of the parsers only libyaml's is fast; both give the same events.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        return check(_Builder(what).build(yaml.parse(text, Loader=loader)), what=what)
    except yaml.YAMLError as error:
        raise InvalidError(f"{what}: not YAML{_at(error)}") from None


def check(value: Any, *, what: str) -> Any:
    """The value, if it is not too deep or large and each part can be stored and sent.

    Raises:
        InvalidError: see above.
    """
    level, count = [value], 0
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                found = cast(dict[str, Any], each)
                for key in found:
                    _check_text(key, what)
                below += found.values()
            elif isinstance(each, list):
                below += cast(list[Any], each)
            else:
                _check_scalar(each, what)
        if not below:
            return value
        level, count = below, count + len(below)
        if count > MAX_VALUES:
            raise InvalidError(_too_many(what))
    raise InvalidError(_too_deep(what))


class _Builder:
    """Makes a value of the events of a parser, without recursion."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._open: list[list[Any] | dict[str, Any]] = []
        self._keys: list[Any] = []  # one for each that is open; of lists never used
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
        made: list[Any] | dict[str, Any] = [] if isinstance(event, yaml.SequenceStartEvent) else {}
        self._put(made, event)
        self._open.append(made)
        self._keys.append(_NOTHING)

    def _scalar(self, event: Any) -> None:
        if self._open and isinstance(self._open[-1], dict) and self._keys[-1] is _NOTHING:
            if event.value in self._open[-1]:
                self._refuse(event, "a key stands twice in one section")
            self._keys[-1] = event.value
        else:
            # Quoted or a block: text.
            self._put(_plain(event.value) if event.implicit[0] else event.value, event)

    def _put(self, value: Any, event: Any) -> None:
        if not self._open:
            if self._root is not _NOTHING:
                self._refuse(event, "there is more than one document")
            self._root = value
            return
        here = self._open[-1]
        if isinstance(here, list):
            here.append(value)
        elif self._keys[-1] is _NOTHING:
            self._refuse(event, "a key must be text")
        else:
            here[self._keys[-1]] = value
            self._keys[-1] = _NOTHING

    def _refuse(self, event: Any, why: str) -> NoReturn:
        raise InvalidError(f"{self._what}: YAML{_at(event)}: {why}")


def _plain(text: str) -> Any:
    """What a plain scalar of YAML stands for: a number or a constant of JSON, else text."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        return _integer(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        return MAX_INTEGER + 1  # is refused with the others that are too large
    return int(text)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return made


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _check_scalar(value: Any, what: str) -> None:
    if isinstance(value, str):
        _check_text(value, what)
    elif isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise InvalidError(f"{what}: an integer does not fit into 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidError(f"{what}: a number is not finite")


def _check_text(text: str, what: str) -> None:
    if "\0" in text:
        raise InvalidError(f"{what}: a text holds the character NUL")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidError(f"{what}: a text holds half of a surrogate pair") from None


def _decoded(text: str | bytes, what: str) -> str:
    try:
        return text if isinstance(text, str) else text.decode()
    except UnicodeDecodeError as error:
        raise InvalidError(f"{what}: not UTF-8 at byte {error.start}") from None


def _at(where: Any) -> str:
    mark = getattr(where, "problem_mark", None) or getattr(where, "start_mark", None)
    return "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"


def _too_deep(what: str) -> str:
    return f"{what}: is nested too deeply; at most {MAX_DEPTH} levels are allowed"


def _too_many(what: str) -> str:
    return f"{what}: has too many values; at most {MAX_VALUES} are allowed"
