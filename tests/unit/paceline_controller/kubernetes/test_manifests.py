"""Objects are valid for every supported Kubernetes, whatever the names."""

import base64
import copy
import json
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.enums import WorkerKind
from paceline.errors import ConfigError
from paceline_controller.jobs.plan import Wanted, rollout_name
from paceline_controller.runtimes.kubernetes import names
from paceline_controller.runtimes.kubernetes.manifests import (
    ManifestContext,
    build,
    credential_of,
    digest,
    nodes_of,
    owner_reference,
)
from paceline_controller.runtimes.kubernetes.resources import DEPLOYMENTS
from paceline_trainer.ranks.rank_info import RankInfo, find_rank

VERSIONS = ("1.31", "1.37")
OWNER = owner_reference({"metadata": {"name": "ctl", "uid": "u-1"}}, DEPLOYMENTS)
TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"app.kubernetes.io/name": "paceline", "own": "label"}},
    "spec": {
        "containers": [
            {
                "name": "paceline",
                "image": "paceline/trainer:1",
                "command": ["python", "-m", "paceline_trainer"],
                "args": ["--set", "job_id=$(JOB_ID)"],
                "env": [{"name": "POD_NAME", "value": "x"}, {"name": "JOB_ID", "value": "none"}],
            },
            {"name": "beside", "image": "busybox"},
        ],
        "terminationGracePeriodSeconds": 30,
    },
}
label = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?", fullmatch=True)
suffix = st.text("0123456789abcdef", min_size=6, max_size=6)
jobs = st.tuples(label, suffix).map("-".join)


def trainer(job_id: str = "math-0a1b2c", world_size: int = 1) -> Wanted:
    return Wanted(f"trainer-{job_id}", WorkerKind.TRAINER, job_id=job_id, world_size=world_size)


def rollout(job_id: str = "math-0a1b2c", pool: str = "default", replicas: int = 2) -> Wanted:
    name = rollout_name(job_id, pool)
    return Wanted(name, WorkerKind.ROLLOUT, job_id=job_id, pool=pool, replicas=replicas)


def context(*, jobset: bool = False, ranks_per_pod: int = 8) -> ManifestContext:
    return ManifestContext("rel", owner=OWNER, ranks_per_pod=ranks_per_pod, jobset=jobset)


