"""gRPC surface of a trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.platform import wire
from paceline.types import PolicyVersion
from paceline.v1 import trainer_pb2 as pb
from paceline.v1.trainer_pb2_grpc import TrainerServicer

if TYPE_CHECKING:
    from grpc import aio


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """Where a trainer is: its step, phase, newest version, and seconds by phase."""

    job_id: str
    incarnation: int
    step: int
    published: PolicyVersion | None
    phase: str
    seconds: dict[str, float]


class StatusServicer(TrainerServicer):
    """Returns the status of rank 0."""

    def __init__(self, status: Callable[[], TrainerReport]) -> None:
        self._status = status

    async def Status(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.TrainerStatusRequest, context: aio.ServicerContext[Any, Any]
    ) -> pb.TrainerStatus:
        """Current step, phase and seconds by phase."""
        return wire.to_proto(self._status(), pb.TrainerStatus)
