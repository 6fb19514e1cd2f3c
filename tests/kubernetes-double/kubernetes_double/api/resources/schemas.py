"""Schemas of the kinds: decoding (unknown fields, nulls, defaults) and validation.

Built-in kinds use the published OpenAPI definitions; custom kinds the schema of their definition.
A node is one JSON schema; `{}` stands for "anything goes".
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from importlib import resources
from typing import Any

import jsonschema
import referencing
from jsonschema.protocols import Validator

from kubernetes_double.api.requests.errors import bad_request
from kubernetes_double.api.resources.bounds import boundary_problems

Object = dict[str, Any]
Node = dict[str, Any]

VERSION = "1.37.0"
APIMACHINERY = "io.k8s.apimachinery.pkg.apis.meta.v1."
META = f"{APIMACHINERY}ObjectMeta"
FORM = "x-time-form"
TIMES = {"Time": "%Y-%m-%dT%H:%M:%SZ", "MicroTime": "%Y-%m-%dT%H:%M:%S.%fZ"}
"""Format in which the server writes times."""


@dataclass
class Definitions:
    """The published schemas of one Kubernetes version."""

    version: str = VERSION

    @cached_property
    def _document(self) -> Node:
        folder = resources.files("kubernetes_validate").joinpath("kubernetes-json-schema")
        path = folder.joinpath(f"v{self.version}-local", "_definitions.json")
        document = json.loads(path.read_text())
        for node in document["$defs"].values():
            if not node.get("properties"):
                node["x-kubernetes-preserve-unknown-fields"] = True
        for name, form in TIMES.items():
            document["$defs"][f"{APIMACHINERY}{name}"][FORM] = form
        return document

    @cached_property
    def _kinds(self) -> dict[tuple[str, str, str], str]:
        return {
            (one["group"], one["version"], one["kind"]): name
            for name, node in self._document["$defs"].items()
            for one in node.get("x-kubernetes-group-version-kind", ())
        }

    @cached_property
    def _registry(self) -> referencing.Registry[Any]:
        resource = referencing.Resource.from_contents(self._document)
        return resource @ referencing.Registry()

    def node(self, name: str) -> Node:
        """A definition by its fully qualified name."""
        return self._document["$defs"][name]

    def kind(self, group: str, version: str, kind: str) -> Node:
        """The schema of a kind; `{}` for one that is not published."""
        name = self._kinds.get((group, version, kind))
        return self.node(name) if name else {}

    def resolve(self, node: Node) -> Node:
        """Follow references."""
        while "$ref" in node:
            extra = {k: v for k, v in node.items() if k.startswith("x-") or k == "default"}
            node = self.node(node["$ref"].rpartition("/")[2])
            node = {**node, **extra} if extra else node
        return node

    def validator(self, group: str, version: str, kind: str) -> Validator | None:
        """The validator of a built-in kind."""
        name = self._kinds.get((group, version, kind))
        if name is None:
            return None
        node = {"$ref": f"{self._document['$id']}#/$defs/{name}"}
        return jsonschema.Draft202012Validator(node, registry=self._registry)


@dataclass
class Schema:
    """The schema of one kind in one version."""

    root: Node
    definitions: Definitions
    structural: bool = False
    """Whether it is a custom kind, in which an object without listed properties has none."""
    validator: Validator | None = None
    selectable: tuple[str, ...] = ()
    columns: list[Object] = field(default_factory=list[Object])

    def resolve(self, node: Node) -> Node:
        """Follow references."""
        return self.definitions.resolve(node)

    def child(self, node: Node, name: str) -> Node | None:
        """The schema of a field; None when there is no such field."""
        found = node.get("properties", {}).get(name)
        if found is not None:
            return self.resolve(found)
        rest = node.get("additionalProperties")
        if isinstance(rest, dict):
            return self.resolve(rest)
        return {} if self.open(node) else None

    def open(self, node: Node) -> bool:
        """Whether unlisted fields are kept."""
        if node.get("x-kubernetes-preserve-unknown-fields") or node.get("additionalProperties"):
            return True
        return not node.get("properties") and not (self.structural and node.get("type"))

    def item(self, node: Node) -> Node:
        """The schema of the items of a list."""
        return self.resolve(node.get("items") or {})


def children(node: Node, path: str) -> Iterator[tuple[Node, str]]:
    """The direct subschemas of a custom kind's schema, each with its path in the definition."""
    for name, child in (node.get("properties") or {}).items():
        yield child, f"{path}.properties[{name}]"
    for name in ("items", "additionalProperties"):
        if isinstance(node.get(name), dict):
            yield node[name], f"{path}.{name}"


