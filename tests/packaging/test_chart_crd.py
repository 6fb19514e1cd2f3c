"""The TrainingJob definition accepts and rejects the same specs as the gateway."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cel
import jsonschema
import kubernetes_validate
import pytest
import yaml
from jsonschema import validators

from paceline.config import JobSpec, named, parse_job
from paceline.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
Object = dict[str, Any]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
JOBS = [path for path in EXAMPLES if "kind" not in yaml.safe_load(path.read_text())]
MINIMAL: Object = {
    "model": {"path": "/var/lib/paceline/models/small"},
    "tasks": {"environment": "arithmetic", "options": {"digits": 2, "deep": {"er": [1, None]}}},
    "reward": [{"kind": "exact", "tolerance": 0.1}],
}


@pytest.fixture(scope="module")
def version(render: Callable[..., list[Object]]) -> Object:
    (found,) = (o for o in render() if o["kind"] == "CustomResourceDefinition")
    kubernetes_validate.validate(found, "1.29", strict=True)
    return found["spec"]["versions"][0]


@pytest.fixture(scope="module")
def schema(version: Object) -> Object:
    return version["schema"]["openAPIV3Schema"]


def training_job(spec: Object, name: str = "one") -> Object:
    head = {"apiVersion": "paceline.dev/v1alpha1", "kind": "TrainingJob"}
    return head | {"metadata": {"name": name, "namespace": "training"}, "spec": spec}


def problems(schema: Object, value: Object, old: Object | None = None) -> list[str]:
    """Errors that the API server would report: schema, unknown fields, rules."""
    found = [error.message for error in validator(schema).iter_errors(value)]
    found += [f"unknown field {path}" for path in unknown(schema, value)]
    return found + ([] if found else list(broken_rules(schema, value, old)))


def validator(schema: Object) -> Any:
    """OpenAPI 3.0 is JSON schema draft 4 with `nullable`."""
    draft = jsonschema.Draft4Validator

    def of_type(checker: Any, kinds: Any, value: Any, part: Object) -> Iterator[Any]:
        if value is not None or not part.get("nullable"):
            yield from draft.VALIDATORS["type"](checker, kinds, value, part)

    return validators.extend(draft, {"type": of_type})(schema)


def unknown(schema: Object, value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, list) and "items" in schema:
        for item in value:
            yield from unknown(schema["items"], item, f"{path}[]")
    elif isinstance(value, dict):
        fields = schema.get("properties", {})
        for key, below in value.items():
            if child := fields.get(key) or schema.get("additionalProperties"):
                yield from unknown(child, below, f"{path}.{key}")
            elif not schema.get("x-kubernetes-preserve-unknown-fields") and path != ".metadata":
                yield f"{path}.{key}"


def broken_rules(schema: Object, value: Any, old: Any) -> Iterator[str]:
    """Messages of violated rules; those with `oldSelf` apply to updates only."""
    if value is None:
        return
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" not in rule["rule"]:
            holds = cel.evaluate(rule["rule"], {"self": value})
        elif old is not None:
            holds = cel.evaluate(rule["rule"], {"self": value, "oldSelf": old})
        else:
            continue
        if holds is not True:
            yield rule["message"]
    if isinstance(value, list):
        for item in value:
            yield from broken_rules(schema["items"], item, None)
    elif isinstance(value, dict):
        for key in schema.get("properties", {}).keys() & value.keys():
            before = old.get(key) if isinstance(old, dict) else None
            yield from broken_rules(schema["properties"][key], value[key], before)


@pytest.mark.parametrize("path", JOBS, ids=lambda p: p.name)
def test_the_example_jobs_are_accepted(path: Path, schema: Object) -> None:
    spec = yaml.safe_load(path.read_text())
    name = spec.pop("name")
    assert problems(schema, training_job(spec, name)) == []


def test_the_example_object_is_accepted(schema: Object) -> None:
    read = [yaml.safe_load(path.read_text()) for path in EXAMPLES]
    objects = [one for one in read if one.get("kind") == "TrainingJob"]
    assert len(JOBS) >= 3
    assert objects
    for one in objects:
        assert problems(schema, one) == []


def test_every_field_of_the_job_file_is_in_the_schema(schema: Object) -> None:
    """A job with all defaults written out, including nulls, is accepted."""
    whole = parse_job({"name": "one"} | MINIMAL).model_dump(mode="json")
    del whole["name"]
    whole["rollout"]["scaling"] = {"min_replicas": 1, "max_replicas": 4}
    assert set(whole) == set(JobSpec.model_fields) - {"name"}
    assert problems(schema, training_job(whole)) == []
    whole["rollout"]["scaling"] = whole["eval"] = None
    assert problems(schema, training_job(whole)) == []


GOOD: dict[str, Object] = {
    "least": {},
    "one more than staleness": {
        "trainer": {"publish_every": 5},
        "experience": {"max_staleness": 4},
    },
    "a group of one where nothing is compared": {
        "experience": {"group_size": 1, "advantage": {"kind": "mine:advantage"}}
    },
    "two parts of a kind with names": {
        "reward": [{"kind": "exact", "name": "a"}, {"kind": "exact", "name": "b"}]
    },
    "options of plug-ins": {
        "rollout": {"engine": {"kind": "sglang", "arguments": {"tp": 2}}},
        "trainer": {"objective": {"surrogate": {"kind": "ppo_clip", "low": 0.1}}},
    },
    "plug-ins by their names alone": {
        "sampling": {"topology": "linear"},
        "experience": {"sampler": "shuffle", "filters": ["zero_variance"]},
        "rollout": {"engine": "torch"},
        "trainer": {"objective": {"surrogate": "ppo_clip", "corrections": ["behaviour_weight"]}},
    },
    "evaluations by name": {"evals": {"short": {"tasks": 8, "options": {"digits": 1}}, "long": {}}},
    "seeds of 64 bits": {
        "tasks": {"environment": "arithmetic", "seed": 2**63 - 1},
        "eval": {"seed": -(2**63)},
    },
    "scaling": {"rollout": {"replicas": 2, "scaling": {"min_replicas": 1, "max_replicas": 8}}},
}
# What is wrong -> the change, and words of the message of the API server.
BAD: dict[str, tuple[Object, str]] = {
    "no model": ({"model": None}, "None is not of type 'object'"),
    "empty reward": ({"reward": []}, "[]"),
    "no room for a prompt": ({"sampling": {"max_tokens": 64, "max_context": 64}}, "max_context"),
    "no room by the default": ({"sampling": {"max_tokens": 4096}}, "max_context"),
    "a group of one, grpo": ({"experience": {"group_size": 1}}, "group_size"),
    "a group of one, rloo": (
        {"experience": {"group_size": 1, "advantage": {"kind": "rloo"}}},
        "group_size",
    ),
    "publishes too seldom": (
        {"trainer": {"publish_every": 2}, "experience": {"max_staleness": 0}},
        "publish_every",
    ),
    "publishes too seldom by the default": ({"trainer": {"publish_every": 6}}, "publish_every"),
    "two parts of a name": ({"reward": [{"kind": "exact"}, {"kind": "exact"}]}, "same name"),
    "a name that is another's kind": (
        {"reward": [{"kind": "exact"}, {"kind": "regex", "name": "exact"}]},
        "same name",
    ),
    "a word for a number": ({"stop": {"steps": "many"}}, "'many' is not of type 'integer'"),
    "no steps": ({"stop": {"steps": 0}}, "0 is less than or equal to the minimum of 0"),
    "unknown activation": ({"rollout": {"activation": "soon"}}, "'soon' is not one of"),
    "unknown field": ({"trainer": {"learning_rate": 1}}, "unknown field .spec.trainer"),
    "unknown field of an evaluation": (
        {"evals": {"short": {"number": 8}}},
        "unknown field .spec.evals.short.number",
    ),
    "evaluation of no samples": ({"evals": {"a": {"samples": 0}}}, "0 is less than or equal to"),
    "tenant in capitals": ({"tenant": "ACME"}, "'ACME' does not match"),
    "replicas out of bounds": (
        {"rollout": {"replicas": 9, "scaling": {"max_replicas": 8}}},
        "within scaling",
    ),
    "too many episodes in a batch": ({"experience": {"batch_groups": 65_536}}, "batch_groups"),
    "three betas": ({"trainer": {"optimizer": {"betas": [0.9, 0.99, 0.999]}}}, "too long"),
}


def submitted(job: Object) -> None:
    """The gateway's checks of a job file without its model."""
    if wrong := list(named.problems(parse_job(job))):
        raise ConfigError("; ".join(wrong))


