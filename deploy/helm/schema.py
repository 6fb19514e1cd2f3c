"""Writes the closed schema of the chart's values; `--check` compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent / "paceline" / "values.schema.json"

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
FREE: Schema = {"type": "object"}
FREE_LIST: Schema = {"type": "array", "items": {"type": "object"}}
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


def main(arguments: list[str]) -> int:
    """Write the file, or with `--check` say whether it is current (exit code 1 if not)."""
    text = json.dumps(schema(), indent=2) + "\n"
    if arguments == ["--check"]:
        return 0 if TARGET.read_text() == text else 1
    TARGET.write_text(text)
    return 0


def schema() -> Schema:
    """The schema of `values.yaml`: no key that it does not name is accepted."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the Paceline chart",
        "definitions": {
            "image": _closed(repository=TEXT, tag=TEXT, digest=_digest(), pullPolicy=_pull()),
            "resources": _closed(
                requests=_quantities(), limits=_quantities(), claims={"type": "array"}
            ),
            "disruption": _closed(minAvailable=AMOUNT, maxUnavailable=AMOUNT),
        },
        **_closed(**_sections(), **{"global": FREE}),
    }


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
        "controller": _closed(jobset=FLAG, trainingJobs=FLAG, scaling=FREE),
        "crds": _closed(install=FLAG, keep=FLAG),
        "store": _store(),
        "token": _closed(existingSecret=TEXT),
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
        "tenants": _closed(quota=_quota()),
    }


def _quota() -> Schema:
    most: Schema = {"type": ["integer", "null"], "minimum": 0}
    limits = dict.fromkeys(("submitted", "jobs", "rollout_workers", "episodes"), most)
    return _closed(**limits, weight={"type": "number", "exclusiveMinimum": 0})


def _services() -> Schema:
    counted = _at_least(1)
    fixed = _enum("fixed")
    shared = _enum("controller", "fixed", "hpa", "external")
    hpa = _closed(min=counted, max=counted, cpuPercent=_at_least(1))
    pool: Schema = {
        "replicas": counted,
        "maxReplicas": counted,
        "scaling": shared,
        "hpa": hpa,
        "strategy": FREE,
    }
    service = _closed(type=_enum("ClusterIP", "NodePort", "LoadBalancer"), annotations=TEXTS)
    return _closed(
        gateway=_workload(
            replicas=counted,
            scaling=_enum("fixed", "hpa", "external"),
            hpa=hpa,
            strategy=FREE,
            service=service,
        ),
        controller=_workload(replicas=counted, scaling=fixed, strategy=FREE),
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
        tolerations=FREE_LIST,
        affinity=FREE,
        topologySpread=_topology_spread(),
        priorityClassName=TEXT,
        runtimeClassName=TEXT,
        sharedMemory={"anyOf": [{"const": ""}, QUANTITY]},
        disruption=_ref("disruption"),
        podAnnotations=TEXTS,
        podLabels=TEXTS,
        serviceAccountAnnotations=TEXTS,
        extraEnv=FREE_LIST,
        extraEnvFrom=FREE_LIST,
        extraVolumes=FREE_LIST,
        extraVolumeMounts=FREE_LIST,
    )


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
        # Null takes the pool of the chart's own values away.
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
        tls=FREE_LIST,
    )
    needs_host: Schema = {"properties": {"hosts": {"minItems": 1}}}
    on: Schema = {"properties": {"enabled": {"const": True}}, "required": ["enabled"]}
    return section | {"if": on, "then": needs_host}


def _network_policy() -> Schema:
    by_component = _closed(**dict.fromkeys(COMPONENTS, FREE_LIST))
    return _closed(
        enabled=FLAG,
        gatewayFrom=FREE_LIST,
        prometheusFrom=FREE_LIST,
        dns=_closed(to=FREE_LIST, ports=PORTS),
        kubernetesApi=_closed(to=FREE_LIST, ports=PORTS),
        store=_closed(to=FREE_LIST, port=PORT | {"type": ["integer", "null"]}),
        storage=_closed(to=FREE_LIST, ports=PORTS),
        tracking=_closed(to=FREE_LIST, ports=PORTS),
        tracing=_closed(to=FREE_LIST, ports={"type": "array", "items": PORT}),
        extraEgress=by_component,
        extraIngress=by_component,
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
