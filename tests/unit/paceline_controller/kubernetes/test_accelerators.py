"""Pods ask for as many accelerators as their processes compute on."""

import copy
from typing import Any

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import parse_job
from paceline.config.sections.kubernetes import KubernetesOptions, KueueOptions
from paceline.config.service import ControllerOptions
from paceline.enums import JobState, WorkerKind
from paceline.errors import ConfigError
from paceline_controller.jobs.plan import LiveJob, Wanted, plan, problem
from paceline_controller.runtimes.kubernetes import names
from paceline_controller.runtimes.kubernetes.manifests import ManifestContext, build, nodes_of

GPU, FABRIC = "nvidia.com/gpu", "rdma/hca"


def template(gpus: Any = 8, **limits: Any) -> dict[str, Any]:
    quantities = {"memory": "64Gi", GPU: gpus, **limits}
    return {
        "metadata": {"labels": {"own": "label"}},
        "spec": {
            "containers": [
                {"name": "paceline", "image": "i", "resources": {"limits": quantities}},
                {"name": "beside", "image": "i", "resources": {"limits": {"cpu": "1"}}},
            ]
        },
    }


def live(**sections: Any) -> LiveJob:
    spec = parse_job(
        {
            "name": "sums",
            "tenant": "math",
            "model": {"path": "m"},
            "tasks": {"environment": "arithmetic"},
            "reward": ["exact"],
            **sections,
        }
    )
    return LiveJob("sums-1", JobState.RUNNING, 0, spec)


def options(**kubernetes: Any) -> ControllerOptions:
    return ControllerOptions(runtime="kubernetes", kubernetes=KubernetesOptions(**kubernetes))


def planned(kind: WorkerKind, job: LiveJob, given: ControllerOptions | None = None) -> Wanted:
    workloads = plan([job], given or options()).values()
    return next(each for each in workloads if each.kind is kind and each.job_id)


def pod_of(wanted: Wanted, pods: dict[str, Any], ranks_per_pod: int = 8) -> dict[str, Any]:
    context = ManifestContext("rel", ranks_per_pod=ranks_per_pod)
    body = build(wanted, pods, incarnation=1, context=context)[-1]
    kubernetes_validate.validate(body, "1.37", strict=True)
    return body["spec"]["template"]["spec"]


def limits_of(pod: dict[str, Any]) -> dict[str, Any]:
    return pod["containers"][0]["resources"].get("limits", {})


@given(st.integers(1, 512), st.integers(1, 16))
def test_the_pods_of_a_trainer_have_an_accelerator_for_each_rank(ranks: int, most: int) -> None:
    wanted = planned(WorkerKind.TRAINER, live(trainer={"world_size": ranks}))
    context = ManifestContext("rel", ranks_per_pod=most)
    given_pods = template(most, **{FABRIC: 1})
    body = build(wanted, given_pods, incarnation=1, context=context)[-1]
    limits = limits_of(body["spec"]["template"]["spec"])
    assert limits[GPU] * body["spec"]["completions"] == ranks
    assert (limits["memory"], limits[FABRIC]) == ("64Gi", 1)
    assert given_pods == template(most, **{FABRIC: 1})


@pytest.mark.parametrize(
    ("engine", "count"),
    [
        ({"kind": "torch"}, 1),
        ({"kind": "sglang", "tp": 4}, 4),
        ({"kind": "sglang", "tp": 2, "dp": 2}, 4),
        ({"kind": "torch", "device": "cpu"}, None),
        ({"kind": "simulated"}, None),
    ],
)
@pytest.mark.parametrize("in_pool", [1, 4, "2"])
def test_the_pods_of_an_engine_have_what_it_computes_on(
    engine: dict[str, Any], count: int | None, in_pool: Any
) -> None:
    wanted = planned(WorkerKind.ROLLOUT, live(rollout={"engine": engine}))
    assert limits_of(pod_of(wanted, template(in_pool))).get(GPU) == count


def test_more_than_one_for_a_rank_stay_in_proportion() -> None:
    wanted = planned(WorkerKind.TRAINER, live(trainer={"world_size": 3}))
    assert limits_of(pod_of(wanted, template(16)))[GPU] == 6


def test_a_pod_with_too_few_for_its_ranks_asks_for_enough() -> None:
    wanted = planned(WorkerKind.TRAINER, live(trainer={"world_size": 4}))
    assert limits_of(pod_of(wanted, template(1)))[GPU] == 4