@pytest.mark.parametrize("title", GOOD)
def test_good_objects_are_accepted_by_both_doors(title: str, schema: Object) -> None:
    spec = copy.deepcopy(MINIMAL) | GOOD[title]
    assert problems(schema, training_job(spec)) == []
    parse_job({"name": "one"} | spec)


@pytest.mark.parametrize("title", BAD)
def test_bad_objects_are_refused_by_both_doors(title: str, schema: Object) -> None:
    change, message = BAD[title]
    spec = copy.deepcopy(MINIMAL) | change
    found = problems(schema, training_job(spec))
    assert any(message in problem for problem in found), found
    with pytest.raises(ConfigError):
        submitted({"name": "one"} | spec)


@pytest.mark.parametrize("name", ["a" * 54, "two.parts", "-a", "A"])
def test_names_are_those_of_job_files(name: str, schema: Object) -> None:
    assert any("metadata.name" in p for p in problems(schema, training_job(MINIMAL, name)))
    with pytest.raises(ConfigError):
        parse_job({"name": name} | MINIMAL)
    assert problems(schema, training_job(MINIMAL, "a" * 53)) == []


def test_spec_cannot_be_changed(schema: Object) -> None:
    old = training_job(MINIMAL)
    new = training_job(copy.deepcopy(MINIMAL) | {"stop": {"steps": 3}})
    assert problems(schema, new) == []
    assert problems(schema, new, old) == ["stop: cannot be changed; make a new TrainingJob"]
    suspended = training_job(MINIMAL | {"suspend": True})
    assert problems(schema, suspended, old) == problems(schema, old, suspended) == []
    deeper = copy.deepcopy(old)
    deeper["spec"]["tasks"]["options"]["digits"] = 3
    assert problems(schema, deeper, old)
    told = copy.deepcopy(old) | {"status": {"state": "running", "step": 3, "evalReward": 0.5}}
    assert problems(schema, told, old) == []


