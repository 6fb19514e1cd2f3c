"""The TrainingJob definition as the server reads it: float64 bounds, costs of rules, examples."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from kubernetes_double.api.costs import EXPRESSION_LIMIT, SCHEMA_LIMIT, costs
from kubernetes_double.api.requests.errors import StatusError
from kubernetes_double.api.resources.custom import check_definition
from kubernetes_double.api.resources.kinds import DEFINITIONS, Kinds
from kubernetes_double.api.world import World

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/paceline/files/trainingjob.yaml"
JOBS = "trainingjobs.paceline.dev"
SCHEMA = "spec.validation.openAPIV3Schema"
Object = dict[str, Any]


@pytest.fixture(scope="module")
def kinds() -> Kinds:
    return Kinds()


@pytest.fixture
def world(kinds: Kinds) -> World:
    """A server that has the definition."""
    made = World(kinds)
    made.make(DEFINITIONS, yaml.safe_load(CHART.read_text()))
    return made


def jobs() -> list[Any]:
    """All jobs of the examples as objects, whatever they were."""
    found: list[Any] = []
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        for job in yaml.safe_load_all(path.read_text()):
            if "model" in job:
                head = {"apiVersion": "paceline.dev/v1alpha1", "kind": "TrainingJob"}
                job = {**head, "metadata": {"name": job.pop("name")}, "spec": job}
            if job.get("kind") == "TrainingJob":
                found.append(pytest.param(job, id=str(path.relative_to(ROOT / "examples"))))
    assert len(found) > 5
    return found


@pytest.mark.parametrize("job", jobs())
def test_the_server_takes_every_example_as_an_object(world: World, job: Object) -> None:
    made = world.make(JOBS, job)
    assert made["spec"] == job["spec"]


@pytest.mark.parametrize("section", ["tasks", "eval"])
@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), 2**63, -(2**63) - 1])
def test_seeds_are_those_of_64_bits(world: World, section: str, seed: int) -> None:
    job = yaml.safe_load((ROOT / "examples/trainingjob.yaml").read_text())
    job["spec"][section]["seed"] = seed
    if -(2**63) <= seed < 2**63:
        assert world.make(JOBS, job)["spec"][section]["seed"] == seed
        return
    with pytest.raises(StatusError, match=f"format int64 in spec.{section}.seed") as refused:
        world.make(JOBS, job)
    assert refused.value.code == 422


def test_the_definition_has_exact_bounds_only() -> None:
    def bounds(node: Any) -> list[float]:
        if isinstance(node, list):
            return [bound for each in node for bound in bounds(each)]
        if not isinstance(node, dict):
            return []
        own = [
            node[name] for name in ("minimum", "maximum") if type(node.get(name)) in (int, float)
        ]
        return own + [bound for each in node.values() for bound in bounds(each)]

    found = bounds(yaml.safe_load(CHART.read_text()))
    assert len(found) > 100
    assert [bound for bound in found if abs(bound) > 2**53] == []


def test_the_definition_of_the_chart_is_far_from_its_budget() -> None:
    found = yaml.safe_load(CHART.read_text())
    assert check_definition(found) == []
    (version,) = found["spec"]["versions"]
    each = [one.cost for one in costs(version["schema"]["openAPIV3Schema"], SCHEMA)]
    assert len(each) >= 7
    assert max(each) < EXPRESSION_LIMIT / 3
    assert sum(each) < SCHEMA_LIMIT / 30
