"""A helm installation in a cluster of processes, from the first job to `helm uninstall`.

The tests share one installation and run in this order.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from paceline.front.client.client import Client
from paceline_harness.patience import PATIENCE_S

if TYPE_CHECKING:
    from conftest import Installation


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
Job = Callable[..., dict[str, Any]]
# Two workers make fewer tokens per second than the trainer of the demo uses up, also one that has
# half a core to itself.
SLOW = {"kind": "simulated", "batch_tokens_per_s": 200, "length": {"kind": "fixed", "mean": 3}}
ENDLESS: dict[str, Any] = {
    "eval": None,
    # Made-up answers are hardly ever right, and a trainer has nothing to do where all are wrong.
    "reward": [{"kind": "regex", "pattern": "^[^0-4]*$"}],
    "experience": {"filters": []},
    "rollout": {"engine": SLOW},
    "stop": {"steps": 100_000},
}
# From now on the trainer gets a thirtieth of its time, in pieces so small that what it waits for
# hardly takes longer. Without a pause: it would make up for it with steps that have been sampled.
# From outside of its pod, where it is the first process, which no other can stop.
THROTTLE = """
import contextlib, os, signal, sys, time
from pathlib import Path
ranks = []
for path in Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):  # it has ended since
        words = path.read_bytes().decode(errors="replace").split("\\0")
        if "paceline_trainer" in words and f"worker_id={sys.argv[1]}" in words:
            ranks.append(int(path.parent.name))
(rank,) = ranks
print("throttled", flush=True)
while True:
    for number, pause_s in ((signal.SIGSTOP, 0.145), (signal.SIGCONT, 0.005)):
        os.kill(rank, number)
        time.sleep(pause_s)
