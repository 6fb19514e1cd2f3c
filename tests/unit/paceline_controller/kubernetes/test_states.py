"""What pods and their owners say."""

from typing import Any

from paceline_controller.runtimes.kubernetes import admission, states

LABELS = {
    "app.kubernetes.io/managed-by": "paceline-controller",
    "paceline.dev/workload": "w",
    "paceline.dev/job": "j",
}


def pod(name: str = "p", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": LABELS}, "status": status}


def holds(kind: str, value: str = "True", **more: str) -> dict[str, str]:
    return {"type": kind, "status": value, **more}


def deployment(replicas: int = 1) -> dict[str, Any]:
    return {"metadata": {"name": "w", "labels": LABELS}, "spec": {"replicas": replicas}}


def job(incarnation: int, *conditions: dict[str, str], completions: int = 1) -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"w-{incarnation}",
            "labels": LABELS,
            "annotations": {"paceline.dev/incarnation": str(incarnation)},
        },
        "spec": {"completions": completions},
        "status": {"conditions": list(conditions)},
    }


def of(incarnation: int, *conditions: dict[str, str]) -> dict[str, Any]:
    made = pod(conditions=list(conditions))
    made["metadata"]["annotations"] = {"paceline.dev/incarnation": str(incarnation)}
    return made


READY = holds("Ready")


def test_a_deployment_is_alive_while_its_pods_are() -> None:
    fresh = states.of_deployment(deployment(2), [])
    assert (fresh.alive, fresh.pending, fresh.replicas, fresh.ready) == (True, True, 2, 0)
    some = states.of_deployment(deployment(2), [pod(conditions=[READY]), pod()])
    assert (some.alive, some.pending, some.ready) == (True, False, 1)
    none = states.of_deployment(deployment(0), [])
    assert (none.alive, none.pending) == (True, False)


def crashing(restarts: int) -> dict[str, Any]:
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    return pod(containerStatuses=[{"name": "paceline", "restartCount": restarts, "state": waiting}])


def test_a_lasting_crash_loop_counts_as_dead() -> None:
    assert states.of_deployment(deployment(), [crashing(1)]).alive
    assert not states.of_deployment(deployment(), [crashing(states.MAX_RESTARTS)]).alive
    one_is_well = [crashing(99), pod(conditions=[READY])]
    assert states.of_deployment(deployment(2), one_is_well).alive


def test_the_newest_incarnation_counts() -> None:
    jobs = [job(2, completions=2), job(1, holds("Failed"))]
    starting = states.of_trainer(jobs, [of(1, READY), of(2, READY), of(2)])
    assert (starting.alive, starting.pending, starting.ready) == (True, True, 0)
    running = states.of_trainer(jobs, [of(2, READY), of(2, READY)])
    assert (running.alive, running.pending, running.ready) == (True, False, 1)
    assert not states.of_trainer([job(1, holds("Failed"))], []).alive
    assert not states.of_trainer([job(1, holds("Complete"))], []).alive


def test_reasons_of_waiting_pods_are_reported() -> None:
    unscheduled = holds(
        "PodScheduled", "False", reason="Unschedulable", message="0/3 nodes are available"
    )
    pulling = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    creating = {"waiting": {"reason": "ContainerCreating"}}
    first = [pod("a", phase="Pending", conditions=[unscheduled])]
    assert states.waits_for(first) == "a: Unschedulable: 0/3 nodes are available"
    second = [pod("b", containerStatuses=[{"name": "paceline", "state": pulling}])]
    assert states.waits_for(second) == "b: ImagePullBackOff: no such image"
    assert not states.waits_for([pod("c", containerStatuses=[{"name": "x", "state": creating}])])
    assert not states.waits_for([pod("d", phase="Failed", conditions=[unscheduled])])


def test_reasons_of_ended_pods_are_reported() -> None:
    over = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01"}}
    ended = pod(containerStatuses=[{"name": "paceline", "state": over}])
    assert states.last_words(ended) == "paceline ended with 137 (OOMKilled)"
    evicted = pod(phase="Failed", reason="Evicted", message="low on memory")
    assert states.last_words(evicted) == "Evicted: low on memory"
    assert sorted([pod(), ended], key=states.ended_at)[0] is ended
    assert not states.last_words(pod(phase="Running"))


def test_it_sees_preemption() -> None:
    taken = pod(conditions=[holds("DisruptionTarget", reason="PreemptionByScheduler", message="m")])
    assert states.preempted(taken) == "PreemptionByScheduler: m"
    assert not states.preempted(pod())


def suspended(generation: int) -> dict[str, Any]:
    """A Job that Kueue holds."""
    made = job(1, holds("Suspended"))
    made["metadata"] |= {"generation": generation}
    made["metadata"]["labels"] = LABELS | {"kueue.x-k8s.io/queue-name": "gpus"}
    made["spec"]["suspend"] = True
    return made


def test_a_job_in_a_queue_waits_and_one_that_was_admitted_before_has_died() -> None:
    waits = states.of_trainer([suspended(1)], [])
    assert (waits.alive, waits.pending, waits.ready) == (True, True, 0)
    evicted = states.of_trainer([suspended(3)], [])
    assert (evicted.alive, evicted.ready) == (False, 0)
    for generation in (1, 3):
        words = admission.waits_for_admission(suspended(generation), [])
        assert words == "waits in Kueue's queue 'gpus' for quota"
    running = job(1, holds("Suspended", "False"))
    running["metadata"]["generation"] = 2
    assert states.of_trainer([running], [of(1, READY)]).alive
    assert not admission.waits_for_admission(running, [of(1, READY)])


def test_a_gated_pod_waits_in_the_queue_of_its_deployment() -> None:
    gated = pod() | {"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}}
    other = pod() | {"spec": {"schedulingGates": [{"name": "example.com/licence"}]}}
    body = deployment()
    body["metadata"]["labels"] = LABELS | {"kueue.x-k8s.io/queue-name": "gpus"}
    assert "queue 'gpus'" in admission.waits_for_admission(body, [pod(), gated])
    assert not admission.waits_for_admission(body, [other])
