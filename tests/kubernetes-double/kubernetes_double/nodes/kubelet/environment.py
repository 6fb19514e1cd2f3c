"""The environment and command of a container, from its pod's spec."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kubernetes_double.errors import NotFoundError
from kubernetes_double.nodes.client import CONFIG_MAP, SECRET, Kind, Object

_REFERENCE = re.compile(r"\$(\$|\(([-._a-zA-Z0-9]+)\))")
_FIELD = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


Lookup = Callable[[Kind, str], Object | None]
"""Finds an object of the pod's namespace by kind and name."""


def environment_of(
    container: Object, *, pod: Object, base: Mapping[str, str], lookup: Lookup
) -> dict[str, str]:
    """`base`, then `envFrom`, then `env`, later ones replacing earlier ones.

    Raises:
        NotFoundError: a Secret, ConfigMap or key that is not optional does not exist.
    """
    found = dict(base)
    for source in container.get("envFrom", []):
        prefix = source.get("prefix", "")
        kind, field = _source_of(source, "Ref")
        content = contents(kind, source[field], lookup=lookup)
        found.update({prefix + key: value.decode() for key, value in content.items()})
    for entry in container.get("env", []):
        value = _value_of(entry, container=container, pod=pod, lookup=lookup)
        if value is not None:
            found[entry["name"]] = expand(value, found) if "value" in entry else value
    return found


def expand(text: str, environment: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by its value if it is set; `$$` is an escaped `$`."""

    def replace(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return environment.get(match[2], match[0])

    return _REFERENCE.sub(replace, text)


def command_of(container: Object, environment: Mapping[str, str]) -> tuple[str, ...]:
    """`command` and `args`; the image's own entry point is unknown.

    Raises:
        NotFoundError: there is no command.
    """
    words: Sequence[str] = [*container.get("command", []), *container.get("args", [])]
    if not container.get("command"):
        raise NotFoundError(f"container {container['name']}: no command, and images are not read")
    return tuple(expand(word, environment) for word in words)


def field_of(pod: Object, path: str) -> str:
    """A field by its downward path, such as `metadata.name` or `metadata.labels['app']`.

    Raises:
        NotFoundError: pods have no such field.
    """
    if match := _FIELD.fullmatch(path):
        return (pod["metadata"].get(match[1]) or {}).get(match[2], "")
    if path in ("metadata.labels", "metadata.annotations"):
        entries = pod["metadata"].get(path.removeprefix("metadata.")) or {}
        return "".join(f'{name}="{value}"\n' for name, value in sorted(entries.items()))
    if path == "status.podIPs":
        path = "status.podIP"
    found: Any = pod
    for name in path.split("."):
        if name == "serviceAccountName":
            return found.get(name, "default")
        if name not in found:
            raise NotFoundError(f"fieldRef {path}: the pod has no such field")
        found = found[name]
    return str(found)


def contents(kind: Kind, reference: Object, *, lookup: Lookup) -> dict[str, bytes]:
    """The contents of a Secret or ConfigMap; empty if it is optional and missing.

    Raises:
        NotFoundError: it does not exist.
    """
    name = reference.get("name") or reference.get("secretName", "")
    item = lookup(kind, name)
    if item is None:
        if reference.get("optional"):
            return {}
        raise NotFoundError(f"{kind.name.lower()} {name!r} not found")
    plain = {} if kind is SECRET else item.get("data") or {}
    encoded = item.get("data") if kind is SECRET else item.get("binaryData")
    found = {key: value.encode() for key, value in plain.items()}
    return found | {key: base64.b64decode(value) for key, value in (encoded or {}).items()}


def _source_of(source: Object, suffix: str) -> tuple[Kind, str]:
    if f"secret{suffix}" in source:
        return SECRET, f"secret{suffix}"
    return CONFIG_MAP, f"configMap{suffix}"


def _value_of(entry: Object, *, container: Object, pod: Object, lookup: Lookup) -> str | None:
    source = entry.get("valueFrom")
    if source is None:
        return entry.get("value", "")
    if "fieldRef" in source:
        return field_of(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        which, _, name = source["resourceFieldRef"]["resource"].partition(".")
        return str((container.get("resources", {}).get(which) or {}).get(name, "0"))
    kind, field = _source_of(source, "KeyRef")
    reference = source[field]
    content = contents(kind, reference, lookup=lookup)
    if reference["key"] in content:
        return content[reference["key"]].decode()
    if reference.get("optional"):
        return None
    raise NotFoundError(
        f"{kind.name.lower()} {reference['name']!r} has no key {reference['key']!r}"
    )
