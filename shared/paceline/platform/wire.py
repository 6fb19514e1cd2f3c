"""Converts domain dataclasses to and from the protobuf messages with the same fields.

A converter is generated once per pair of classes from the fields of the dataclass: numbers, strings
and bytes are copied, tuples become repeated fields, dicts become maps, nested dataclasses use their
own converters, an unset optional field is `None` or the default, enumerations are matched by member
name, and dicts of arbitrary content become `google.protobuf.Struct`. Fields have the same names on
both sides except those in `RENAMED`. Fields that only the message has are left for the caller.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct, Value

from paceline import types as t
from paceline.errors import InvalidError

M = TypeVar("M", bound=Message)
N = TypeVar("N")
E = TypeVar("E", bound=StrEnum)
Convert = Callable[[Any], Any]

RENAMED: dict[tuple[type, str], str] = {
    (t.Job, "spec"): "spec_json",
}
"""Message fields with another name, by dataclass and field."""


def to_proto(noun: Any, kind: type[M]) -> M:
    """Convert a dataclass to a message."""
    return _writer(type(noun), kind)(noun)


def from_proto(message: Message, kind: type[N]) -> N:
    """Convert a message to a dataclass.

    Raises:
        InvalidError: an enumeration value is unknown, or unset where one is required.
    """
    return _reader(type(message), kind)(message)


def to_fields(message: Message, kind: type) -> dict[str, Any]:
    """The fields of a dataclass as a dict, nested ones too: cheaper to make, and equal as JSON.

    Raises:
        InvalidError: as `from_proto`.
    """
    return _reader(type(message), kind, as_dict=True)(message)


def to_struct(values: Mapping[str, Any]) -> Struct:
    """Convert a JSON object to a message, whose numbers are doubles."""
    made = Struct()
    made.update(values)
    return made


def from_struct(message: Struct) -> dict[str, Any]:
    """Convert a message to a JSON object; whole numbers become `int`."""
    return {name: _plain(value) for name, value in message.fields.items()}


def _plain(value: Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        number = value.number_value
        return int(number) if number.is_integer() else number
    if kind == "struct_value":
        return from_struct(value.struct_value)
    if kind == "list_value":
        return [_plain(each) for each in value.list_value.values]
    return None if kind in (None, "null_value") else getattr(value, kind)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A dataclass field and its counterpart in the message."""

    noun: Field[Any]
    hint: Any  # its type, without None
    nullable: bool
    proto: FieldDescriptor

    @property
    def repeated(self) -> bool:
        """Whether the message field is repeated or a map."""
        return bool(self.proto.is_repeated)

    @property
    def is_struct(self) -> bool:
        """Whether the field is a dict of arbitrary content."""
        return self.proto.message_type is Struct.DESCRIPTOR

    @property
    def optional(self) -> bool:
        """Whether the message field is declared optional, or a nested message would be empty."""
        return self.proto.has_presence and (self.nullable or self.proto.message_type is None)

    @property
    def unset(self) -> Any:
        """The value of an optional field that is not set."""
        return None if self.nullable else self.default

    @property
    def default(self) -> Any:
        """The default in the dataclass; `MISSING` if it has none."""
        made = self.noun.default_factory
        return self.noun.default if made is MISSING else made()


@cache
def _writer(noun: type, kind: type[Message]) -> Convert:
    arguments, names = _arguments(noun, kind)
    return _compiled("noun", f"kind({', '.join(arguments)})", {**names, "kind": kind})


@cache
def _nested_writer(noun: type, kind: type[Message]) -> Convert:
    """As `_writer`, but to keyword arguments: a constructor would copy a message, not a dict."""
    arguments, names = _arguments(noun, kind)
    return _compiled("noun", f"dict({', '.join(arguments)})", names)


def _arguments(noun: type, kind: type[Message]) -> tuple[list[str], dict[str, Any]]:
    """The arguments of a message's constructor as source, and the names in it."""
    names: dict[str, Any] = {}
    arguments: list[str] = []
    for pair in _pairs(noun, kind):
        value = f"noun.{pair.noun.name}"
        if write := _write(pair):
            names[f"write_{pair.noun.name}"] = write
            value = f"write_{pair.noun.name}({value})"
        if pair.optional:
            names[f"unset_{pair.noun.name}"] = pair.unset
            field = f"noun.{pair.noun.name}"
            value = f"None if {field} == unset_{pair.noun.name} else {value}"
        arguments.append(f"{pair.proto.name}={value}")
    return arguments, names


@cache
def _reader(kind: type[Message], noun: type, *, as_dict: bool = False) -> Convert:
    names: dict[str, Any] = {"kind": noun}
    arguments: list[str] = []
    for pair in _pairs(noun, kind):
        value = f"message.{pair.proto.name}"
        if read := _read(pair, as_dict=as_dict):
            names[f"read_{pair.noun.name}"] = read
            value = f"read_{pair.noun.name}({value})"
        if pair.optional:
            names[f"unset_{pair.noun.name}"] = pair.unset
            value = f"{value} if message.HasField('{pair.proto.name}') else unset_{pair.noun.name}"
        arguments.append(f"'{pair.noun.name}': {value}" if as_dict else value)
    whole = ", ".join(arguments)
    return _compiled("message", f"{{{whole}}}" if as_dict else f"kind({whole})", names)


