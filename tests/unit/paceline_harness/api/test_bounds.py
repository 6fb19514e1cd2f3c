"""Whole numbers and their bounds in custom kinds, judged as the server does with float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline_harness.cluster.api.requests.errors import StatusError
from paceline_harness.cluster.api.resources.bounds import boundary_problems
from paceline_harness.cluster.api.resources.kinds import DEFINITIONS

ROOT = Path(__file__).resolve().parents[4]
CHART = ROOT / "deploy/helm/paceline/files/trainingjob.yaml"
JOBS = "trainingjobs.paceline.dev"
Object = dict[str, Any]


def wrong(value: float, **node: Any) -> list[str]:
    schema = {"properties": {"at": {"items": {"type": "integer", **node}}}}
    return list(boundary_problems(schema, {"at": [value]}))


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({"format": "int64", "maximum": 2**63 - 1}, "Maximum boundary"),
        ({"format": "int64", "minimum": -(2**63)}, "Minimum boundary"),
        ({"format": "int64", "minimum": -9.223372036854776e18}, "Minimum boundary"),
        ({"format": "int64", "minimum": 0.5}, "Minimum boundary"),
        ({"format": "int32", "maximum": 2**31}, "Maximum boundary"),
        ({"maximum": 1e19}, "Maximum boundary"),
        ({"format": "int64", "minimum": -(2**53), "maximum": 2**53}, ""),
        ({"format": "int32", "maximum": 2**31 - 1}, ""),
    ],
)
def test_bounds_that_are_no_number_of_the_field(node: Object, text: str) -> None:
    form = f" with format {node['format']}" if "format" in node else " (default format)"
    expected = [f"{text} value must be of type integer{form} in at[0]"] if text else []
    assert wrong(1, **node) == expected


@given(st.integers(-(2**70), 2**70))
def test_bounds_of_every_size(bound: int) -> None:
    """Within 2^53 a float64 is the number itself; at 2^63 none is."""
    found = bool(wrong(0, format="int64", maximum=bound))
    if abs(bound) <= 2**53:
        assert not found
    elif abs(bound) >= 2**63:
        assert found
    assert bool(wrong(bound, format="int64")) == (not -(2**63) <= bound < 2**63)


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
    return found


@pytest.mark.parametrize("job", jobs())
def test_the_server_takes_every_example_as_an_object(world: Any, job: Object) -> None:
    world.make(DEFINITIONS, yaml.safe_load(CHART.read_text()))
    made = world.make(JOBS, job)
    assert made["spec"] == job["spec"]


@pytest.mark.parametrize("section", ["tasks", "eval"])
@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), 2**63, -(2**63) - 1])
def test_seeds_are_those_of_64_bits(world: Any, section: str, seed: int) -> None:
    world.make(DEFINITIONS, yaml.safe_load(CHART.read_text()))
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
