"""Patience is over many lives, and ends."""

from paceline_controller.runtimes.kubernetes.readiness import TOLD_AFTER_S, ReadinessDeadline
from paceline_harness.runtime import FakeClock


def test_patience_is_counted_across_restarts() -> None:
    clock = FakeClock()
    patience = ReadinessDeadline(3600.0, clock=clock)
    patience.waits("a", "Unschedulable")
    clock.pass_s(3000)
    patience.waits("a", "")  # a new pod that has not said anything yet
    assert not patience.over("a")
    patience.waits("a", "Unschedulable")
    clock.pass_s(601)
    assert patience.over("a")
    patience.waits("a", "")
    assert not patience.over("a")
    assert not patience.over("b")


def test_patience_resets_once_ready() -> None:
    clock = FakeClock()
    patience = ReadinessDeadline(10.0, clock=clock)
    patience.waits("a", "Unschedulable")
    clock.pass_s(11)
    patience.forget("a")
    assert not patience.over("a")
    patience.waits("a", "Unschedulable")
    assert not patience.over("a")


def test_a_lasting_reason_is_reported_once() -> None:
    clock = FakeClock()
    patience = ReadinessDeadline(3600.0, clock=clock)
    patience.waits("a", "no pods are made")
    assert not patience.news("a")
    patience.waits("a", "Unschedulable")
    clock.pass_s(TOLD_AFTER_S)
    patience.waits("a", "Unschedulable")
    assert patience.news("a") == "Unschedulable"
    assert not patience.news("a")
    patience.waits("a", "ImagePullBackOff")
    clock.pass_s(TOLD_AFTER_S)
    assert patience.news("a") == "ImagePullBackOff"
    assert not patience.news("b")
