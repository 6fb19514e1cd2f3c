"""gRPC surface of a trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.v1 import trainer_pb2 as pb
from paceline.v1.trainer_pb2_grpc import TrainerServicer

if TYPE_CHECKING:
    from grpc import aio


class StatusServicer(TrainerServicer):
    """Returns the status of rank 0."""

    def __init__(self, status: Callable[[], pb.TrainerStatus]) -> None:
        self._status = status

    async def Status(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.TrainerStatusRequest, context: aio.ServicerContext[Any, Any]
    ) -> pb.TrainerStatus:
        """Current step, phase and seconds by phase."""
        return self._status()
