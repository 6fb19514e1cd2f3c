"""The lifecycle of jobs on a cluster, from the first object to the last."""

from collections.abc import Callable
from typing import Any

import pytest
import yaml

# Many waits follow each other, each for as long as a busy machine may need.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
Job = Callable[..., dict[str, Any]]
Until = Callable[..., Any]


def test_a_training_job_from_apply_to_success(world: Any, tiny_job: Job, until_true: Until) -> None:
    world.start()
    world.apply("first", tiny_job(name="first"))
    job_id = until_true(lambda: world.status("first").get("jobId"), "not submitted")
    made = [f"Deployment/rollout-{job_id}", f"Job/trainer-{job_id}-1", f"Service/trainer-{job_id}"]
    until_true(lambda: set(made) <= set(world.made()), "objects are not made")
    world.running(job_id)
    until_true(lambda: world.status("first").get("state") == "running", "state is not mirrored")
    until_true(lambda: world.status("first").get("rolloutReplicas") == 1, "no rollouts counted")
    status = world.status("first")
    assert status["steps"] == 20
    assert {c["type"]: c["status"] for c in status["conditions"]} == {
        "Accepted": "True",
        "Succeeded": "Unknown",
    }
    assert (
        "paceline.dev/cancel" in world.cluster.get("TrainingJob", "first")["metadata"]["finalizers"]
    )
    for pool in ("rel-paceline-environment", "rel-paceline-reward"):
        until_true(
            lambda name=pool: world.cluster.get("Deployment", name)["spec"]["replicas"] == 1,
            f"{pool} is not scaled",
        )
    world.services.set_state(job_id, "succeeded")
    until_true(lambda: not world.made(), "something is left")
    until_true(lambda: world.status("first").get("state") == "succeeded", "end is not mirrored")
    until_true(
        lambda: not world.cluster.get("TrainingJob", "first")["metadata"].get("finalizers"),
        "the object is held",
    )
    until_true(lambda: told(world, "first", "Submitted", "Started", "Succeeded"), "no events")


def told(world: Any, name: str, *reasons: str) -> bool:
    """Whether there are events of all these reasons about a TrainingJob."""
    about = [
        event["reason"]
        for event in world.cluster.list("Event")
        if (event["regarding"]["kind"], event["regarding"]["name"]) == ("TrainingJob", name)
    ]
    return set(reasons) <= set(about)


def test_a_job_over_rest_has_no_object_and_goes_with_the_installation(
    world: Any, tiny_job: Job, until_true: Until
) -> None:
    world.start()
    job_id = world.services.submit(tiny_job(name="plain"))
    # Of the trainer and of the rollout workers: what makes pods, the pods, and a Secret each.
    until_true(lambda: len(world.made()) == 8, "objects are not made")
    assert world.cluster.list("TrainingJob") == []
    owner = world.cluster.get("Deployment", "rel-paceline-controller")["metadata"]["uid"]
    for kind in ("Job", "NetworkPolicy", "Secret", "Service", "Deployment"):
        for body in world.cluster.list(kind, f"paceline.dev/job={job_id}"):
            assert [each["uid"] for each in body["metadata"]["ownerReferences"]] == [owner]
    world.kill()
    world.cluster.delete("Deployment", "rel-paceline-controller")
    until_true(lambda: not world.made(), "something is left")


def test_a_dead_trainer_is_followed_by_one_that_never_meets_it(
    world: Any, tiny_job: Job, until_true: Until
) -> None:
    world.nodes.drain_s = 1.0
    world.start()
    job_id = world.services.submit(tiny_job(name="dies", trainer={"world_size": 16}))
    world.running(job_id)
    first = f"trainer-{job_id}-1"
    until_true(lambda: world.cluster.get("Pod", f"{first}-1"), "no second rank")
    rollouts = world.cluster.get("Deployment", f"rollout-{job_id}")["metadata"]["uid"]
    world.nodes.fail(f"{first}-1", message="CUDA error: out of memory", code=1)
    until_true(lambda: world.cluster.get("Pod", f"trainer-{job_id}-2-1"), "no second incarnation")
    assert world.cluster.get("Job", first) is None
    assert not world.nodes.overlaps
    assert world.cluster.get("Deployment", f"rollout-{job_id}")["metadata"]["uid"] == rollouts
    (event,) = until_true(lambda: world.cluster.events("Restarted"), "no event")
    assert "out of memory" in event["note"]
    assert event["regarding"]["name"] == f"trainer-{job_id}-2"


def test_a_deleted_training_job_is_cancelled_before_it_goes(
    world: Any, tiny_job: Job, until_true: Until
) -> None:
    world.start()
    world.apply("unwanted", tiny_job(name="unwanted"))
    job_id = until_true(lambda: world.status("unwanted").get("jobId"), "not submitted")
    world.running(job_id)
    world.cluster.delete("TrainingJob", "unwanted")
    until_true(lambda: world.cluster.get("TrainingJob", "unwanted") is None, "it stays")
    assert world.services.job(job_id).state == "cancelled"
    assert not world.made()


