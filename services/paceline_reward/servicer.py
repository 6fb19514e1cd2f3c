"""gRPC surface of a reward worker."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from paceline.config.documents import read_json
from paceline.errors import InvalidError
from paceline.platform import wire
from paceline.platform.fair_queue import QueueOwner
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.telemetry.tracing import OFF, Span, Tracer
from paceline.plugins import RewardInput, RewardTurn
from paceline.types import Task
from paceline.v1 import reward_pb2 as pb
from paceline.v1 import reward_pb2_grpc, types_pb2
from paceline_reward.scorer import Scorer


class RewardServicer(reward_pb2_grpc.RewardServicer):
    """Maps messages to `RewardInput` and `Score`."""

    def __init__(self, *, scorer: Scorer, metrics: Metrics, tracer: Tracer = OFF) -> None:
        self._scorer = scorer
        self._tracer = tracer
        self._metrics = metrics

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreReply:
        """Score all items with the parts of the job."""
        items = [_item(message, f"items[{at}]") for at, message in enumerate(request.items)]
        traced = any(message.trace for message in request.items)
        spans = [self._span(message.trace) for message in request.items] if traced else ()
        owner = QueueOwner(request.tenant, request.job_id)
        scores = await self._scorer.score(
            request.rewards_json, items, spans, owner=owner, code=request.code
        )
        for status, count in Counter(score.status for score in scores).items():
            self._metrics.add("scored", count, status=status)
        return pb.ScoreReply(scores=[wire.to_proto(score, types_pb2.Score) for score in scores])

    def _span(self, trace: str) -> Span:
        return self._tracer.received(trace).child("reward", kind="server")


def _item(message: pb.ScoreItem, field: str) -> RewardInput:
    return RewardInput(
        episode_id=message.episode_id,
        task=wire.from_proto(message.task, Task),
        response=message.response_text,
        environment_reward=message.environment_reward,
        truncated=message.truncated,
        turns=tuple(
            RewardTurn(text=turn.text, reward=turn.reward, num_tokens=turn.num_tokens)
            for turn in message.turns
        ),
        max_tokens=message.max_tokens,
        variant=message.variant,
        variant_meta=_meta(message.variant_meta, f"{field}.variant_meta"),
    )


def _meta(text: str, field: str) -> dict[str, Any]:
    found: Any = read_json(text, what=field) if text else {}
    if not isinstance(found, dict):
        raise InvalidError(f"{field}: {text[:100]!r} is not a JSON object")
    return cast("dict[str, Any]", found)
