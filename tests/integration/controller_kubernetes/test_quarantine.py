"""A pod whose engine gets weights wrong is isolated, and its node is kept from its workload."""

from collections.abc import Callable
from typing import Any

import pytest

# Many waits follow each other, each for as long as a busy machine may need.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
REFUSED = "RefusedWeightsError: version 3, which another worker serves, was refused in 3 loads"
QUARANTINED = "paceline.dev/quarantined"


def test_a_worker_that_refuses_what_another_one_serves_leaves_its_node(
    world: Any, tiny_job: Callable[..., Any], until_true: Callable[..., Any]
) -> None:
    world.start()
    world.apply("two", tiny_job(name="two", rollout={"replicas": 2}))
    job_id = until_true(lambda: world.status("two").get("jobId"), "not submitted")
    world.running(job_id)
    until_true(lambda: len(world.workers_of(job_id)) == 2, "not all are made")
    first, second = world.workers_of(job_id)
    world.nodes.restart(first, message=REFUSED, times=3)
    until_true(lambda: world.cluster.list("Pod", QUARANTINED), "it is not isolated")
    others = until_true(
        lambda: len(found := world.workers_of(job_id)) == 2 and found, "it is not replaced"
    )
    assert second in others
    assert first not in others
    (replacement,) = {*others} - {second}
    assert world.cluster.get("Pod", first)["spec"]["nodeName"] == "node-1"
    assert world.cluster.get("Pod", replacement)["spec"]["nodeName"] == "node-2"
    told = f"{first} on node node-1 is quarantined for 10 min: {REFUSED}"
    events = until_true(
        lambda: len(found := world.cluster.events("Quarantined")) == 2 and found, "nobody is told"
    )
    assert {event["regarding"]["kind"] for event in events} == {"TrainingJob", "Pod"}
    assert {event["note"] for event in events} == {told}
    reason = f"{first} is quarantined for 10 min: {REFUSED}"
    until_true(lambda: world.services.job(job_id).reason == reason, "the job does not say it")
    until_true(lambda: world.status("two").get("reason") == reason, "the object does not say it")
    # It goes with its job, also before its time.
    world.cluster.delete("TrainingJob", "two")
    until_true(lambda: not world.made(), "something is left")
