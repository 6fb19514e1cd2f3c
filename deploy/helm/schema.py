"""Generates the closed schema of the chart's values."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from paceline.config.limits import LimitSettings
from paceline.config.packages import PackageSettings
from paceline.config.plugins import PluginSettings
from paceline.config.sections.model import ModelSettings
from paceline.config.tokenizers import TokenizerSettings

TARGET = Path(__file__).parent / "paceline" / "values.schema.json"

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
FREE: Schema = {"type": "object"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([KMGTPE]i?|[kmun])?$"}
AMOUNT: Schema = {
    "anyOf": [
        {"type": "integer", "minimum": 0},
        {"type": "string", "pattern": r"^([0-9]|[1-9][0-9]|100)%$"},
    ]
}
RATE: Schema = {"type": "integer", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
PORTS: Schema = {"type": "array", "items": PORT, "minItems": 1}
NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_NAME: Schema = {"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
ACCESS_MODES = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")
COMPONENTS = (
    "gateway",
    "controller",
    "experience",
    "environment",
    "reward",
    "trainer",
    "rollout",
    "tracking",
    "store",
    "certificates",
)


# Values copied into objects have the types of the newest Kubernetes API.
API_VERSION = "1.37.0"
CORE, NETWORKING = "io.k8s.api.core.v1.", "io.k8s.api.networking.v1."
QUANTITY_TYPE = "io.k8s.apimachinery.pkg.api.resource.Quantity"
API_TYPES = {
    "affinity": f"{CORE}Affinity",
    "claim": f"{CORE}ResourceClaim",
    "podClaim": f"{CORE}PodResourceClaim",
    "egress": f"{NETWORKING}NetworkPolicyEgressRule",
    "env": f"{CORE}EnvVar",
    "envFrom": f"{CORE}EnvFromSource",
    "ingress": f"{NETWORKING}NetworkPolicyIngressRule",
    "ingressTls": f"{NETWORKING}IngressTLS",
    "mount": f"{CORE}VolumeMount",
    "peer": f"{NETWORKING}NetworkPolicyPeer",
    "strategy": "io.k8s.api.apps.v1.DeploymentStrategy",
    "toleration": f"{CORE}Toleration",
    "volume": f"{CORE}Volume",
}


def files() -> dict[Path, str]:
    """Path and content of the file."""
    return {TARGET: json.dumps(schema(), indent=2) + "\n"}


def schema() -> Schema:
    """The schema of `values.yaml`, which rejects unknown keys."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the Paceline chart",
        "definitions": {
            "image": _closed(repository=TEXT, tag=TEXT, digest=_digest(), pullPolicy=_pull()),
            "resources": _closed(
                requests=_quantities(), limits=_quantities(), claims=_list_of("claim")
            ),
            "disruption": _closed(minAvailable=AMOUNT, maxUnavailable=AMOUNT),
            **_api_types(),
        },
        **_closed(**_sections(), **{"global": FREE}),
    }


@cache
def _published() -> Schema:
    """Definitions of the Kubernetes API by their long names."""
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema"
    path = folder / f"v{API_VERSION}-local" / "_definitions.json"
    return json.loads(path.read_text())["$defs"]


def _api_types() -> Schema:
    """The types in `API_TYPES` and all types that they refer to; unknown keys are rejected."""
    found: Schema = {}
    waiting = list(API_TYPES.values())
    while waiting:
        name = waiting.pop()
        if name == QUANTITY_TYPE:
            found[name] = {"anyOf": [{"type": ["number", "null"]}, QUANTITY]}
        elif name not in found:
            found[name] = _plain(_published()[name], waiting)
    return dict(sorted(found.items()))