def test_a_job_that_is_deleted_takes_its_object_along(
    world: Any, tiny_job: Job, until_true: Until
) -> None:
    world.start()
    world.apply("goes", tiny_job(name="goes"))
    job_id = until_true(lambda: world.status("goes").get("jobId"), "not submitted")
    world.running(job_id)
    world.services.delete(job_id)
    until_true(lambda: world.cluster.get("TrainingJob", "goes") is None, "it stays")
    assert not world.made()
    assert len(world.cluster.events("Submitted")) == 1


def test_an_invalid_spec_is_reported_and_not_retried(
    world: Any, tiny_job: Job, until_true: Until
) -> None:
    world.start()
    job = tiny_job(name="wrong")
    job["tasks"] = {"environment": "no-such-thing"}
    world.apply("wrong", job)
    until_true(lambda: world.status("wrong").get("conditions"), "no verdict")
    assert world.status("wrong")["state"] == "rejected"
    (condition,) = world.status("wrong")["conditions"]
    assert (condition["type"], condition["status"]) == ("Accepted", "False")
    assert "no-such-thing" in condition["message"]
    until_true(lambda: world.cluster.events("Rejected"), "no event")
    assert not world.made()
    world.cluster.delete("TrainingJob", "wrong")
    until_true(lambda: world.cluster.get("TrainingJob", "wrong") is None, "it stays")


def test_replicas_changed_by_others_are_set_right(
    world: Any, tiny_job: Job, until_true: Until
) -> None:
    world.start()
    job_id = world.services.submit(tiny_job(name="scaled"))
    world.running(job_id)
    name = f"rollout-{job_id}"
    world.cluster.patch("Deployment", name, {"spec": {"replicas": 7}})
    until_true(
        lambda: world.cluster.get("Deployment", name)["spec"]["replicas"] == 1, "stays at seven"
    )
    (event,) = until_true(lambda: world.cluster.events("Scaled")[-1:], "no event")
    assert event["regarding"]["kind"] in {"Job", "Deployment"}


def test_a_release_may_set_what_the_controller_has_scaled(world: Any, until_true: Until) -> None:
    """Like Helm 4 when `scaling: controller` becomes `fixed`: it applies without force."""
    world.start()
    name = "rel-paceline-environment"
    deployments = world.cluster.of("Deployment")
    place = {"name": name, "namespace": "ml"}

    def claims() -> bool:
        found = deployments.get(**place).to_dict()["metadata"]["managedFields"]
        return any("f:replicas" in each["fieldsV1"].get("f:spec", {}) for each in found)

    # As a controller that kept its claim has left it.
    change = {"spec": {"replicas": 4}}
    media = "application/merge-patch+json"
    deployments.patch(body=change, **place, content_type=media, field_manager="paceline-controller")
    until_true(lambda: deployments.get(**place).spec.replicas == 1, "not set right")
    until_true(lambda: not claims(), "the number has an owner")
    metadata = {"name": name, "namespace": "ml"}
    fixed = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata}
    applied = deployments.server_side_apply(
        body={**fixed, "spec": {"replicas": 3}}, **place, field_manager="helm"
    )
    assert applied.spec.replicas == 3


def test_a_changed_template_replaces_rollouts_and_leaves_the_trainer(
    world: Any, tiny_job: Job, until_true: Until
) -> None:
    world.start()
    job_id = world.services.submit(tiny_job(name="updated"))
    world.running(job_id)
    trainer = world.cluster.get("Job", f"trainer-{job_id}-1")["metadata"]
    world.change_image("trainer", "rollout-default")

    def image() -> str:
        body = world.cluster.get("Deployment", f"rollout-{job_id}")
        return body["spec"]["template"]["spec"]["containers"][0]["image"]

    until_true(lambda: image() == "paceline/worker:2", "rollouts stay as they were")
    after = world.cluster.get("Job", f"trainer-{job_id}-1")["metadata"]
    assert after["uid"] == trainer["uid"]
    assert after["generation"] == trainer["generation"]


def test_pods_that_cannot_start_are_reported_until_the_job_fails(
    world: Any, tiny_job: Job, until_true: Until
) -> None:
    unscheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes have a GPU",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    world.nodes.says["trainer"] = {"phase": "Pending", "conditions": [unscheduled]}
    world.start("ctl-0")
    world.apply("waits", tiny_job(name="waits"))
    until_true(lambda: "0/3 nodes have a GPU" in world.status("waits").get("reason", ""), "silent")
    assert world.status("waits")["state"] == "starting"
    until_true(lambda: told(world, "waits", "Waiting"), "no event")
    assert world.stop("ctl-0") == 0
    # Another one, so that the first look at the job is not in a hurry.
    hasty = {"pending_timeout_s": 1.0}
    world.start("ctl-1", kubernetes=hasty, give_up_after=2, max_restart_backoff_s=0.5)
    until_true(lambda: world.status("waits").get("state") == "failed", "waits for ever")
    assert "Unschedulable: 0/3 nodes have a GPU" in world.status("waits")["reason"]
    until_true(lambda: told(world, "waits", "GaveUp"), "no event")
    until_true(lambda: not world.made(), "something is left")


