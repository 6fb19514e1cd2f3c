"""Controllers die, freeze and lose the API without effect on jobs."""

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from paceline.enums import WorkerKind

# Many waits follow each other, each for as long as a busy machine may need.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
Job = Callable[..., dict[str, Any]]
Until = Callable[..., Any]


def uids(world: Any) -> dict[str, str]:
    """Everything made for jobs, by name."""
    ours = "app.kubernetes.io/managed-by=paceline-controller"
    return {
        f"{kind}/{body['metadata']['name']}": body["metadata"]["uid"]
        for kind in ("Deployment", "Job", "Service", "Pod")
        for body in world.cluster.list(kind, ours)
    }


# Stands for as long as nothing holds its holder up for seconds, and ends while a test waits.
SHORT = {"lease_s": 8.0}


def running_job(world: Any, tiny_job: Job, until_true: Until, name: str) -> str:
    job_id: str = world.services.submit(tiny_job(name=name))
    world.running(job_id)
    until_true(lambda: len(uids(world)) == 5, "not all is made")
    until_true(lambda: all_run(world, job_id), "not all runs")
    return job_id


def all_run(world: Any, job_id: str) -> bool:
    pods = world.cluster.list("Pod", f"paceline.dev/job={job_id}")
    return {pod["status"].get("phase") for pod in pods} == {"Running"}


def test_a_new_controller_adopts_what_runs(world: Any, tiny_job: Job, until_true: Until) -> None:
    world.start("ctl-0", kubernetes=SHORT)
    job_id = running_job(world, tiny_job, until_true, "survives")
    before = uids(world)
    world.kill("ctl-0")
    world.start("ctl-1", kubernetes=SHORT)
    until_true(lambda: world.leader() == "ctl-1", "nobody leads")
    for name in (f"trainer-{job_id}", f"rollout-{job_id}"):
        told = f"adopted process={name}"
        until_true(lambda text=told: text in world.log("ctl-1"), "it is not adopted")
    time.sleep(1)
    assert uids(world) == before
    world.nodes.fail(f"trainer-{job_id}-1-0")
    until_true(lambda: world.cluster.get("Pod", f"trainer-{job_id}-2-0"), "not looked after")
    assert not world.nodes.overlaps


def test_a_stopping_controller_keeps_pods_and_hands_over(
    world: Any, tiny_job: Job, until_true: Until
) -> None:
    world.start("ctl-0", kubernetes={"lease_s": 60.0})
    running_job(world, tiny_job, until_true, "left")
    before = uids(world)
    world.start("ctl-1", kubernetes={"lease_s": 60.0})
    assert world.leader() == "ctl-0"
    assert world.stop("ctl-0") == 0
    assert world.leader() in {"", "ctl-1"}, "the lease was not handed over"
    until_true(lambda: world.leader() == "ctl-1", "the lease was not taken over")
    time.sleep(1)
    assert uids(world) == before


def test_a_frozen_leader_does_no_harm(
    world: Any, tiny_job: Job, until_true: Until, is_serving: Callable[[int], bool]
) -> None:
    world.start("ctl-0", kubernetes=SHORT)
    until_true(lambda: world.leader() == "ctl-0", "nobody leads")
    world.start("ctl-1", kubernetes=SHORT)
    until_true(lambda: is_serving(world.ports["ctl-1"]), "a standby is well too")
    job_id = running_job(world, tiny_job, until_true, "frozen")
    ends = ended_terms(world, "ctl-0")
    world.signal("ctl-0", signal.SIGSTOP)
    until_true(lambda: world.leader() == "ctl-1", "nobody takes over")
    world.nodes.fail(f"trainer-{job_id}-1-0")
    until_true(lambda: world.cluster.get("Pod", f"trainer-{job_id}-2-0"), "not looked after")
    before = uids(world)
    visits = len(writes(world))
    world.signal("ctl-0", signal.SIGCONT)
    until_true(lambda: ended_terms(world, "ctl-0") > ends, "still thinks it leads")
    time.sleep(2)
    assert uids(world) == before
    assert world.leader() == "ctl-1"
    # Events and leases apart, nobody wrote anything since.
    assert len(writes(world)) == visits


def ended_terms(world: Any, name: str = "ctl-0") -> int:
    return world.log(name).count("leads no longer")


