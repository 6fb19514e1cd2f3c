"""Writes the TrainingJob definition of the chart from the job file's models; `--check` compares."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from paceline.config.job import MAX_BATCH_EPISODES, JobSpec
from paceline.types import JobState

TARGET = Path(__file__).parent / "paceline" / "files" / "trainingjob.yaml"
HEADER = "# Written by deploy/helm/crd.py from paceline.config.job; do not edit.\n"
KEPT = (
    *("type", "enum", "pattern", "minLength", "maxLength", "minItems", "maxItems"),
    *("maxProperties", "description"),
)

Schema = dict[str, Any]


class _Plain(yaml.SafeDumper):
    """Repeats what is shared instead of pointing at it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def main(arguments: list[str]) -> int:
    """Write the file, or with `--check` say whether it is current (exit code 1 if not)."""
    text = HEADER + yaml.dump(definition(), Dumper=_Plain, sort_keys=False, width=100)
    if arguments == ["--check"]:
        return 0 if TARGET.read_text() == text else 1
    TARGET.write_text(text)
    return 0


def definition() -> Schema:
    """The whole CustomResourceDefinition."""
    version = {
        "name": "v1alpha1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": _columns(),
        "schema": {"openAPIV3Schema": _root()},
    }
    names = {
        "kind": "TrainingJob",
        "listKind": "TrainingJobList",
        "plural": "trainingjobs",
        "singular": "trainingjob",
        "shortNames": ["tj"],
        "categories": ["paceline"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "trainingjobs.paceline.dev"},
        "spec": {
            "group": "paceline.dev",
            "names": names,
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def _columns() -> list[Schema]:
    rows = [
        ("State", "string", ".status.state", 0),
        ("Step", "integer", ".status.step", 0),
        ("Steps", "integer", ".status.steps", 0),
        ("Reward", "number", ".status.evalReward", 0),
        ("Rollouts", "integer", ".status.rolloutReplicas", 0),
        ("Age", "date", ".metadata.creationTimestamp", 0),
        ("JobId", "string", ".status.jobId", 1),
        ("Reason", "string", ".status.reason", 1),
    ]
    return [
        {"name": name, "type": kind, "jsonPath": path} | ({"priority": wide} if wide else {})
        for name, kind, path, wide in rows
    ]


def _root() -> Schema:
    name = JobSpec.model_json_schema()["properties"]["name"]["pattern"]
    return {
        "type": "object",
        "description": "A training job: the job file as an object of the cluster.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _spec(),
            "status": _status(),
        },
        "x-kubernetes-validations": [
            _rule(
                f"self.metadata.name.matches('{name}')",
                "metadata.name: at most 53 lower-case letters, digits and '-', "
                "a letter or digit first and last",
            )
        ],
    }


def _spec() -> Schema:
    whole = JobSpec.model_json_schema()
    spec = structural(whole, whole.get("$defs", {}))
    del spec["properties"]["name"]
    spec["required"].remove("name")
    spec["description"] = "The job file without `name`; cannot be changed."
    for place, rules in _rules().items():
        target = spec["properties"][place] if place else spec
        target["x-kubernetes-validations"] = rules
    return spec


def _rules() -> dict[str, list[Schema]]:
    """Rules between fields by section ("" is the whole spec), as `JobSpec` has them."""
    grouped = (
        f"!({_value('self.advantage.kind', 'grpo')} in ['grpo', 'dr_grpo', 'rloo']) || "
        f"{_value('self.group_size', 8)} >= 2"
    )
    batch = (
        f"{_value('self.batch_groups', 32)} * {_value('self.group_size', 8)} <= "
        f"{MAX_BATCH_EPISODES}"
    )
    published = (
        f"{_value('self.trainer.publish_every', 1)} <= "
        f"{_value('self.experience.max_staleness', 4)} + 1"
    )
    part = "(has({0}.name) && {0}.name != '' ? {0}.name : {0}.kind)".format
    distinct = f"self.reward.all(a, self.reward.exists_one(b, {part('a')} == {part('b')}))"
    fits = f"{_value('self.max_tokens', 256)} < {_value('self.max_context', 2048)}"
    replicas = _value("self.replicas", 1)
    within = (
        f"!has(self.scaling) || dyn(self.scaling) == null || "
        f"({_value('self.scaling.min_replicas', 1, depth=1)} <= {replicas} && "
        f"{replicas} <= self.scaling.max_replicas)"
    )
    return {
        "": [
            _rule("self == oldSelf", "spec: cannot be changed; make a new TrainingJob"),
            _rule(published, "trainer.publish_every: at most experience.max_staleness + 1"),
            _rule(distinct, "reward: two parts have the same name; give each a distinct `name`"),
        ],
        "sampling": [_rule(fits, "max_tokens: must be less than max_context")],
        "experience": [
            _rule(grouped, "group_size: at least 2 with an advantage that compares a group"),
            _rule(batch, f"batch_groups: at most {MAX_BATCH_EPISODES} episodes in a batch"),
        ],
        "rollout": [_rule(within, "replicas: must be within scaling")],
    }


def _value(path: str, default: Any, *, depth: int = 0) -> str:
    """CEL for a field that may be absent at any level below the first `depth + 1` names."""
    names = path.split(".")
    prefixes = [".".join(names[: i + 1]) for i in range(depth + 1, len(names))]
    there = " && ".join(f"has({prefix})" for prefix in prefixes)
    shown = f"'{default}'" if isinstance(default, str) else str(default)
    return f"({there} ? {path} : {shown})"


def _rule(rule: str, message: str) -> Schema:
    return {"rule": rule, "message": message}


def _status() -> Schema:
    whole = {"type": "integer", "format": "int64"}
    text = {"type": "string"}
    condition = {
        "type": "object",
        "required": ["type", "status", "lastTransitionTime", "reason", "message"],
        "properties": {
            "type": text,
            "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
            "observedGeneration": whole,
            "lastTransitionTime": {"type": "string", "format": "date-time"},
            "reason": text,
            "message": text,
        },
    }
    fields: Schema = {
        "jobId": text,
        "state": {"type": "string", "enum": [*(state.value for state in JobState), "rejected"]},
        "reason": text,
        "step": whole,
        "steps": whole,
        "version": whole,
        "evalReward": {"type": "number", "nullable": True},
        "rolloutReplicas": whole,
        "observedGeneration": whole,
        "conditions": {
            "type": "array",
            "items": condition,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    }
    return {"type": "object", "properties": fields}


def structural(schema: Schema, models: Schema) -> Schema:
    """A schema of pydantic in the form that Kubernetes asks for: no references, no unions."""
    if "$ref" in schema:
        target = models[schema["$ref"].rpartition("/")[2]]
        return structural(target | {k: v for k, v in schema.items() if k != "$ref"}, models)
    if "anyOf" in schema:
        (some,) = (branch for branch in schema["anyOf"] if branch.get("type") != "null")
        return structural(some, models) | {"nullable": True}
    out: Schema = {key: schema[key] for key in KEPT if key in schema}
    if "const" in schema:
        out["enum"] = [schema["const"]]
    if out["type"] == "integer":
        out["format"] = "int64"
    for bound in ("minimum", "maximum"):
        exclusive = "exclusive" + bound.capitalize()
        if exclusive in schema:
            out |= {bound: schema[exclusive], exclusive: True}
        elif bound in schema:
            out[bound] = schema[bound]
    if out["type"] == "array":
        out["items"] = structural(schema.get("items") or schema["prefixItems"][0], models)
    if out["type"] == "object":
        out |= _members(schema, models)
    return out


def _members(schema: Schema, models: Schema) -> Schema:
    out: Schema = {}
    if "required" in schema:
        out["required"] = list(schema["required"])
    if "properties" in schema:
        fields = schema["properties"].items()
        out["properties"] = {name: structural(field, models) for name, field in fields}
    if schema.get("additionalProperties") is True:
        out["x-kubernetes-preserve-unknown-fields"] = True
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
