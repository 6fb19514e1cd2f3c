"""Bounds on users' messages, whatever their type."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from paceline.errors import InvalidError
from paceline.platform.transport.operations import input_of, operations
from paceline.platform.transport.rpc import MAX_MESSAGE_BYTES

MAX_SMALL_BYTES = 64 << 10
MAX_PARTS = 1_000
MAX_TEXT = 1_000
MAX_ITEMS = 100
# The largest integer that every JSON parser represents exactly.
MAX_INTEGER = 2**53 - 1
# Checked by their own code: job files, their code, the small files of a model, trajectories.
_CHECKED_ELSEWHERE = frozenset({"spec_json", "files", "archive", "lines"})
_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
_INTEGERS = (
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
)
Request = TypeVar("Request", bound=Message)


def checked(message: Request, prefix: str = "") -> Request:
    """Check a message and return it.

    Raises:
        InvalidError: a string or a list in it is too long, a number is negative or not finite.
    """
    for field, value in message.ListFields():
        name = prefix + field.name
        if field.name in _CHECKED_ELSEWHERE:
            continue
        values = value if field.is_repeated else [value]
        if len(values) > MAX_ITEMS:
            raise InvalidError(f"{name}: has {len(values)} items; at most {MAX_ITEMS} are allowed")
        for item in values:
            _check(field, name, item)
    return message


def _check(field: FieldDescriptor, name: str, value: Any) -> None:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_MESSAGE:
        checked(value, prefix=f"{name}.")
    elif kind == FieldDescriptor.CPPTYPE_STRING:
        _check_text(name, value)
    elif kind in _INTEGERS:
        _check_integer(name, value, max_of(field))
    elif kind in _FLOATS and not math.isfinite(value):
        raise InvalidError(f"{name}: a finite number is needed (got {value!r})")


def _check_text(name: str, value: str) -> None:
    if len(value) > MAX_TEXT:
        raise InvalidError(f"{name}: has {len(value)} characters; at most {MAX_TEXT} are allowed")
    if "\0" in value:
        raise InvalidError(f"{name}: no NUL is allowed (got {value[:80]!r})")


def _check_integer(name: str, value: int, largest: int) -> None:
    if not 0 <= value <= largest:
        raise InvalidError(f"{name}: an integer from 0 to {largest} is needed (got {value})")


def max_of(field: FieldDescriptor) -> int:
    """The largest integer that a field accepts."""
    return input_of(field).max or MAX_INTEGER


def is_large(method: str) -> bool:
    """Whether requests of `/package.Service/Method` may be large."""
    operation = operations().get(method)
    return operation is not None and operation.large


def check_size(method: str, data: bytes) -> None:
    """For the interceptor: raise `InvalidError` if a message is too large for its method.

    A message with many small fields would take many times its size when parsed.
    """
    limit = MAX_MESSAGE_BYTES if is_large(method) else MAX_SMALL_BYTES
    if len(data) > limit:
        raise InvalidError(f"message: has {len(data)} bytes; at most {limit} are allowed")
    if count_fields(data, MAX_PARTS) > MAX_PARTS:
        raise InvalidError(f"message: has too many parts; at most {MAX_PARTS} are allowed")


def count_fields(data: bytes, limit: int) -> int:
    """Number of fields in an encoded message; stops counting above `limit`.

    Raises:
        InvalidError: it contains a group.
    """
    number, at = 0, 0
    while at < len(data) and number <= limit:
        number += 1
        tag, at = _varint(data, at)
        wire_type = tag & 7
        if wire_type == 0:
            _, at = _varint(data, at)
        elif wire_type == 2:
            size, at = _varint(data, at)
            at += size
        elif wire_type in (1, 5):
            at += 8 if wire_type == 1 else 4
        else:
            raise InvalidError("message: has parts that no message of this service has")
    return number


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            break
    return value, at
