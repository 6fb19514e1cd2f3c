"""The TrainingJob definition accepts and rejects the same specs as the gateway."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from kubernetes_double.api.resources.custom import check_rules, schema_of
from kubernetes_double.api.resources.schemas import Definitions, decode, validate
from paceline.config import JobSpec, named, parse_job
from paceline.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
Object = dict[str, Any]
MINIMAL: Object = {
    "model": {"path": "/var/lib/paceline/models/small"},
    "tasks": {"environment": "arithmetic", "options": {"digits": 2, "deep": {"er": [1, None]}}},
    "reward": [{"kind": "exact", "tolerance": 0.1}],
}


@pytest.fixture(scope="module")
def definition(render: Callable[..., list[Object]]) -> Object:
    (found,) = (o for o in render() if o["kind"] == "CustomResourceDefinition")
    kubernetes_validate.validate(found, "1.29", strict=True)
    return found


@pytest.fixture(scope="module")
def version(definition: Object) -> Object:
    return definition["spec"]["versions"][0]


@pytest.fixture(scope="module")
def schema(version: Object) -> Object:
    return version["schema"]["openAPIV3Schema"]


def training_job(spec: Object, name: str = "one") -> Object:
    head = {"apiVersion": "paceline.dev/v1alpha1", "kind": "TrainingJob"}
    return head | {"metadata": {"name": name, "namespace": "training"}, "spec": spec}


def problems(definition: Object, value: Object, old: Object | None = None) -> list[str]:
    """What the API server would report: unknown fields, schema, rules."""
    schema = schema_of(definition, "v1alpha1", Definitions())
    decoded = decode(schema, value)
    found = [f"unknown field {path}" for path in decoded.unknown]
    found += [f"{one.field}: {one.message}" for one in validate(schema, decoded.value)]
    broken = check_rules(schema, decoded.value, old)
    return found or [f"{one['field']}: {one['message']}" for one in broken]


def test_every_field_of_the_job_file_is_in_the_schema(definition: Object) -> None:
    """A job with all defaults written out, including nulls, is accepted."""
    whole = parse_job({"name": "one"} | MINIMAL).model_dump(mode="json")
    del whole["name"]
    whole["rollout"]["scaling"] = {"min_replicas": 1, "max_replicas": 4}
    assert set(whole) == set(JobSpec.model_fields) - {"name"}
    assert problems(definition, training_job(whole)) == []
    whole["rollout"]["scaling"] = whole["eval"] = None
    assert problems(definition, training_job(whole)) == []


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
    "no model": ({"model": None}, "spec.model: Required value"),
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
    "a word for a number": (
        {"stop": {"steps": "many"}},
        "spec.stop.steps in body must be of type integer",
    ),
    "no steps": ({"stop": {"steps": 0}}, "0 is less than or equal to the minimum of 0"),
    "unknown activation": (
        {"rollout": {"activation": "soon"}},
        'Unsupported value: "soon": supported values: ',
    ),
    "unknown field": ({"trainer": {"learning_rate": 1}}, "unknown field spec.trainer"),
    "unknown field of an evaluation": (
        {"evals": {"short": {"number": 8}}},
        "unknown field spec.evals.short.number",
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


# Names alone that an object must write in full, as docs/jobs.md says, and the type of the field.
WRITTEN_IN_FULL: dict[str, tuple[Object, str]] = {
    "recipe": ({"recipe": "dapo"}, "spec.recipe in body must be of type array"),
    "reward": ({"reward": ["exact"]}, "spec.reward[0] in body must be of type object"),
    "tracking": ({"tracking": ["tensorboard"]}, "spec.tracking[0] in body must be of type object"),
    "experience.advantage": (
        {"experience": {"advantage": "grpo"}},
        "spec.experience.advantage in body must be of type object",
    ),
    "experience.replay": (
        {"experience": {"replay": "best"}},
        "spec.experience.replay in body must be of type object",
    ),
}


def submitted(job: Object) -> None:
    """The gateway's checks of a job file without its model."""
    if wrong := list(named.problems(parse_job(job))):
        raise ConfigError("; ".join(wrong))


