"""Settings of the pods of a rendered chart, loaded by the services' own code from its files."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.config import ServiceSettings
from paceline.config.load import parse_arguments

# What the kubelet and the controller add; names that YAML would take for numbers.
ENVIRONMENT = {
    "POD_NAME": "12e5",
    "POD_IP": "10.1.2.3",
    "NAMESPACE": "0123",
    "JOB_ID": "42",
    "POOL": "default",
    "INCARNATION": "7",
}


def settings_of_pods(
    objects: Sequence[Mapping[str, Any]],
    templates: Mapping[str, Any],
    root: Path,
    *,
    secrets: Mapping[str, Mapping[str, str]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, ServiceSettings]:
    """Settings by the name of the pod's template.

    `root`: a folder for their files. `secrets`: of the user, by name.
    """
    contents = {(o["kind"], o["metadata"]["name"]): content(o) for o in objects}
    contents |= {("Secret", name): dict(data) for name, data in (secrets or {}).items()}
    found: dict[str, ServiceSettings] = {}
    for name, template in templates.items():
        container = template["spec"]["containers"][0]
        if "paceline_controller.certificates" in container["command"] or "store" in name:
            continue
        folder = root / name.replace("/", "-")
        _place_files(template["spec"], contents, folder)
        arguments = _expanded(container, {**ENVIRONMENT, **(environment or {})})
        arguments = [str(folder) + a if a.startswith("/") else a for a in arguments]
        found[name] = parse_arguments(arguments, program="paceline")
    return found


def content(one: Mapping[str, Any]) -> dict[str, str]:
    """The data of a ConfigMap or Secret."""
    data = one.get("data", {})
    if one["kind"] == "Secret":
        return {key: base64.b64decode(value).decode() for key, value in data.items()}
    return data


def _place_files(spec: Mapping[str, Any], contents: Any, root: Path) -> None:
    """The files of ConfigMaps and Secrets at the container's paths, below `root`."""
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for mount in spec["containers"][0]["volumeMounts"]:
        volume = volumes[mount["name"]]
        folder = root / mount["mountPath"].lstrip("/")
        if "configMap" in volume:
            source = contents.get(("ConfigMap", volume["configMap"]["name"]), {})
            items = {key: key for key in source}
        elif "secret" in volume and mount["name"] != "tls":
            source = contents["Secret", volume["secret"]["secretName"]]
            items = {item["key"]: item["path"] for item in volume["secret"]["items"]}
        else:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        for key, path in items.items():
            (folder / path).write_text(source[key])


def _expanded(container: Mapping[str, Any], environment: Mapping[str, str]) -> list[str]:
    """Arguments with $(NAME) replaced, as the kubelet does."""
    return [
        re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], argument)
        for argument in container["args"]
    ]
