"""gRPC surface of an environment worker."""

from __future__ import annotations

from collections.abc import Callable

from paceline.v1 import environment_pb2 as pb
from paceline.v1 import environment_pb2_grpc as pb_grpc
from paceline_environment.stages import Stages


class EnvironmentServicer(pb_grpc.EnvironmentServicer):
    """Reports what the worker is doing."""

    def __init__(
        self, *, worker_id: str, slots: int, stages: Stages, num_open: Callable[[], int]
    ) -> None:
        self._worker_id = worker_id
        self._slots = slots
        self._stages = stages
        self._num_open = num_open

    async def Status(
        self, request: pb.EnvironmentStatusRequest, context: object
    ) -> pb.EnvironmentStatus:
        """Current counters."""
        return pb.EnvironmentStatus(
            worker_id=self._worker_id,
            open_episodes=self._num_open(),
            slots=self._slots,
            waiting_for=self._stages.waiting,
            finished=self._stages.finished,
            infra_errors=self._stages.infra_errors,
        )