def writes(world: Any) -> list[Any]:
    made = world.server.visits_of("system:serviceaccount:ml:rel-paceline-controller")
    return [
        visit
        for visit in made
        if visit.access.verb not in {"get", "list", "watch"}
        and visit.access.resource not in {"events", "leases"}
    ]


def begun_terms(world: Any, name: str = "ctl-0") -> int:
    return world.log(name).count(" leads identity")


def test_an_unreachable_cluster_is_left_alone(world: Any, tiny_job: Job, until_true: Until) -> None:
    world.start(kubernetes=SHORT)
    job_id = running_job(world, tiny_job, until_true, "outage")
    before = uids(world)
    ends = ended_terms(world)
    world.relay.cut()
    until_true(lambda: ended_terms(world) > ends, "still acts")
    time.sleep(2)
    assert world.services.job(job_id).state == "running"
    terms = begun_terms(world)
    world.relay.mend()
    until_true(lambda: begun_terms(world) > terms, "does not come back")
    time.sleep(1)
    assert uids(world) == before
    world.nodes.fail(f"trainer-{job_id}-1-0")
    until_true(lambda: world.cluster.get("Pod", f"trainer-{job_id}-2-0"), "not looked after")


def test_a_watch_with_expired_history_restarts(
    world: Any, tiny_job: Job, until_true: Until
) -> None:
    world.start()
    job_id = running_job(world, tiny_job, until_true, "gone")
    world.relay.cut()
    world.nodes.fail(f"trainer-{job_id}-1-0")
    until_true(
        lambda: world.cluster.get("Job", f"trainer-{job_id}-1").get("status", {}).get("failed"),
        "the Job does not fail",
    )
    world.server.expire_history()
    world.relay.mend()
    until_true(lambda: world.cluster.get("Pod", f"trainer-{job_id}-2-0"), "did not see the death")


def test_objects_wait_for_a_gateway_that_is_away(
    world: Any, tiny_job: Job, until_true: Until
) -> None:
    world.start("ctl-0", kubernetes=SHORT)
    world.services.kill(WorkerKind.GATEWAY)
    world.apply("patient", tiny_job(name="patient"))
    until_true(lambda: "cannot advance" in world.log(), "not tried")
    assert not world.status("patient")
    world.kill("ctl-0")
    world.services.start(WorkerKind.GATEWAY, http_port=0)
    world.start("ctl-1", kubernetes=SHORT)
    until_true(lambda: world.status("patient").get("jobId"), "not submitted")
    assert len(world.cluster.events("Submitted")) <= 1


def test_a_submission_with_a_lost_reply_is_found_again(
    world: Any, tiny_job: Job, until_true: Until
) -> None:
    world.apply("once", tiny_job(name="once"))
    world.start("ctl-0", kubernetes=SHORT)
    job_id = until_true(lambda: world.status("once").get("jobId"), "not submitted")
    world.kill("ctl-0")
    # As if the controller had died before it could write the answer down.
    world.cluster.set_status("TrainingJob", "once", {"jobId": None, "conditions": None})
    world.start("ctl-1", kubernetes=SHORT)
    assert until_true(lambda: world.status("once").get("jobId"), "not submitted") == job_id


def test_preempted_rollouts_are_reported_and_not_counted_as_failures(
    world: Any, tiny_job: Job, until_true: Until
) -> None:
    world.start(give_up_after=1)
    job_id = running_job(world, tiny_job, until_true, "spot")
    (pod,) = world.cluster.list("Pod", f"paceline.dev/workload=rollout-{job_id}")
    taken = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "PreemptionByScheduler",
        "message": "a machine was taken away",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    world.nodes.drain_s = 3600.0  # it is still there when the controller looks at it
    status = {"conditions": [*pod["status"]["conditions"], taken]}
    world.cluster.set_status("Pod", pod["metadata"]["name"], status)
    world.cluster.delete("Pod", pod["metadata"]["name"])
    (event,) = until_true(lambda: world.cluster.events("Preempted"), "no event")
    assert "a machine was taken away" in event["note"]
    time.sleep(1)
    assert world.services.job(job_id).state == "running"
    ready = until_true(
        lambda: [
            each
            for each in world.cluster.list("Pod", f"paceline.dev/workload=rollout-{job_id}")
            if each["metadata"]["name"] != pod["metadata"]["name"]
        ],
        "not replaced",
    )
    assert len(ready) == 1