@pytest.mark.parametrize("title", GOOD)
def test_good_objects_are_accepted_by_both_doors(title: str, definition: Object) -> None:
    spec = copy.deepcopy(MINIMAL) | GOOD[title]
    assert problems(definition, training_job(spec)) == []
    parse_job({"name": "one"} | spec)


@pytest.mark.parametrize("field", WRITTEN_IN_FULL)
def test_a_name_alone_that_an_object_cannot_have_is_refused_with_the_type(
    field: str, definition: Object
) -> None:
    change, message = WRITTEN_IN_FULL[field]
    found = problems(definition, training_job(copy.deepcopy(MINIMAL) | change))
    assert any(problem.startswith(f"spec.{field}") and message in problem for problem in found)
    parse_job({"name": "one"} | copy.deepcopy(MINIMAL) | change)
    assert f"`{field}`" in (ROOT / "docs" / "jobs.md").read_text()


def test_every_other_plug_in_may_be_a_name_alone(schema: Object) -> None:
    spec = schema["properties"]["spec"]["properties"]
    closed = {path for path, node in nodes({"properties": spec}) if closed_plugin(node)}
    assert {path.strip(".").removesuffix("[]") for path in closed} == {*WRITTEN_IN_FULL} - {
        "recipe"
    }


def closed_plugin(node: Object) -> bool:
    """Whether it holds a plug-in's name and options, and has to be an object."""
    loose = "x-kubernetes-preserve-unknown-fields"
    return "kind" in node.get("properties", {}) and bool(node.get(loose)) and "type" in node


@pytest.mark.parametrize("title", BAD)
def test_bad_objects_are_refused_by_both_doors(title: str, definition: Object) -> None:
    change, message = BAD[title]
    spec = copy.deepcopy(MINIMAL) | change
    found = problems(definition, training_job(spec))
    assert any(message in problem for problem in found), found
    with pytest.raises(ConfigError):
        submitted({"name": "one"} | spec)


@pytest.mark.parametrize("name", ["a" * 54, "two.parts", "-a", "A"])
def test_names_are_those_of_job_files(name: str, definition: Object) -> None:
    assert any("metadata.name" in p for p in problems(definition, training_job(MINIMAL, name)))
    with pytest.raises(ConfigError):
        parse_job({"name": name} | MINIMAL)
    assert problems(definition, training_job(MINIMAL, "a" * 53)) == []


def test_spec_cannot_be_changed(definition: Object) -> None:
    old = training_job(MINIMAL)
    new = training_job(copy.deepcopy(MINIMAL) | {"stop": {"steps": 3}})
    assert problems(definition, new) == []
    (problem,) = problems(definition, new, old)
    assert problem.startswith("spec: Invalid value: ")
    assert problem.endswith("stop: cannot be changed; make a new TrainingJob")
    suspended = training_job(MINIMAL | {"suspend": True})
    assert problems(definition, suspended, old) == problems(definition, old, suspended) == []
    deeper = copy.deepcopy(old)
    deeper["spec"]["tasks"]["options"]["digits"] = 3
    assert problems(definition, deeper, old)
    told = copy.deepcopy(old) | {"status": {"state": "running", "step": 3, "evalReward": 0.5}}
    assert problems(definition, told, old) == []


def test_status_is_what_the_controller_writes(
    version: Object, schema: Object, definition: Object
) -> None:
    assert version["subresources"] == {"status": {}}
    assert set(schema["properties"]["status"]["properties"]) == {
        *("jobId", "state", "reason", "step", "steps", "version", "evalReward"),
        *("rolloutReplicas", "observedGeneration", "conditions"),
    }
    condition = {"type": "Done", "status": "True", "reason": "R", "message": "m"}
    condition["lastTransitionTime"] = "2030-01-01T00:00:00Z"
    done = training_job(MINIMAL) | {"status": {"state": "succeeded", "conditions": [condition]}}
    assert problems(definition, done) == []
    wrong = training_job(MINIMAL) | {"status": {"state": "finished"}}
    assert problems(definition, wrong)


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