def test_status_is_what_the_controller_writes(version: Object, schema: Object) -> None:
    assert version["subresources"] == {"status": {}}
    assert set(schema["properties"]["status"]["properties"]) == {
        *("jobId", "state", "reason", "step", "steps", "version", "evalReward"),
        *("rolloutReplicas", "observedGeneration", "conditions"),
    }
    condition = {"type": "Done", "status": "True", "reason": "R", "message": "m"}
    condition["lastTransitionTime"] = "2030-01-01T00:00:00Z"
    done = training_job(MINIMAL) | {"status": {"state": "succeeded", "conditions": [condition]}}
    assert problems(schema, done) == []
    wrong = training_job(MINIMAL) | {"status": {"state": "finished"}}
    assert problems(schema, wrong)


def test_columns(version: Object) -> None:
    columns = version["additionalPrinterColumns"]
    assert [c["name"] for c in columns if not c.get("priority")] == [
        *("State", "Step", "Steps", "Reward", "Rollouts", "Age")
    ]
    assert [c["name"] for c in columns if c.get("priority")] == ["JobId", "Reason"]


def test_schema_is_structural(schema: Object) -> None:
    """Requirements of a real API server on every schema node of a definition."""
    forbidden = {"$ref", "definitions", "dependencies", "deprecated", "discriminator", "id"}
    forbidden |= {"patternProperties", "readOnly", "writeOnly", "uniqueItems", "title", "const"}
    for path, node in nodes(schema):
        assert not forbidden & set(node), path
        loose = "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"
        assert "type" in node or any(node.get(one) for one in loose), path
        assert not {"properties", "additionalProperties"} <= set(node), path
        assert not {"anyOf", "oneOf", "allOf", "not"} & set(node), path
        for bound in ("exclusiveMinimum", "exclusiveMaximum"):
            assert node.get(bound, True) is True, path
        assert node.get("type") != "array" or isinstance(node["items"], dict), path


def nodes(schema: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    yield path, schema
    for key, below in schema.get("properties", {}).items():
        yield from nodes(below, f"{path}.{key}")
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from nodes(schema[name], f"{path}[]")


def test_the_crd_is_kept_at_uninstall_by_default(render: Callable[..., list[Object]]) -> None:
    def annotations(*sets: str) -> list[Object]:
        kind = "CustomResourceDefinition"
        return [o["metadata"].get("annotations", {}) for o in render(*sets) if o["kind"] == kind]

    assert annotations() == [{"helm.sh/resource-policy": "keep"}]
    assert annotations("default", "crds.keep=false") == [{}]
    assert annotations("default", "crds.install=false") == []
