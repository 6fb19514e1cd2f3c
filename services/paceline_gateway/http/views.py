"""Converts messages to REST documents: fields of the same names, typed by the document."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin

from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from pydantic import BaseModel

from paceline.config.quota import Quota
from paceline.front.api import tenants
from paceline.front.api.documents import document_of
from paceline.platform import wire

Convert = Callable[[Any], Any]


def view(message: Message) -> BaseModel:
    """The REST document of a message."""
    return converter(document_of(message.DESCRIPTOR.name), message.DESCRIPTOR)(message)


@cache
def converter(annotation: Any, descriptor: Descriptor | EnumDescriptor | None) -> Convert:
    """A function from a value in a message to one of this annotation.

    `descriptor` is the type of the value if it is a message or of an enumeration.
    """
    if annotation is Quota:
        return tenants.quota_from
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (list, tuple, Sequence):
        convert = converter(inner[0], descriptor)
        return lambda values: list(map(convert, values))
    if descriptor is Struct.DESCRIPTOR:
        return wire.from_struct
    if origin in (dict, Mapping):
        return dict
    if origin in (Union, UnionType):
        return converter(next(arg for arg in inner if arg is not NoneType), descriptor)
    if isinstance(descriptor, EnumDescriptor):
        return wire.members_of(annotation, descriptor).get  # 0: not set
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and descriptor:
        return _document(annotation, descriptor)
    if is_dataclass(annotation) and descriptor:
        return lambda message: wire.from_proto(message, annotation)
    return _identity


def _identity(value: Any) -> Any:
    return value


def _document(model: type[BaseModel], descriptor: Descriptor) -> Convert:
    reads = {
        name: _field(name, field.annotation, descriptor)
        for name, field in model.model_fields.items()
    }

    def convert(message: Any) -> BaseModel:
        # Not validated again, since it comes from our own service: a page may hold megabytes.
        return model.model_construct(**{name: read(message) for name, read in reads.items()})

    return convert


def _field(name: str, annotation: Any, descriptor: Descriptor) -> Convert:
    """A function that reads a field of a message; JSON fields are named `<name>_json`.

    Raises:
        KeyError: the message has no such field.
    """
    if name not in descriptor.fields_by_name:
        text = descriptor.fields_by_name[f"{name}_json"].name
        return lambda message: _object(getattr(message, text))
    field = descriptor.fields_by_name[name]
    convert = converter(annotation, field.message_type or field.enum_type)
    if NoneType in get_args(annotation) and field.has_presence:
        return lambda message: convert(getattr(message, name)) if message.HasField(name) else None
    return lambda message: convert(getattr(message, name))


def _object(text: str) -> dict[str, Any]:
    """Parse a JSON object; empty if it is damaged, so that jobs are listed all the same."""
    try:
        parsed = json.loads(text or "{}")
    except ValueError:
        return {}
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}
