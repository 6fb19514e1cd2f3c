"""Texts that parsers of JSON and of names must refuse or accept, and messages that carry them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

TEXTS: tuple[str, ...] = (
    "",
    "{",
    "not json",
    "null",
    "5",
    '"text"',
    "[]",
    "{}",
    "[[]]",
    "[null]",
    '[{"kind": 5}]',
    '{"a": 1, "a": 2}',
    "NaN",
    "[1e999]",
    "1" * 5_000,
    '"\\ud800"',
    '["\\u0000"]',
    "\0",
    "\x1b[2J\u202e",
    "[" * 100_000,
    '{"a":' * 100_000,
    "[" * 500 + "]" * 500,
    "[" + "0," * 50_000 + "0]",
    "../" * 100,
    "x" * 1_000_000,
)


def mutants(message: Message) -> Iterator[tuple[str, Message]]:
    """Copies of a message with one text, or one key of a map, replaced by each of `TEXTS`.

    Yields the path of the field too. Every text and bytes field of the message's type is replaced,
    of nested messages as well, whether it is set or not.
    """
    for path in _paths(message.DESCRIPTOR):
        for text in TEXTS:
            changed = type(message)()
            changed.CopyFrom(message)
            _put(changed, path, text)
            yield ".".join(field.name for field in path), changed


Path = tuple[FieldDescriptor, ...]


def _paths(kind: Any, above: Path = ()) -> Iterator[Path]:
    for field in kind.fields:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING or is_map:
            yield (*above, field)
        elif field.message_type is not None and field.message_type not in {
            each.message_type for each in above
        }:
            yield from _paths(field.message_type, (*above, field))


def _put(message: Any, path: Path, text: str) -> None:
    for field in path[:-1]:
        inner = getattr(message, field.name)
        if field.is_repeated:
            inner = inner[0] if len(inner) else inner.add()
        message = inner
    last = path[-1]
    if last.message_type is not None:
        _put_key(getattr(message, last.name), last, text)
        return
    value: str | bytes = text.encode() if last.type == FieldDescriptor.TYPE_BYTES else text
    if last.is_repeated:
        getattr(message, last.name)[:] = [value]
    else:
        setattr(message, last.name, value)


def _put_key(entries: Any, field: Any, text: str) -> None:
    kind = field.message_type.fields_by_name["key"].cpp_type
    if kind != FieldDescriptor.CPPTYPE_STRING:
        return
    value = field.message_type.fields_by_name["value"]
    if value.message_type is not None:
        entries[text].SetInParent()
    elif value.type == FieldDescriptor.TYPE_BYTES:
        entries[text] = text.encode()
    elif value.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        entries[text] = text
    else:
        entries[text] = 1
