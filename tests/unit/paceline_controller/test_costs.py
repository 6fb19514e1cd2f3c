"""What the controller tells of processes and their cost."""

from paceline.config.service import ControllerOptions
from paceline.enums import WorkerKind
from paceline.platform.telemetry.metrics import Metrics
from paceline_controller.jobs.costs import Costs


def test_restarts_are_counted_from_nought() -> None:
    """A rate sees nothing of a counter that appears with its first events."""
    metrics = Metrics()
    costs = Costs(metrics, ControllerOptions())

    def told(kind: WorkerKind) -> float | None:
        return metrics.registry.get_sample_value("paceline_restarts_total", {"service": kind})

    assert [told(kind) for kind in WorkerKind] == [0.0] * len(WorkerKind)
    costs.restarted(WorkerKind.ROLLOUT)
    Costs(metrics, ControllerOptions())  # the next leader in this process
    assert told(WorkerKind.ROLLOUT) == 1.0