def valid(body: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(body, version, strict=True)


def is_dns_label(name: str) -> bool:
    return len(name) <= 63 and name[0].isalnum() and name[-1].isalnum() and name.lower() == name


# Each example is checked against large schemas.
@settings(max_examples=25, deadline=None)
@given(jobs, label, st.integers(0, 64), st.integers(1, 512), st.integers(1, 9999999))
def test_objects_are_valid_for_all_names(
    job_id: str, pool: str, replicas: int, world_size: int, incarnation: int
) -> None:
    for wanted in (rollout(job_id, pool[:30].rstrip("-"), replicas), trainer(job_id, world_size)):
        for body in build(wanted, TEMPLATE, incarnation=incarnation, context=context()):
            kubernetes_validate.validate(body, "1.37", strict=True)
            carried = body["metadata"]["labels"].values()
            assert all(len(value) <= 63 for value in carried)
            assert names.workload_of(body) == wanted.name
            last = body["spec"].get("completions", 1) - 1
            assert is_dns_label(f"{body['metadata']['name']}-{last}")


@given(jobs, st.integers(1, 512), st.integers(1, 9999999))
def test_names_of_pods_in_a_jobset_are_valid(job_id: str, world: int, incarnation: int) -> None:
    wanted = trainer(job_id, world)
    (body,) = build(wanted, TEMPLATE, incarnation=incarnation, context=context(jobset=True))
    assert is_dns_label(f"{body['metadata']['name']}-n-0-{world - 1}")


@given(st.lists(jobs, unique=True, max_size=20))
def test_shortened_names_stay_apart(ids: list[str]) -> None:
    made = [names.object_name(f"{kind}-{job}") for job in ids for kind in ("trainer", "rollout")]
    assert len(set(made)) == len(made)


def test_a_rollout_pool_is_a_deployment() -> None:
    (body,) = build(rollout(pool="spot"), TEMPLATE, incarnation=0, context=context())
    valid(body)
    assert body["metadata"]["name"] == "rollout-math-0a1b2c-spot"
    assert body["metadata"]["ownerReferences"] == [OWNER]
    assert body["spec"]["replicas"] == 2
    pod = body["spec"]["template"]
    assert body["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert pod["metadata"]["labels"]["own"] == "label"
    main, beside = pod["spec"]["containers"]
    env = {each["name"]: each["value"] for each in main["env"]}
    assert env == {"JOB_ID": "math-0a1b2c", "POOL": "spot", "POD_NAME": "x"}
    assert "env" not in beside
    assert names.wanted_of(body) == rollout(pool="spot")


def test_a_trainer_is_an_indexed_job_with_names_for_its_pods() -> None:
    service, job = build(trainer(world_size=16), TEMPLATE, incarnation=3, context=context())
    valid(service)
    valid(job)
    assert service["metadata"]["name"] == "trainer-math-0a1b2c"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    assert job["metadata"]["name"] == "trainer-math-0a1b2c-3"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert job["spec"]["backoffLimit"] == 0
    pod = job["spec"]["template"]
    assert pod["spec"]["subdomain"] == "trainer-math-0a1b2c"
    assert pod["spec"]["restartPolicy"] == "Never"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    env = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
    assert env["MASTER_ADDR"] == "trainer-math-0a1b2c-3-0.trainer-math-0a1b2c"
    assert (env["NODES"], env["RANKS_PER_NODE"], env["INCARNATION"]) == ("2", "8", "3")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_single_rank_is_started_without_torchrun(world_size: int) -> None:
    template = copy.deepcopy(TEMPLATE)
    launcher = ["python", "-m", "torch.distributed.run", "--nproc-per-node", "$(RANKS_PER_NODE)"]
    main = template["spec"]["containers"][0]
    main["command"] = [*launcher, "-m", "paceline_trainer"]
    wanted = trainer(world_size=world_size)
    _, job = build(wanted, template, incarnation=1, context=context())
    started = job["spec"]["template"]["spec"]["containers"][0]
    env = {each["name"]: each.get("value") for each in started["env"]}
    if world_size == 1:
        assert started["command"] == ["python", "-m", "paceline_trainer"]
        assert replace(find_rank(env), master_host="") == RankInfo()
    else:
        assert started["command"] == main["command"]
        assert "RANK" not in env


def test_a_trainer_can_be_a_jobset() -> None:
    (body,) = build(trainer(world_size=4), TEMPLATE, incarnation=1, context=context(jobset=True))
    assert body["kind"] == "JobSet"
    job = body["spec"]["replicatedJobs"][0]["template"]
    # There is no schema of a JobSet here, but what it makes is a Job.
    valid({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job})
    env = job["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {
        "name": "MASTER_ADDR",
        "value": "trainer-math-0a1b2c-1-n-0-0.trainer-math-0a1b2c-1",
    } in env


@given(st.integers(1, 4096), st.integers(1, 16))
def test_ranks_are_shared_out_evenly(world_size: int, ranks_per_pod: int) -> None:
    nodes, ranks = nodes_of(world_size, ranks_per_pod)
    assert nodes * ranks == world_size
    assert ranks <= ranks_per_pod


def test_the_template_itself_is_left_alone() -> None:
    before = digest(TEMPLATE)
    build(trainer(), TEMPLATE, incarnation=1, context=context())
    assert digest(TEMPLATE) == before
    assert digest({**TEMPLATE, "spec": {}}) != before


def test_a_template_without_our_container_is_refused() -> None:
    template = {"spec": {"containers": [{"name": "other"}]}}
    with pytest.raises(ConfigError, match=r"named 'paceline'; has \['other'\]"):
        build(rollout(), template, incarnation=0, context=context())


def test_the_pods_of_a_workload_mount_its_credential_and_nobody_elses() -> None:
    found: list[str] = []
    for wanted, incarnation in (
        (trainer(), 1),
        (trainer(), 2),
        (rollout(), 0),
        (rollout("b-1"), 0),
    ):
        secret = credential_of(wanted, "plj_x", context=context())
        valid(secret)
        assert base64.b64decode(secret["data"]["credential"]) == b"plj_x"
        body = build(wanted, TEMPLATE, incarnation=incarnation, context=context())[-1]
        pod = body["spec"]["template"]["spec"]
        (volume,) = pod["volumes"]
        assert volume["secret"] == {"secretName": secret["metadata"]["name"]}
        main, beside = pod["containers"]
        (mount,) = main["volumeMounts"]
        assert mount == {
            "name": volume["name"],
            "mountPath": "/etc/paceline/credential",
            "readOnly": True,
        }
        assert "volumeMounts" not in beside
        assert "plj_x" not in json.dumps(body)
        found.append(secret["metadata"]["name"])
    assert len(set(found)) == 3  # the next incarnation takes the place of the one before


def test_a_trainer_sees_the_folder_of_no_other_job() -> None:
    template = copy.deepcopy(TEMPLATE)
    template["spec"]["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": "c"}}]
    mount = {"name": "data", "mountPath": "/var/lib/paceline"}
    template["spec"]["containers"][0]["volumeMounts"] = [mount]
    job = build(trainer(), template, incarnation=1, context=context())[-1]
    valid(job)
    pod = job["spec"]["template"]["spec"]
    whole, _, hidden, own = pod["containers"][0]["volumeMounts"]
    assert whole == {**mount, "readOnly": True}
    assert hidden["mountPath"] == "/var/lib/paceline/jobs"
    assert {"name": hidden["name"], "emptyDir": {}} in pod["volumes"]
    folder = "jobs/math-0a1b2c"
    assert own == {"name": "data", "mountPath": f"/var/lib/paceline/{folder}", "subPath": folder}
    # Without a volume there is nothing to hide.
    template["spec"]["volumes"] = [{"name": "data", "emptyDir": {}}]
    job = build(trainer(), template, incarnation=1, context=context())[-1]
    assert mount in job["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]


def test_pods_of_one_trainer_reach_each_other() -> None:
    wide = replace(context(), network_policies=True)
    policy, service, job = build(trainer(world_size=16), TEMPLATE, incarnation=3, context=wide)
    valid(policy)
    chosen = policy["spec"]["podSelector"]
    assert chosen["matchLabels"] == service["spec"]["selector"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert chosen["matchLabels"].items() <= labels.items()
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": chosen}]}]
    assert policy["spec"]["egress"] == [{"to": [{"podSelector": chosen}]}]
    other = build(trainer("b-1"), TEMPLATE, incarnation=1, context=wide)[0]
    assert other["spec"]["podSelector"] != chosen