def test_pods_that_the_cluster_refuses_are_the_reason_of_their_job(
    world: Any, tiny_job: Job, until_true: Until
) -> None:
    """Deployments report this in their status, Jobs only in events; `paceline list` shows both."""
    words = 'pods "x" is forbidden: exceeded quota: few, requested: pods=1, used: pods=0'
    world.nodes.refuses["trainer"] = words
    world.start()
    world.apply("held", tiny_job(name="held"))

    def is_reason(text: str) -> bool:
        status = world.status("held")
        job_id = status.get("jobId")
        known = world.services.job(job_id).reason if job_id else ""
        return all(text in each if text else not each for each in (status.get("reason", ""), known))

    until_true(lambda: is_reason(f"FailedCreate: Error creating: {words}"), "the trainer is silent")
    job_id = world.status("held")["jobId"]
    assert world.services.job(job_id).state == "starting"
    assert world.status("held")["reason"].startswith(f"trainer-{job_id}: ")
    world.nodes.refuses.clear()
    until_true(lambda: is_reason(""), "still told")
    denied = "denied the request: Policy 'team' has denied: no label"
    world.nodes.refuses["rollout"] = denied
    (pod,) = world.cluster.list("Pod", f"paceline.dev/workload=rollout-{job_id}")
    world.cluster.delete("Pod", pod["metadata"]["name"])
    until_true(lambda: is_reason(denied), "the rollout is silent")


def test_a_job_in_a_queue_of_kueue_waits_without_an_end_and_survives_eviction(
    world: Any, tiny_job: Job, until_true: Until
) -> None:
    world.nodes.quota = False
    world.start(kubernetes={"kueue": {"queue": "gpus"}}, max_restart_backoff_s=0.5)
    job_id = world.services.submit(tiny_job(name="queued"))
    words = f"trainer-{job_id}: waits in Kueue's queue 'gpus' for quota"
    until_true(lambda: words in world.services.job(job_id).reason, "it waits in silence")
    assert world.services.job(job_id).state == "starting"
    world.nodes.quota = True
    world.running(job_id)
    assert world.services.job(job_id).incarnation == 1
    world.nodes.quota = False
    until_true(lambda: words in world.services.job(job_id).reason, "it is evicted in silence")
    until_true(lambda: world.cluster.get("Job", f"trainer-{job_id}-2"), "no second incarnation")
    world.nodes.quota = True
    until_true(lambda: not world.services.job(job_id).reason, "still told")
    assert world.services.job(job_id).incarnation == 2
    assert world.nodes.overlaps == []


def test_a_template_that_cannot_work_fails_the_job_with_its_reason(
    world: Any, tiny_job: Job, until_true: Until
) -> None:
    """At the first rejection, since another incarnation would fail in the same way."""
    path = world.folder / "templates" / "trainer.yaml"
    template = yaml.safe_load(path.read_text())
    twice = [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
    container = template["spec"]["containers"][0]
    container |= {"env": twice, "ports": [{"containerPort": "eight"}]}
    path.write_text(yaml.safe_dump(template))
    world.start()
    world.apply("broken", tiny_job(name="broken"))
    until_true(lambda: world.status("broken").get("state") == "failed", "goes on for ever")
    reason = world.status("broken")["reason"]
    assert "cannot be started" in reason
    assert "containerPort: expected numeric (int or float), got string" in reason
    assert '.env: duplicate entries for key [name="A"]' in reason
    assert world.services.job(world.status("broken")["jobId"]).incarnation == 1
    until_true(lambda: not world.made(), "something is left")


def test_a_trainer_as_a_jobset(world: Any, tiny_job: Job, until_true: Until) -> None:
    world.install_jobsets()
    world.start(kubernetes={"jobset": True})
    job_id = world.services.submit(tiny_job(name="set", trainer={"world_size": 16}))
    world.running(job_id)
    assert world.cluster.list("Job") == []
    world.nodes.fail(f"trainer-{job_id}-1-n-0-1")
    until_true(lambda: world.cluster.get("JobSet", f"trainer-{job_id}-2"), "no second incarnation")
    assert world.cluster.get("JobSet", f"trainer-{job_id}-1") is None
    world.services.set_state(job_id, "succeeded")
    until_true(lambda: not world.made(), "something is left")


def test_without_the_kind_of_training_jobs_jobs_come_over_rest(
    world: Any, tiny_job: Job, until_true: Until
) -> None:
    definitions = world.cluster.of("CustomResourceDefinition")
    definitions.delete(name="trainingjobs.paceline.dev")
    world.start()
    job_id = world.services.submit(tiny_job(name="alone"))
    world.running(job_id)
    (event,) = until_true(lambda: world.cluster.events("Started")[:1], "no event")
    assert event["regarding"]["kind"] in {"Job", "Deployment"}
