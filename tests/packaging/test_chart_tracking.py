"""The tracking pod: opt-in, and can only reach the experience service and the outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from paceline.config.load import validate
from paceline.config.service import ServiceSettings, TrackingOptions
from paceline.enums import WorkerKind

ON = "services.tracking.replicas=1"
Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(render: Render) -> dict[str, dict[str, Any]]:
    keys = "services.tracking.extraEnvFrom[0].secretRef.name=trackers"
    objects = render("default", ON, keys)
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in objects}


def test_tracking_is_off_by_default(render: Render) -> None:
    names = [each["metadata"]["name"] for each in render("default")]
    assert not [name for name in names if "tracking" in name]


def test_its_settings_are_accepted_and_its_keys_come_from_a_secret(
    found: dict[str, dict[str, Any]],
) -> None:
    content = found["ConfigMap/rel-paceline-tracking"]["data"]["settings.yaml"]
    settings = ServiceSettings.model_validate(yaml.safe_load(content))
    assert settings.kind is WorkerKind.TRACKING
    assert settings.experience == "rel-paceline-experience:8400"
    validate(TrackingOptions, settings.options)
    spec = found["Deployment/rel-paceline-tracking"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    (container,) = spec["template"]["spec"]["containers"]
    assert {"secretRef": {"name": "trackers"}} in container["envFrom"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert not mounts["/var/lib/paceline"].get("readOnly")


def test_it_reaches_experience_and_servers_outside(found: dict[str, dict[str, Any]]) -> None:
    egress = found["NetworkPolicy/rel-paceline-tracking"]["spec"]["egress"]
    inside = [rule for rule in egress if "podSelector" in str(rule) and "8400" in str(rule)]
    assert "experience" in str(inside)
    assert {"ports": [{"protocol": "TCP", "port": 443}]} in egress
    ingress = found["NetworkPolicy/rel-paceline-experience"]["spec"]["ingress"]
    assert "tracking" in str(ingress)
    others = [
        name
        for name, each in found.items()
        if each["kind"] == "NetworkPolicy" and "tracking" in str(each["spec"].get("ingress"))
    ]
    assert others == ["NetworkPolicy/rel-paceline-experience"]