def nodes(node: Node, path: str) -> Iterator[tuple[Node, str]]:
    """A schema and all schemas below it."""
    yield node, path
    for child, place in children(node, path):
        yield from nodes(child, place)


@dataclass
class Decoded:
    """A decoded object, with the paths of unknown fields."""

    value: Object
    unknown: list[str]


def decode(schema: Schema, body: Object) -> Decoded:
    """Drop nulls and unknown fields."""
    unknown: list[str] = []
    value = _decode(schema, schema.resolve(schema.root), body, "", unknown)
    return Decoded(value, unknown)


def _decode(schema: Schema, node: Node, value: Any, path: str, unknown: list[str]) -> Any:
    if isinstance(value, list):
        item = schema.item(node)
        return [
            _decode(schema, item, one, f"{path}[{index}]", unknown)
            for index, one in enumerate(value)
        ]
    if isinstance(value, str) and FORM in node:
        return _rewrite(value, node[FORM])
    if not isinstance(value, dict):
        return value
    kept: Object = {}
    for name, one in value.items():
        child = schema.child(node, name)
        if child is None:
            unknown.append(f"{path}.{name}".lstrip("."))
        elif one is not None:
            kept[name] = _decode(schema, child, one, f"{path}.{name}", unknown)
        elif child.get("nullable") and "default" not in child:
            kept[name] = None
    return kept


def _rewrite(text: str, form: str) -> str:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise bad_request(f"parsing time {text!r}: want RFC 3339") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC).strftime(form)


def fill(schema: Schema, value: Object) -> Object:
    """Apply the defaults in a custom kind's schema; those of built-in kinds are in code."""
    return _fill(schema, schema.root, value) if schema.structural else value


def _fill(schema: Schema, node: Node, value: Any) -> Any:
    node = schema.resolve(node)
    if isinstance(value, list):
        return [_fill(schema, schema.item(node), one) for one in value]
    if not isinstance(value, dict):
        return value
    missing = {
        name: copy.deepcopy(child["default"])
        for name, child in node.get("properties", {}).items()
        if name not in value and "default" in child
    }
    return {
        name: _fill(schema, schema.child(node, name) or {}, one)
        for name, one in {**value, **missing}.items()
    }


@dataclass(frozen=True)
class Problem:
    """A validation error; `wire` marks one that prevents decoding."""

    field: str
    message: str
    reason: str = "FieldValueInvalid"
    wire: bool = False


REASONS = {
    "required": "FieldValueRequired",
    "enum": "FieldValueNotSupported",
    "type": "FieldValueTypeInvalid",
    "maxLength": "FieldValueTooLong",
    "maxItems": "FieldValueTooMany",
}


def validate(schema: Schema, value: Object) -> list[Problem]:
    """All violations of the schema, in the order of the fields."""
    if schema.validator is None:
        return []
    found = [_problem(error, schema) for error in schema.validator.iter_errors(value)]
    if schema.structural:
        found += [
            Problem("<nil>", f'Invalid value: "": {text}')
            for text in boundary_problems(schema.root, value)
        ]
    return sorted(found, key=lambda problem: problem.field)


def _problem(error: jsonschema.ValidationError, schema: Schema) -> Problem:
    path = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path
    ).lstrip(".")
    kind = str(error.validator)
    reason = REASONS.get(kind, "FieldValueInvalid")
    if kind == "required":
        name = error.message.split("'")[1]
        return Problem(f"{path}.{name}".lstrip("."), "Required value", reason)
    value = json.dumps(error.instance)
    if kind == "enum":
        choices: Any = error.validator_value
        allowed = ", ".join(json.dumps(one) for one in choices)
        return Problem(path, f"Unsupported value: {value}: supported values: {allowed}", reason)
    if kind == "type" and schema.structural:
        return Problem(path, _type_text(path, error), reason)
    message = f"Invalid value: {value}: {error.message}"
    return Problem(path, message, reason, wire=kind in ("type", "oneOf") and not schema.structural)


def _type_text(path: str, error: jsonschema.ValidationError) -> str:
    """How the server words a value of another type (kube-openapi, `pkg/validation/errors`)."""
    wanted: Any = error.validator_value
    first = wanted if isinstance(wanted, str) else next(one for one in wanted if one != "null")
    kinds = ("null", "boolean", "integer", "number", "string", "array")
    is_type = jsonschema.Draft202012Validator.TYPE_CHECKER.is_type
    kind = json.dumps(next((one for one in kinds if is_type(error.instance, one)), "object"))
    return f"Invalid value: {kind}: {path} in body must be of type {first}: {kind}"