"""
KINDS = (
    *("Pod", "Deployment", "StatefulSet", "Job", "CronJob", "Service", "Secret", "ConfigMap"),
    *("ServiceAccount", "Role", "RoleBinding", "Lease", "NetworkPolicy", "PodDisruptionBudget"),
    *("PersistentVolumeClaim", "EndpointSlice"),
)
MADE_BY_THE_CLUSTER = {"kube-root-ca.crt", "default"}


def stepped(client: Client, job_id: str, step: int) -> Callable[[], bool]:
    return lambda: client.get(job_id).status.step >= step


def pod_of(installation: "Installation", component: str, job_id: str) -> str:
    """The only pod, once it is ready; a late probe may make it unready again."""
    found: list[str] = []

    def is_there() -> bool:
        found[:] = installation.pods(component, job_id)
        return len(found) == 1

    installation.cluster.until(is_there, f"one {component} pod", timeout_s=PATIENCE_S)
    return found[0]


def objects_of(installation: "Installation", job_id: str) -> list[dict[str, Any]]:
    kinds = ("Pod", "Deployment", "Job", "Service")
    selector = f"paceline.dev/job={job_id}"
    return [found for kind in kinds for found in installation.cluster.list(kind, selector)]


def trained_well(client: Client, job_id: str) -> dict[str, Any]:
    job = client.wait(job_id, timeout_s=2 * PATIENCE_S)
    assert job.status.state == "succeeded", job.status.reason
    audit = client.verify(job_id)
    assert audit.ok, audit.problems
    assert audit.dropped.get("exhausted_attempts", 0) == 0
    return job.status.summary


def test_helm_test_runs_a_job(installation: "Installation") -> None:
    said = installation.helm("test", installation.name, "--timeout", f"{PATIENCE_S:.0f}s")
    assert "Phase:          Succeeded" in said
    with installation.client() as client:
        (job,) = [job for job in client.list().jobs if job.status.name == "smoke-test"]
    assert (job.status.state, job.status.step) == ("succeeded", 2)
    assert not installation.cluster.list("Pod", "app.kubernetes.io/component=test")


def test_a_job_goes_on_when_its_pods_die(installation: "Installation", demo_job: Job) -> None:
    cluster = installation.cluster
    job = demo_job(
        model={"dtype": "float32"},
        trainer={"dtype": "float32", "checkpoint": {"every": 5, "keep": 2}},
        stop={"steps": 25},
    )
    with installation.client() as client:
        job_id = client.submit(job).status.job_id
        cluster.until(stepped(client, job_id, 7), "7 steps", timeout_s=PATIENCE_S)
        rollout = pod_of(installation, "rollout", job_id)
        trainer = pod_of(installation, "trainer", job_id)
        cluster.delete("Pod", rollout, grace_s=0)
        cluster.kill_pod(trainer)
        for component, dead in (("rollout", rollout), ("trainer", trainer)):
            cluster.until(
                lambda c=component, d=dead: set(installation.pods(c, job_id)) - {d},
                f"another {component} pod",
                timeout_s=PATIENCE_S,
            )
        summary = trained_well(client, job_id)
        assert client.get(job_id).status.incarnation == 2
    assert summary["steps"] == 25
    # Every pod samples with the weights that are trained, also those that came later.
    assert summary["mismatch_tokens"] > 0
    assert summary["logprob_diff_max"] <= 1e-4
    cluster.until(
        lambda: not objects_of(installation, job_id),
        "nothing of the job left",
        timeout_s=PATIENCE_S,
    )


def test_rollout_follows_the_trainer(installation: "Installation", demo_job: Job) -> None:
    cluster = installation.cluster
    scaling = {"min_replicas": 1, "max_replicas": 3}
    job = demo_job(**{**ENDLESS, "rollout": {"engine": SLOW, "scaling": scaling}})
    with installation.client() as client:
        job_id = client.submit(job).status.job_id
        pods: list[str] = []

        def are_three() -> bool:
            pods[:] = installation.pods("rollout", job_id)
            return len(pods) == 3

        cluster.until(are_three, "3 workers", timeout_s=PATIENCE_S)
        assert {pod.rpartition("-spot-")[1] for pod in pods} == {"-spot-"}
        trainer = pod_of(installation, "trainer", job_id)
        command = [sys.executable, "-c", THROTTLE, trainer]
        throttle = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert throttle.stdout is not None
        assert throttle.stdout.readline() == b"throttled\n"
        cluster.until(
            lambda: len(installation.pods("rollout", job_id)) == 1, "1 worker", timeout_s=PATIENCE_S
        )
        step = client.get(job_id).status.step
        cluster.until(stepped(client, job_id, step + 1), "a step with one", timeout_s=PATIENCE_S)
        counts = client.verify(job_id).counts
        client.cancel(job_id)
        assert client.wait(job_id, timeout_s=PATIENCE_S).status.state == "cancelled"
    throttle.communicate(timeout=PATIENCE_S)  # ends with the trainer
    assert counts["admitted"] > 0
    cluster.until(
        lambda: not objects_of(installation, job_id),
        "nothing of the job left",
        timeout_s=PATIENCE_S,
    )


def test_a_job_as_an_object(installation: "Installation", demo_job: Job) -> None:
    cluster = installation.cluster
    spec = demo_job(**ENDLESS)
    del spec["name"]
    body = {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "sums", "namespace": cluster.namespace},
        "spec": spec,
    }
    path = cluster.folder / "training_job.yaml"
    path.write_text(yaml.safe_dump(body))
    installation.kubectl("apply", "-f", str(path))
    cluster.until(
        lambda: status_of(installation).get("step", 0) >= 2, "2 steps", timeout_s=PATIENCE_S
    )
    header, row = installation.kubectl("get", "trainingjobs").splitlines()
    assert header.split() == ["NAME", "STATE", "STEP", "STEPS", "REWARD", "ROLLOUTS", "AGE"]
    assert row.split()[:2] == ["sums", "running"]
    job_id = status_of(installation)["jobId"]
    with installation.client() as client:
        assert client.get(job_id).status.name == "sums"
        installation.kubectl("delete", "trainingjob", "sums", f"--timeout={PATIENCE_S:.0f}s")
        assert client.get(job_id).status.state == "cancelled"
    cluster.until(
        lambda: not objects_of(installation, job_id),
        "nothing of the job left",
        timeout_s=PATIENCE_S,
    )
    body["spec"] = {**spec, "experience": {**spec["experience"], "group_size": 1}}
    path.write_text(json.dumps(body))
    with pytest.raises(AssertionError, match="group_size"):
        installation.kubectl("apply", "-f", str(path))


def status_of(installation: "Installation") -> dict[str, Any]:
    found = installation.cluster.get("paceline.dev/v1alpha1/TrainingJob", "sums") or {}
    return found.get("status") or {}


def test_a_job_outlives_an_upgrade_and_its_leader(
    installation: "Installation", demo_job: Job
) -> None:
    cluster = installation.cluster
    kept = installation.token(), installation.secret("paceline-store", "password")
    with installation.client() as client:
        job_id = client.submit(demo_job(**ENDLESS)).status.job_id
        cluster.until(stepped(client, job_id, 2), "2 steps", timeout_s=PATIENCE_S)
        pod_of(installation, "trainer", job_id)
        pod_of(installation, "rollout", job_id)
    installation.upgrade("--set", "services.gateway.graceSeconds=19")
    assert (installation.token(), installation.secret("paceline-store", "password")) == kept
    leader = leader_of(installation)
    cluster.delete("Pod", leader, grace_s=0)
    cluster.until(
        lambda: leader_of(installation) not in ("", leader),
        "another leader",
        timeout_s=PATIENCE_S,
    )
    with installation.client() as client:
        status = client.get(job_id).status
        cluster.until(stepped(client, job_id, status.step + 2), "2 more steps")
        assert status.incarnation == 1
        assert client.verify(job_id).ok
        client.cancel(job_id)
        assert client.wait(job_id, timeout_s=PATIENCE_S).status.state == "cancelled"
    seen = {event["regarding"]["name"] for event in installation.events()}
    assert f"trainer-{job_id}-1" in seen


def leader_of(installation: "Installation") -> str:
    found = installation.cluster.get("Lease", "paceline-controller") or {"spec": {}}
    return found["spec"].get("holderIdentity") or ""


def test_nothing_is_left(installation: "Installation", demo_job: Job) -> None:
    cluster = installation.cluster
    with installation.client() as client:
        job_id = client.submit(demo_job(**ENDLESS)).status.job_id
        cluster.until(stepped(client, job_id, 1), "a step", timeout_s=PATIENCE_S)
    installation.helm("uninstall", installation.name, "--timeout", f"{PATIENCE_S:.0f}s")
    cluster.until(lambda: not left(installation), "nothing left", timeout_s=PATIENCE_S)
    crd = "trainingjobs.paceline.dev"
    cluster.until(lambda: cluster.get("CustomResourceDefinition", crd) is None, "no kind left")


def left(installation: "Installation") -> list[str]:
    return [
        f"{kind}/{found['metadata']['name']}"
        for kind in KINDS
        for found in installation.cluster.list(kind)
        if found["metadata"]["name"] not in MADE_BY_THE_CLUSTER
    ]
