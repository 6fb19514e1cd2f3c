"""Invalid values are rejected by helm 3 and 4, naming the location and what is allowed."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

HELMS = ("helm3", "helm4")
Object = dict[str, Any]
# Values -> what every helm says of them on one line: the place, and what is wrong with it.
SCHEMA: dict[str, tuple[str, ...]] = {
    "servces: {}": ("servces", "not allowed"),
    "services: {gateway: {replcas: 3}}": ("gateway", "replcas", "not allowed"),
    "services: {gateway: {replicas: 0}}": ("gateway", "replicas", "1"),
    "services: {experience: {replicas: 2}}": ("experience", "replicas", "1"),
    "services: {experience: {scaling: hpa}}": ("experience", "scaling", "fixed"),
    "services: {gateway: {scaling: controller}}": ("gateway", "scaling", "hpa", "external"),
    "services: {database: {}}": ("database", "not allowed"),
    "certificates: {issuer: letsencrypt}": ("issuer", "builtin", "cert-manager", "none"),
    "store: {url: 'http://redis:6379'}": ("url", "rediss?"),
    "store: {embedded: {fsync: sometimes}}": ("fsync", "always", "everysec"),
    "image: {tag: 1.2}": ("tag", "number", "string"),
    "services: {reward: {image: {digest: abc}}}": ("digest", "sha256"),
    "ingress: {enabled: true}": ("ingress", "hosts", "1|0"),
    "rollout: {pools: {H100: {}}}": ("H100", "does not match"),
    "rollout: {pools: {h100: {cost: 0}}}": ("cost", "0"),
    "rollout: {pools: {h100: {gpus: 8}}}": ("h100", "gpus", "not allowed"),
    "rollout: {pools: {default: null}}": ("pools", "1"),
    "trainer: {ranksPerPod: 0}": ("ranksPerPod", "1"),
    "rollout: {weightsMbitPerSecond: -1}": ("weightsMbitPerSecond", "0"),
    "trainer: {resources: {limits: {nvidia.com/gpu: eight}}}": ("limits", "nvidia.com"),
    "storage: {volume: {accessModes: [RWX]}}": ("accessModes", "ReadWriteMany"),
    "networkPolicy: {extraEgress: {console: []}}": ("extraEgress", "console", "not allowed"),
    "networkPolicy: {dns: {ports: [0]}}": ("dns", "ports", "1"),
    "podSecurity: {runAsUser: 0}": ("runAsUser", "1"),
    "defaults: {graceSeconds: long}": ("graceSeconds", "string", "integer"),
    "priorityClasses: {high: {}}": ("high", "value", "required|missing"),
    # An API server would answer these with an error that names no value of the chart.
    "trainer: {extraEnv: [{name: A, value: 1}]}": ("extraEnv/0/value|extraEnv.0.value", "string"),
    "defaults: {extraEnv: [{value: a}]}": ("extraEnv", "name"),
    "trainer: {extraEnv: [{name: A, valueFrom: {secretKey: {}}}]}": ("valueFrom", "secretKey"),
    "services: {reward: {extraEnvFrom: [{secret: {name: a}}]}}": ("extraEnvFrom", "secret"),
    "trainer: {extraVolumes: [{name: a, configMap: b}]}": ("extraVolumes", "configMap", "object"),
    "trainer: {extraVolumes: [{name: a, emptyDir: {sizeLimit: big}}]}": ("sizeLimit",),
    "trainer: {extraVolumeMounts: [{name: a, path: /a}]}": ("extraVolumeMounts", "path"),
    "rollout: {tolerations: [{key: gpu, value: true}]}": ("tolerations", "value", "string"),
    "defaults: {affinity: {nodeAfinity: {}}}": ("affinity", "nodeAfinity"),
    "services: {gateway: {strategy: {rollingUpdate: 1}}}": ("strategy", "rollingUpdate", "object"),
    "networkPolicy: {gatewayFrom: [{podSelector: gateway}]}": ("gatewayFrom", "podSelector"),
    "networkPolicy: {extraEgress: {reward: [{port: 1}]}}": ("extraEgress", "reward", "port"),
    "ingress: {tls: [{secretName: 1}]}": ("tls", "secretName", "string"),
    "fullnameOverride: This_One": ("fullnameOverride", "a-z0-9"),
}
# Values -> what a template says of them, which helm renders if the schema is kept.
RULES: dict[str, tuple[str, ...]] = {
    "certificates: {days: 90, authorityDays: 100}": ("authorityDays", "100", "twice", "90"),
    "store: {url: 'redis://me:hush@a'}": ("store.url", "password", "existingSecret"),
    "store: {url: 'redis://:hu@sh@a'}": ("store.url", "password", "existingSecret"),
    "store: {url: 'redis://a/0?password=hush'}": ("store.url", "password", "existingSecret"),
    "store: {url: 'redis://a', existingSecret: b}": ("store", "url", "existingSecret", "choose"),
    "store: {embedded: {enabled: false}}": ("store", "url", "existingSecret", "enabled"),
    "storage: {volume: {enabled: false}}": ("storage", "checkpoints", "storage.url"),
    "services: {environment: {scaling: hpa, hpa: {min: 9, max: 3}}}": ("hpa", "9", "above", "3"),
    "services: {reward: {replicas: 20}}": ("reward", "20", "above", "16"),
    "trainer: {extraEnv: [{name: A, value: a}, {name: A, value: b}]}": ('extraEnv: name "A"',),
    "services: {reward: {extraEnv: [{name: POD_IP, value: a}]}}": (
        'reward: extraEnv: name "POD_IP',
    ),
    "rollout: {extraVolumes: [{name: tmp, emptyDir: {}}]}": ('rollout: extraVolumes: name "tmp"',),
    "defaults: {extraVolumeMounts: [{name: tmp, mountPath: /tmp}]}": ('mountPath "/tmp"', "twice"),
    "store: {embedded: {pod: {extraEnv: [{name: A}, {name: A}]}}}": ('store: extraEnv: name "A"',),
    f"defaults: {{image: {{digest: 'sha256:{'0' * 64}'}}}}": (
        "defaults.image.digest: one digest cannot stand behind several images",
    ),
}


def says(text: str, words: tuple[str, ...]) -> bool:
    return all(any(one in text for one in word.split("|")) for word in words)


def merged(one: Object, other: Object) -> Object | None:
    """Both values files as one; None if both set the same value."""
    result = dict(one)
    for key, value in other.items():
        if key in result:
            below = result[key]
            if not (isinstance(below, dict) and isinstance(value, dict)):
                return None
            value = merged(cast(Object, below), cast(Object, value))
            if value is None:
                return None
        result[key] = value
    return result


def files_of(wrong: Iterable[str]) -> list[tuple[Object, list[str]]]:
    """As few values files as possible, each with the wrong values that are in it."""
    files: list[tuple[Object, list[str]]] = []
    for text in wrong:
        own: Object = yaml.safe_load(text)
        for place, (content, texts) in enumerate(files):
            both = merged(content, own)
            if both is not None:
                files[place] = (both, [*texts, text])
                break
        else:
            files.append((own, [text]))
    return files


@pytest.mark.parametrize("tool", HELMS)
def test_the_schema_refuses(tool: str, helm: Any, chart: Path, tmp_path: Path) -> None:
    """Helm names everything that the schema refuses at once, on a line each."""
    path = tmp_path / "values.yaml"
    unseen: dict[str, str] = {}
    for content, texts in files_of(SCHEMA):
        path.write_text(yaml.safe_dump(content))
        done = helm(tool, "template", "rel", str(chart), "-f", str(path))
        assert done.returncode != 0
        lines = done.stderr.splitlines()
        unseen |= {
            text: done.stderr
            for text in texts
            if not any(says(line, SCHEMA[text]) for line in lines)
        }
    assert unseen == {}


@pytest.mark.parametrize("tool", HELMS)
@pytest.mark.parametrize("values", RULES)
def test_is_refused(values: str, tool: str, helm: Any, chart: Path, tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(values)
    done = helm(tool, "template", "rel", str(chart), "-f", str(path))
    assert done.returncode != 0
    assert says(done.stderr, RULES[values]), done.stderr


def test_every_key_of_the_values_is_in_the_schema_and_closed(chart: Path) -> None:
    schema = yaml.load((chart / "values.schema.json").read_text(), yaml.CSafeLoader)
    values = yaml.load((chart / "values.yaml").read_text(), yaml.CSafeLoader)
    assert set(values) == set(schema["properties"]) - {"global"}
    open_ones = {
        path for path, section in sections(schema) if "additionalProperties" not in section
    }
    # Free by nature: what Kubernetes or the services check themselves.
    assert {path[-1] for path in open_ones} <= {
        *("settings", "scaling", "global", "items", "then", "if"),
        "io.k8s.apimachinery.pkg.apis.meta.v1.FieldsV1",
    }


def sections(schema: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every schema of an object, with its path."""
    found = [(path, schema)] if path and schema.get("type") == "object" else []
    for name in ("properties", "definitions"):
        for key, below in schema.get(name, {}).items():
            found += sections(below, (*path, key))
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            found += sections(schema[name], (*path, name))
    return found


def test_workload_values_override_defaults(
    render: Callable[..., Any], pods: Any, altered: tuple[str, ...]
) -> None:
    templates = pods(render("default", *altered))
    where = {name: pod["spec"].get("nodeSelector") for name, pod in templates.items()}
    assert where["Deployment/rel-paceline-gateway"] == {"disk": "ssd"}
    assert where["Deployment/rel-paceline-reward"] == {"disk": "none"}
    assert where["template/trainer.yaml"] == {"disk": "ssd"}
    assert where["template/rollout-default.yaml"] == {"gpu": "any"}
    assert where["template/rollout-big.yaml"] == {"gpu": "h100"}


def test_a_default_variable_of_the_chart_gives_way(
    render: Callable[..., Any], pods: Any, altered: tuple[str, ...]
) -> None:
    pod = pods(render("default", *altered))["template/trainer.yaml"]
    env = [one for one in pod["spec"]["containers"][0]["env"] if one["name"] == "HOME"]
    assert env == [{"name": "HOME", "value": "/home/me"}]
