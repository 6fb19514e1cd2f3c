"""Generates the chart's TrainingJob definition from the models of the job file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from paceline.config.base import PluginSpec
from paceline.config.job import MAX_BATCH_EPISODES, JobSpec
from paceline.config.needs import GROUP
from paceline.enums import JobState
from paceline.plugins import declared, registry

TARGET = Path(__file__).parent / "paceline" / "files" / "trainingjob.yaml"
HEADER = "# Written by deploy/helm/crd.py from paceline.config.job; do not edit.\n"
KEPT = (
    *("type", "enum", "pattern", "minLength", "maxLength", "minItems", "maxItems"),
    *("maxProperties", "description"),
)
# Bounds are float64 in the cluster: one farther out is not what it was, and if that is no int64 the
# server refuses every object with the field. The format is a bound itself.
EXACT = 1 << 53
INT_OR_STRING = {"integer", "string"}
OPEN = "x-kubernetes-preserve-unknown-fields"

Schema = dict[str, Any]


class _Plain(yaml.SafeDumper):
    """A dumper that repeats shared nodes instead of using aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def files() -> dict[Path, str]:
    """Path and content of the file."""
    text = yaml.dump(definition(), Dumper=_Plain, sort_keys=False, width=100)
    return {TARGET: HEADER + text}


def definition() -> Schema:
    """The CustomResourceDefinition."""
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
    spec["description"] = "The job file without `name`; only `suspend` can be changed."
    fixed = [*spec["properties"]]
    spec["properties"]["suspend"] = {
        "type": "boolean",
        "description": "Pauses the job if true, and resumes it if false. Without it, the API and "
        "the command line do.",
    }
    for place, rules in _rules(fixed).items():
        target = spec["properties"][place] if place else spec
        target["x-kubernetes-validations"] = rules
    return spec


def _rules(fixed: Iterable[str]) -> dict[str, list[Schema]]:
    """The rules of `JobSpec` between fields, by section ("" is the whole spec).

    Fields that are `fixed` cannot be changed.
    """
    size = _value("group_size", "experience")
    # Recipes can set what a job leaves out, so that defaults say nothing about it.
    laid = "has(self.recipe) && self.recipe.size() > 0"
    size_of_all = _value("experience.group_size")
    advantage = _value("experience.advantage.kind")
    grouped = f"!({advantage} in {_compares_groups()}) || {size_of_all} >= 2"
    batch = f"{_value('batch_groups', 'experience')} * {size} <= {MAX_BATCH_EPISODES}"
    published = f"{_value('trainer.publish_every')} <= {_value('experience.max_staleness')} + 1"
    part = "(has({0}.name) && {0}.name != '' ? {0}.name : {0}.kind)".format
    distinct = f"self.reward.all(a, self.reward.exists_one(b, {part('a')} == {part('b')}))"
    fits = f"{_value('max_tokens', 'sampling')} < {_value('max_context', 'sampling')}"
    replicas = _value("replicas", "rollout")
    within = (
        f"!has(self.scaling) || dyn(self.scaling) == null || "
        f"({_value('scaling.min_replicas', 'rollout', depth=1)} <= {replicas} && "
        f"{replicas} <= self.scaling.max_replicas)"
    )
    return {
        "": [
            *(
                _rule(
                    f"has(self.{name}) == has(oldSelf.{name}) && "
                    f"(!has(self.{name}) || self.{name} == oldSelf.{name})",
                    f"{name}: cannot be changed; make a new TrainingJob",
                )
                for name in fixed
            ),
            _rule(
                f"{laid} || {published}",
                "trainer.publish_every: at most experience.max_staleness + 1",
            ),
            _rule(
                f"{laid} || {grouped}",
                "experience.group_size: at least 2 with an advantage that compares a group",
            ),
            _rule(distinct, "reward: two parts have the same name; give each a distinct `name`"),
        ],
        "sampling": [_rule(fits, "max_tokens: must be less than max_context")],
        "experience": [
            _rule(batch, f"batch_groups: at most {MAX_BATCH_EPISODES} episodes in a batch"),
        ],
        "rollout": [_rule(within, "replicas: must be within scaling")],
    }


def _compares_groups() -> list[str]:
    """Built-in advantages that need groups; for others the gateway checks jobs."""
    return [
        name
        for name in sorted(registry.built_in("advantages"))
        if GROUP in declared(registry.options_of("advantages", name)).needs_with({})
    ]


def _value(path: str, section: str = "", *, depth: int = 0) -> str:
    """CEL for a field below `self`, which is a section of the spec, or by its default.

    It may be absent at any level below the first `depth` names.
    """
    names = ["self", *path.split(".")]
    prefixes = [".".join(names[: i + 1]) for i in range(depth + 1, len(names))]
    there = " && ".join(f"has({prefix})" for prefix in prefixes)
    default = _default(f"{section}.{path}" if section else path)
    shown = f"'{default}'" if isinstance(default, str) else str(default)
    return f"({there} ? self.{path} : {shown})"


def _default(path: str) -> Any:
    """Default of an omitted field, from the models of the job file."""
    *sections, last = path.split(".")
    model: type[BaseModel] = JobSpec
    for name in sections:
        annotation = model.model_fields[name].annotation
        (model,) = (
            kind
            for kind in (annotation, *get_args(annotation))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        )
    return model.model_fields[last].default


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
    """A pydantic schema as a Kubernetes structural schema, without references and unions."""
    if schema.get("$ref", "").endswith(f"/{PluginSpec.__name__}"):
        # It may be a name alone, and a field of two types has none here.
        return {key: schema[key] for key in ("description",) if key in schema} | {OPEN: True}
    if "$ref" in schema:
        target = models[schema["$ref"].rpartition("/")[2]]
        return structural(target | {k: v for k, v in schema.items() if k != "$ref"}, models)
    if "anyOf" in schema and {each.get("type") for each in schema["anyOf"]} == INT_OR_STRING:
        return {"x-kubernetes-int-or-string": True}
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
        if abs(schema.get(exclusive, schema.get(bound, 0))) > EXACT:
            continue
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
        out[OPEN] = True
    if "patternProperties" in schema:  # the gateway checks the names
        (values,) = schema["patternProperties"].values()
        out["additionalProperties"] = structural(values, models)
    return out