def _plain(node: Any, named: list[str]) -> Any:
    """A definition without descriptions; collects the names that it refers to."""
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        named.append(name)
        return _ref(name)
    kept = ("type", "required", "enum")
    plain: Schema = {key: node[key] for key in kept if key in node}
    if "oneOf" in node:  # both branches take null
        plain["anyOf"] = node["oneOf"]
    if properties := node.get("properties"):
        plain["properties"] = {key: _plain(one, named) for key, one in properties.items()}
        plain["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            plain[key] = _plain(node[key], named)
    return plain


def _list_of(kind: str) -> Schema:
    return {"type": "array", "items": _ref(API_TYPES[kind])}


def _sections() -> Schema:
    return {
        "fullnameOverride": {
            "type": "string",
            "pattern": r"^([a-z]([-a-z0-9]*[a-z0-9])?)?$",
            "maxLength": 38,
        },
        "image": _closed(registry=TEXT, repository=TEXT, tag=TEXT, pullPolicy=_pull()),
        "imagePullSecrets": {"type": "array", "items": _closed(name=TEXT)},
        "ipv6": FLAG,
        "podSecurity": _closed(**{key: _user() for key in ("runAsUser", "runAsGroup", "fsGroup")}),
        "defaults": _workload(),
        "services": _services(),
        "trainer": _workload(ranksPerPod=_at_least(1), weightsMbitPerSecond=RATE),
        "rollout": _workload(pools=_pools(), weightsMbitPerSecond=RATE),
        "controller": _closed(
            jobset=FLAG,
            trainingJobs=FLAG,
            scaling=FREE,
            accelerators={"type": "array", "items": TEXT},
            kueue=_closed(queue=TEXT, tenants=TEXTS),
        ),
        "crds": _closed(install=FLAG, keep=FLAG),
        "store": _store(),
        "token": _closed(existingSecret=TEXT),
        "serviceKeys": _closed(existingSecret=TEXT),
        "certificates": _certificates(),
        "storage": _storage(),
        "ingress": _ingress(),
        "networkPolicy": _network_policy(),
        "priorityClasses": _priority_classes(),
        "tracing": _closed(
            endpoint={"type": "string", "pattern": r"^(https?://[^/\s]+)?$"},
            sample={"type": "number", "minimum": 0, "maximum": 1},
            headersSecret=TEXT,
            authoritySecret=TEXT,
        ),
        "monitoring": _monitoring(),
        "limits": _settings(LimitSettings),
        "plugins": _settings(PluginSettings),
        "packages": _settings(PackageSettings),
        "models": _settings(ModelSettings),
        "tokenizers": _settings(TokenizerSettings),
    }


def _settings(model: type[BaseModel]) -> Schema:
    """The schema of a section of the settings, with references replaced by their models."""
    whole = model.model_json_schema()
    models: Schema = whole.pop("$defs", {})

    def plain(schema: Schema) -> Schema:
        name = schema.get("$ref", "").rpartition("/")[2]
        kept = ("type", "anyOf", "minimum", "maximum", "exclusiveMinimum", "additionalProperties")
        found = models[name] if name else schema
        made = {key: found[key] for key in kept if key in found}
        if "properties" in found:
            made["properties"] = {k: plain(field) for k, field in found["properties"].items()}
        if found.get("items", {}).get("pattern"):
            made["items"] = {key: found["items"][key] for key in ("type", "pattern")}
        return made

    return plain(whole)


def _services() -> Schema:
    counted = _at_least(1)
    fixed = _enum("fixed")
    strategy = _ref(API_TYPES["strategy"])
    shared = _enum("controller", "fixed", "hpa", "external")
    hpa = _closed(min=counted, max=counted, cpuPercent=_at_least(1))
    pool: Schema = {
        "replicas": counted,
        "maxReplicas": counted,
        "scaling": shared,
        "hpa": hpa,
        "strategy": strategy,
    }
    service = _closed(type=_enum("ClusterIP", "NodePort", "LoadBalancer"), annotations=TEXTS)
    return _closed(
        gateway=_workload(
            replicas=counted,
            scaling=_enum("fixed", "hpa", "external"),
            hpa=hpa,
            strategy=strategy,
            service=service,
        ),
        controller=_workload(replicas=counted, scaling=fixed, strategy=strategy),
        experience=_workload(
            replicas={"type": "integer", "minimum": 0, "maximum": 1},
            scaling=fixed,
            strategy=_closed(type=_enum("Recreate")),
        ),
        environment=_workload(**pool),
        reward=_workload(**pool),
        tracking=_workload(
            replicas={"type": "integer", "minimum": 0, "maximum": 1},
            scaling=fixed,
            strategy=_closed(type=_enum("Recreate")),
        ),
    )


def _workload(**own: Schema) -> Schema:
    return _closed(
        **own,
        image=_ref("image"),
        resources=_ref("resources"),
        graceSeconds=_at_least(1),
        preStopSeconds=_at_least(0),
        startupSeconds=_at_least(1),
        settings=FREE,
        nodeSelector=TEXTS,
        tolerations=_list_of("toleration"),
        affinity=_ref(API_TYPES["affinity"]),
        topologySpread=_topology_spread(),
        priorityClassName=TEXT,
        runtimeClassName=TEXT,
        resourceClaims=_list_of("podClaim"),
        seccompProfile=_seccomp_profile(),
        hostUsers={"type": ["boolean", "null"]},
        sharedMemory={"anyOf": [{"const": ""}, QUANTITY]},
        disruption=_ref("disruption"),
        podAnnotations=TEXTS,
        podLabels=TEXTS,
        serviceAccountAnnotations=TEXTS,
        extraEnv=_list_of("env"),
        extraEnvFrom=_list_of("envFrom"),
        extraVolumes=_list_of("volume"),
        extraVolumeMounts=_list_of("mount"),
    )


def _seccomp_profile() -> Schema:
    profile = _closed(type=_enum("RuntimeDefault", "Localhost"), localhostProfile=TEXT)
    return {**profile, "required": ["type"]}


def _topology_spread() -> Schema:
    one: Schema = {
        "type": "object",
        "required": ["topologyKey", "maxSkew", "whenUnsatisfiable"],
        "properties": {
            "topologyKey": TEXT,
            "maxSkew": _at_least(1),
            "whenUnsatisfiable": _enum("ScheduleAnyway", "DoNotSchedule"),
        },
    }
    return {"type": "array", "items": one}


def _pools() -> Schema:
    positive: Schema = {"type": "number", "exclusiveMinimum": 0}
    count = _at_least(0)
    own = {"cost": positive, "speed": positive, "maxReplicas": count, "minReplicas": count}
    pool = _workload(**own, spot=FLAG)
    return {
        "type": "object",
        "minProperties": 1,
        "propertyNames": {"pattern": NAME, "maxLength": 20},
        # Null removes a pool that is in the chart's own values.
        "additionalProperties": pool | {"type": ["object", "null"]},
    }


def _store() -> Schema:
    persistence = _closed(enabled=FLAG, size=QUANTITY, storageClass=TEXT, keep=FLAG)
    command: Schema = {"type": "array", "items": TEXT, "minItems": 1}
    return _closed(
        url={"type": "string", "pattern": r"^(rediss?(\+cluster)?://.+)?$"},
        existingSecret=TEXT,
        embedded=_closed(
            enabled=FLAG,
            existingSecret=TEXT,
            image=_ref("image"),
            command=command,
            fsync=_enum("always", "everysec"),
            extraConfig={"type": "array", "items": TEXT},
            persistence=persistence,
            pod=_workload(),
        ),
    )


def _certificates() -> Schema:
    return _closed(
        issuer=_enum("builtin", "cert-manager", "none"),
        days=_at_least(1),
        authorityDays=_at_least(1),
        reloadWithinSeconds=_at_least(0),
        gatewayNames={"type": "array", "items": DNS_NAME},
        schedule={"type": "string", "minLength": 9},
        issuerRef=_closed(name=TEXT, kind=TEXT, group=TEXT),
        pod=_workload(),
    )


def _storage() -> Schema:
    modes: Schema = {"type": "array", "items": _enum(*ACCESS_MODES), "minItems": 1}
    return _closed(
        url={"type": "string", "pattern": r"^([a-z][a-z0-9+.-]*://.+)?$"},
        credentialsSecret=TEXT,
        volume=_closed(
            enabled=FLAG,
            existingClaim=TEXT,
            size=QUANTITY,
            storageClass=TEXT,
            accessModes=modes,
            keep=FLAG,
        ),
    )


def _ingress() -> Schema:
    section = _closed(
        enabled=FLAG,
        className=TEXT,
        annotations=TEXTS,
        hosts={"type": "array", "items": DNS_NAME},
        tls=_list_of("ingressTls"),
    )
    needs_host: Schema = {"properties": {"hosts": {"minItems": 1}}}
    on: Schema = {"properties": {"enabled": {"const": True}}, "required": ["enabled"]}
    return section | {"if": on, "then": needs_host}


def _network_policy() -> Schema:
    egress, ingress = (
        _closed(**dict.fromkeys(COMPONENTS, _list_of(rule))) for rule in ("egress", "ingress")
    )
    peers = _list_of("peer")
    return _closed(
        enabled=FLAG,
        gatewayFrom=peers,
        prometheusFrom=peers,
        dns=_closed(to=peers, ports=PORTS),
        kubernetesApi=_closed(to=peers, ports=PORTS),
        store=_closed(to=peers, port=PORT | {"type": ["integer", "null"]}),
        packages=_closed(to=peers, ports=PORTS),
        models=_closed(to=peers, ports=PORTS),
        storage=_closed(to=peers, ports=PORTS),
        tracking=_closed(to=peers, ports=PORTS),
        tracing=_closed(to=peers, ports={"type": "array", "items": PORT}),
        extraEgress=egress,
        extraIngress=ingress,
    )


def _monitoring() -> Schema:
    kind = _enum("PrometheusRule", "ConfigMap")
    return _closed(
        podMonitor=_closed(enabled=FLAG, labels=TEXTS, interval=TEXT),
        scrapeAnnotations=FLAG,
        dashboards=_closed(enabled=FLAG, labels=TEXTS, annotations=TEXTS, namespace=TEXT),
        rules=_closed(enabled=FLAG, kind=kind, labels=TEXTS, runbooks=TEXT),
    )


def _priority_classes() -> Schema:
    one = _closed(
        value={"type": "integer", "minimum": -2147483648, "maximum": 1000000000},
        preemptionPolicy=_enum("PreemptLowerPriority", "Never"),
        description=TEXT,
    )
    return {"type": "object", "additionalProperties": one | {"required": ["value"]}}


def _closed(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


def _enum(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _at_least(least: int) -> Schema:
    return {"type": "integer", "minimum": least}


def _user() -> Schema:
    return {"type": ["integer", "null"], "minimum": 1}


def _pull() -> Schema:
    return _enum("Always", "IfNotPresent", "Never")


def _digest() -> Schema:
    return {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"}


def _quantities() -> Schema:
    amount: Schema = {"anyOf": [{"type": "number", "minimum": 0}, QUANTITY]}
    return {"type": "object", "additionalProperties": amount}