def test_slices_and_other_vendors_are_accelerators_too() -> None:
    names_of_kinds = (
        "nvidia.com/mig-3g.40gb",
        "amd.com/gpu",
        "gpu.intel.com/i915",
        "google.com/tpu",
    )
    for name in names_of_kinds:
        pods = template(8)
        limits = pods["spec"]["containers"][0]["resources"]["limits"]
        del limits[GPU]
        limits[name] = 8
        wanted = planned(WorkerKind.TRAINER, live(trainer={"world_size": 2}))
        assert limits_of(pod_of(wanted, pods)) == {"memory": "64Gi", name: 2}


def test_jobs_on_the_cpu_ask_for_none() -> None:
    job = live(trainer={"devices": "cpu"}, rollout={"devices": "cpu"})
    assert not problem(job, options())
    for kind in (WorkerKind.TRAINER, WorkerKind.ROLLOUT):
        assert limits_of(pod_of(planned(kind, job), template())) == {"memory": "64Gi"}


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"trainer": {"devices": "0,1"}}, "trainer.devices"),
        ({"rollout": {"devices": "2"}}, "rollout.devices"),
        ({"rollout": {"colocate": True}}, "rollout.colocate"),
    ],
)
def test_gpus_of_one_machine_cannot_be_named(sections: dict[str, Any], field: str) -> None:
    assert problem(live(**sections), options()).startswith(f"{field}: ")
    assert not problem(live(**sections), ControllerOptions())


def claiming() -> dict[str, Any]:
    pods = template()
    pods["spec"]["containers"][0]["resources"] = {
        "limits": {"memory": "64Gi"},
        "claims": [{"name": "gpu"}, {"name": "fabric", "request": "port"}],
    }
    pods["spec"]["resourceClaims"] = [
        {"name": "gpu", "resourceClaimTemplateName": "one-h100"},
        {"name": "fabric", "resourceClaimName": "shared-fabric"},
    ]
    return pods


@pytest.mark.parametrize("ranks", [1, 3, 16])
def test_claims_of_an_accelerator_are_repeated(ranks: int) -> None:
    pod = pod_of(planned(WorkerKind.TRAINER, live(trainer={"world_size": ranks})), claiming())
    count = ranks // nodes_of(ranks, 8)[0]
    *own, shared = pod["resourceClaims"]
    assert [claim["name"] for claim in own] == [f"gpu-{index}" for index in range(count)]
    assert {claim["resourceClaimTemplateName"] for claim in own} == {"one-h100"}
    assert shared == {"name": "fabric", "resourceClaimName": "shared-fabric"}
    claims = pod["containers"][0]["resources"]["claims"]
    assert claims == [
        *({"name": f"gpu-{index}"} for index in range(count)),
        {"name": "fabric", "request": "port"},
    ]


def test_an_amount_that_is_no_number_is_refused() -> None:
    wanted = planned(WorkerKind.TRAINER, live())
    with pytest.raises(ConfigError, match=r"nvidia.com/gpu: '8Gi' is no whole number"):
        pod_of(wanted, template("8Gi"))


def test_a_deployment_of_an_earlier_release_keeps_its_template() -> None:
    wanted = Wanted("rollout-a", WorkerKind.ROLLOUT, job_id="a", pool="default")
    assert limits_of(pod_of(wanted, template(3)))[GPU] == 3


def test_a_deployment_remembers_what_it_asks_for() -> None:
    queues = options(kueue=KueueOptions(queue="all", tenants={"math": "math-gpus"}))
    job = live(rollout={"engine": {"kind": "sglang", "tp": 2}})
    wanted = planned(WorkerKind.ROLLOUT, job, queues)
    (body,) = build(wanted, template(), incarnation=0, context=ManifestContext("rel"))
    assert (wanted.accelerators, wanted.queue) == (2, "math-gpus")
    assert names.wanted_of(copy.deepcopy(body)) == wanted


@pytest.mark.parametrize("jobset", [False, True])
def test_what_has_pods_is_queued_and_nothing_else(jobset: bool) -> None:
    queues = options(kueue=KueueOptions(queue="gpus"))
    context = ManifestContext("rel", jobset=jobset, network_policies=True)
    for kind in (WorkerKind.TRAINER, WorkerKind.ROLLOUT):
        *beside, workload = build(
            planned(kind, live(), queues), template(), incarnation=1, context=context
        )
        assert workload["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
        assert workload["spec"].get("suspend", False) is (kind is WorkerKind.TRAINER)
        assert all("kueue.x-k8s.io/queue-name" not in b["metadata"]["labels"] for b in beside)
    (_, unqueued) = build(
        planned(WorkerKind.TRAINER, live()), template(), incarnation=1, context=ManifestContext("r")
    )
    assert "kueue.x-k8s.io/queue-name" not in unqueued["metadata"]["labels"]