def _compiled(argument: str, expression: str, names: dict[str, Any]) -> Convert:
    """Compile a function of one argument from source, as fast as a hand-written one."""
    return eval(f"lambda {argument}: {expression}", names)


def _pairs(noun: type, kind: type[Message]) -> list[_Pair]:
    """The fields of a dataclass; raises `TypeError` for one that the message lacks."""
    hints, known = get_type_hints(noun), kind.DESCRIPTOR.fields_by_name
    pairs: list[_Pair] = []
    for each in fields(noun):
        name = RENAMED.get((noun, each.name), each.name)
        if name not in known:
            raise TypeError(f"{kind.__name__} has no field {name} for {noun.__name__}.{each.name}")
        hint, nullable = _without_none(hints[each.name])
        pairs.append(_Pair(each, hint, nullable, cast("Any", known[name])))
    return pairs


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    (hint,) = (arg for arg in get_args(hint) if arg is not types.NoneType)
    return hint, True


def _element(hint: Any) -> Any:
    """The element type of a tuple; any other type unchanged."""
    return get_args(hint)[0] if get_origin(hint) is tuple else hint


def _class_of(proto: FieldDescriptor) -> type[Message]:
    return proto.message_type._concrete_class  # pyright: ignore


def _write(pair: _Pair) -> Convert | None:
    element = _element(pair.hint)
    if pair.is_struct:
        return to_struct
    if _is_enum(element):
        numbers = _numbers(element, pair.proto)
        if numbers is None:
            return None
        write: Convert = {None: 0, **numbers}.__getitem__ if pair.nullable else numbers.__getitem__
    elif is_dataclass(element):
        write = _nested_writer(element, _class_of(pair.proto))  # type: ignore[arg-type]
    else:
        return None
    return (lambda values: [write(value) for value in values]) if pair.repeated else write


def _read(pair: _Pair, *, as_dict: bool) -> Convert | None:
    element = _element(pair.hint)
    if pair.is_struct:
        return from_struct
    if get_origin(pair.hint) is dict:
        return dict
    if _is_enum(element):
        read = _enum_reader(element, pair)
    elif is_dataclass(element):
        read = _reader(_class_of(pair.proto), element, as_dict=as_dict)  # type: ignore[arg-type]
    else:
        return tuple if pair.repeated else None
    return (lambda values: tuple([read(value) for value in values])) if pair.repeated else read


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, StrEnum)


def _numbers(kind: type[StrEnum], proto: FieldDescriptor) -> dict[StrEnum, Any] | None:
    """The numbers of an enumeration's members; None if the message field is a string."""
    return None if proto.enum_type is None else numbers_of(kind, proto.enum_type)


@cache
def numbers_of(kind: type[E], proto: EnumDescriptor) -> dict[E, Any]:
    """The protobuf numbers of an enumeration's members.

    `Color.DARK_RED` is `COLOR_DARK_RED` in protobuf; 0, `COLOR_UNSPECIFIED`, is not a member.
    """
    known = proto.values_by_name
    prefix = proto.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {member: known[prefix + member.name].number for member in kind}


@cache
def _enum_of(kind: type[StrEnum]) -> EnumDescriptor:
    """The protobuf enumeration of the same name."""
    return descriptor_pool.Default().FindEnumTypeByName(f"paceline.v1.{kind.__name__}")


def number_of(member: StrEnum | None) -> Any:
    """The number of a member in the protobuf enumeration of the same name; 0 for None."""
    return 0 if member is None else numbers_of(type(member), _enum_of(type(member)))[member]


def member_of(kind: type[E], number: int, field: str) -> E:
    """The member with this number in the protobuf enumeration of the same name.

    Raises:
        InvalidError: there is none; the message names `field`.
    """
    try:
        return members_of(kind, _enum_of(kind))[number]
    except KeyError:
        problem = f"{number} is not known" if number else "is not set"
        raise InvalidError(f"{field}: {problem}; allowed: {', '.join(kind)}") from None


@cache
def members_of(kind: type[E], proto: EnumDescriptor) -> dict[int, E]:
    """The members of an enumeration by their protobuf numbers."""
    return {number: member for member, number in numbers_of(kind, proto).items()}


def _enum_reader(kind: type[StrEnum], pair: _Pair) -> Convert:
    numbers = _numbers(kind, pair.proto)
    known: dict[Any, StrEnum | None] = {str(member): member for member in kind}
    if numbers is not None:
        known = {number: member for member, number in numbers.items()}
    unset = pair.unset
    if isinstance(unset, StrEnum) or pair.nullable:
        known |= {0: pair.unset, "": pair.unset}
    field, allowed = pair.proto.name, ", ".join(kind)

    def read(value: Any) -> Any:
        try:
            return known[value]
        except KeyError:
            problem = "is not set" if value in (0, "") else f"{value!r} is not known"
            raise InvalidError(f"{field}: {problem}; allowed: {allowed}") from None

    return read
