"""Custom resource definitions: their resources, schemas and CEL rules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import cel
import jsonschema

from kubernetes_double.api.costs import check_costs, read
from kubernetes_double.api.requests.errors import cause
from kubernetes_double.api.resources.registry import Resource
from kubernetes_double.api.resources.schemas import META, Definitions, Node, Schema, nodes

Object = dict[str, Any]
CLEANUP = "customresourcecleanup.apiextensions.k8s.io"
"""Finalizer that keeps a definition until its objects are gone."""


def established(definition: Object, at: str) -> Object:
    """The status of a definition whose kinds are served."""
    spec = definition.get("spec", {})
    conditions = [
        {
            "type": kind,
            "status": "True",
            "lastTransitionTime": at,
            "reason": reason,
            "message": text,
        }
        for kind, reason, text in (
            ("NamesAccepted", "NoConflicts", "no conflicts found"),
            ("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        )
    ]
    stored = [one["name"] for one in spec.get("versions", ()) if one.get("storage")]
    return {
        "conditions": conditions,
        "acceptedNames": spec.get("names", {}),
        "storedVersions": stored,
    }


def resources_of(definition: Object) -> list[Resource]:
    """One resource per served version."""
    spec, names = definition["spec"], definition["spec"]["names"]
    return [
        Resource(
            spec["group"],
            version["name"],
            names["plural"],
            names["kind"],
            spec["scope"] == "Namespaced",
            tuple(names.get("shortNames", ())),
            tuple(version.get("subresources", {})),
            generation=True,
            custom=True,
            singular=names.get("singular", names["kind"].lower()),
            categories=tuple(names.get("categories", ())),
        )
        for version in spec["versions"]
        if version["served"]
    ]


def version_of(definition: Object, version: str) -> Object:
    """The entry of one version."""
    return next(one for one in definition["spec"]["versions"] if one["name"] == version)


def schema_of(definition: Object, version: str, definitions: Definitions) -> Schema:
    """The schema of one version, including the parts common to all objects."""
    entry = version_of(definition, version)
    own = entry.get("schema", {}).get("openAPIV3Schema", {})
    common = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"$ref": f"#/$defs/{META}"},
    }
    root = {**own, "properties": {**own.get("properties", {}), **common}}
    return Schema(
        root,
        definitions,
        structural=True,
        validator=jsonschema.Draft202012Validator(_plain(own)),
        selectable=tuple(one["jsonPath"].lstrip(".") for one in entry.get("selectableFields", ())),
        columns=entry.get("additionalPrinterColumns", []),
    )


def _plain(node: Any) -> Any:
    """An OpenAPI 3.0 schema as JSON schema: nullable, int-or-string, exclusive bounds."""
    if isinstance(node, list):
        return [_plain(one) for one in node]
    if not isinstance(node, dict):
        return node
    plain: Node = {}
    for name, value in node.items():
        if name in ("default", "enum", "required", "example"):
            plain[name] = value
        elif name in ("properties", "patternProperties"):
            plain[name] = {key: _plain(one) for key, one in value.items()}
        else:
            plain[name] = _plain(value)
    if plain.pop("x-kubernetes-int-or-string", False):
        plain["type"] = ["integer", "string"]
    if plain.pop("nullable", False) and "type" in plain:
        kinds = plain["type"] if isinstance(plain["type"], list) else [plain["type"]]
        plain["type"] = [*kinds, "null"]
    for bound in ("Minimum", "Maximum"):
        if plain.get(f"exclusive{bound}") is True:
            plain[f"exclusive{bound}"] = plain.pop(bound.lower())
        elif plain.get(f"exclusive{bound}") is False:
            del plain[f"exclusive{bound}"]
    return plain


def check_definition(definition: Object, old: Object | None = None) -> list[Object]:
    """Validate a definition: its name, versions and rules."""
    spec = definition["spec"]
    causes: list[Object] = []
    wanted = f"{spec['names']['plural']}.{spec['group']}"
    if definition["metadata"]["name"] != wanted:
        name = json.dumps(definition["metadata"]["name"])
        text = f'Invalid value: {name}: must be spec.names.plural+"."+spec.group'
        causes.append(cause("FieldValueInvalid", text, "metadata.name"))
    if sum(bool(one.get("storage")) for one in spec["versions"]) != 1:
        text = "Invalid value: must have exactly one version marked as storage version"
        causes.append(cause("FieldValueInvalid", text, "spec.versions"))
    known = _schemas(old) if old else {}
    for path, name, schema in _places(definition):
        if schema is None:
            text = "Required value: schemas are required"
            causes.append(cause("FieldValueRequired", text, path))
        else:
            # Rules are checked only for valid schemas.
            causes += _check_types(schema, path) or [
                *_check_syntax(schema, path),
                *check_costs(schema, path, known=schema == known.get(name)),
            ]
    return causes


def _schemas(definition: Object) -> dict[str, Node | None]:
    return {
        version["name"]: version.get("schema", {}).get("openAPIV3Schema")
        for version in definition["spec"]["versions"]
    }


def _places(definition: Object) -> Iterator[tuple[str, str, Node | None]]:
    """Path, version and schema of each version; a schema common to all appears once.

    The server stores a common schema separately, and errors name that location
    (apiextensions-apiserver, `pkg/apis/apiextensions/v1/conversion.go`).
    """
    schemas = _schemas(definition)
    first, common = next(iter(schemas.items()), ("", None))
    if common is not None and all(one == common for one in schemas.values()):
        yield "spec.validation.openAPIV3Schema", first, common
        return
    for index, (name, schema) in enumerate(schemas.items()):
        yield f"spec.versions[{index}].schema.openAPIV3Schema", name, schema


def _check_types(schema: Node, path: str) -> list[Object]:
    loose = "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string"
    text = "Required value: must not be empty for specified object fields"
    return [
        cause("FieldValueRequired", text, f"{place}.type")
        for node, place in nodes(schema, path)
        if "type" not in node and not any(node.get(one) for one in loose)
    ]


def _check_syntax(schema: Node, path: str) -> list[Object]:
    causes: list[Object] = []
    for node, place in nodes(schema, path):
        for index, rule in enumerate(node.get("x-kubernetes-validations", ())):
            try:
                cel.compile(rule["rule"])
                read(rule["rule"])
            except ValueError as error:
                text = f"Invalid value: {json.dumps(rule['rule'])}: compilation failed: {error}"
                whole = f"{place}.x-kubernetes-validations[{index}].rule"
                causes.append(cause("FieldValueInvalid", text, whole))
    return causes


def check_rules(schema: Schema, new: Object, old: Object | None) -> list[Object]:
    """Check the CEL rules of a custom kind; those with `oldSelf` only on updates."""
    return _check_rules(schema, schema.root, new, old, "") if schema.structural else []


def _check_rules(schema: Schema, node: Node, new: Any, old: Any, path: str) -> list[Object]:
    causes = [
        found
        for rule in node.get("x-kubernetes-validations", ())
        if (found := _check_rule(rule, new, old, path))
    ]
    if isinstance(new, dict):
        for name, value in new.items():
            child = node.get("properties", {}).get(name) or node.get("additionalProperties")
            if isinstance(child, dict):
                before = old.get(name) if isinstance(old, dict) else None
                causes += _check_rules(schema, child, value, before, f"{path}.{name}")
    elif isinstance(new, list) and isinstance(node.get("items"), dict):
        for index, value in enumerate(new):
            before = _same_item(node, value, old)
            causes += _check_rules(schema, node["items"], value, before, f"{path}[{index}]")
    return causes


def _same_item(node: Node, value: Any, old: Any) -> Any:
    """The old value of a list item, which can only be matched by keys."""
    keys = node.get("x-kubernetes-list-map-keys")
    if not keys or not isinstance(old, list):
        return None
    return next((o for o in old if all(o.get(k) == value.get(k) for k in keys)), None)


def _check_rule(rule: Object, new: Any, old: Any, path: str) -> Object | None:
    program = cel.compile(rule["rule"])
    transition = "oldSelf" in program.variables()
    if transition and old is None and not rule.get("optionalOldSelf"):
        return None
    field = path.lstrip(".") or "<nil>"
    values = {"self": new, "oldSelf": old} if transition else {"self": new}
    reason = rule.get("reason", "FieldValueInvalid")
    try:
        if program.execute(values) is True:
            return None
        message = rule.get("message") or f"failed rule: {rule['rule']}"
        if "messageExpression" in rule:
            message = str(cel.compile(rule["messageExpression"]).execute(values))
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        message = f"rule evaluation error: {error}"
    shown = '"object"' if isinstance(new, dict) else json.dumps(new)[:200]
    return cause(reason, f"Invalid value: {shown}: {message}", field)
