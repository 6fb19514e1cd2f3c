"""Nouns of the broadcast ↔ messages of the roster."""

from __future__ import annotations

from paceline import wire
from paceline.errors import InvalidError
from paceline.v1 import roster_pb2 as pb
from paceline.weights.holdings import Holder, Holdings, Published
from paceline.weights.route import EVENTS, Route, Source, TransferProgress, TransferReport


def source_to(noun: Source) -> pb.Source:
    """Source as a message."""
    return pb.Source(endpoint=noun.endpoint, part=noun.part, parts=noun.parts)


def source_from(message: pb.Source) -> Source:
    """Source from a message; raises `InvalidError` for a part that there cannot be."""
    part, parts = part_of(message.part, message.parts)
    return Source(message.endpoint, part, parts)


def part_of(part: int, parts: int) -> tuple[int, int]:
    """Part and parts as they travel: 0 of 0 is all; raises `InvalidError`."""
    if not 0 <= part < max(parts, 1):
        raise InvalidError(f"part: {part} of {parts} is none; 0 <= part < parts is allowed")
    return part, max(parts, 1)


def route_to(noun: Route) -> pb.Route:
    """Route as a message; it carries the job's key, so it goes to the job's workers only."""
    message = pb.Route(
        version=wire.version_to(noun.version),
        sources=map(source_to, noun.sources),
        fallback_endpoints=noun.fallbacks,
        bytes_per_s=noun.bytes_per_s,
        key=noun.key,
    )
    if noun.base_version >= 0:
        message.base_version = noun.base_version
    return message


def route_from(message: pb.Route) -> Route:
    """Route from a message."""
    return Route(
        version=wire.version_from(message.version),
        sources=tuple(map(source_from, message.sources)),
        fallbacks=tuple(message.fallback_endpoints),
        bytes_per_s=message.bytes_per_s,
        base_version=message.base_version if message.HasField("base_version") else -1,
        key=message.key,
    )


def progress_to(noun: TransferProgress) -> pb.TransferProgress:
    """Progress of a transfer as a message."""
    return pb.TransferProgress(
        version=noun.version,
        num_ready=noun.num_ready,
        num_chunks=noun.num_chunks,
        sources=noun.sources,
    )


def progress_from(message: pb.TransferProgress) -> TransferProgress:
    """Progress of a transfer from a message."""
    return TransferProgress(
        version=message.version,
        num_ready=message.num_ready,
        num_chunks=message.num_chunks,
        sources=tuple(message.sources),
    )


def report_to(noun: TransferReport, *, job_id: str) -> pb.ReportTransferRequest:
    """Report of a transfer as a message."""
    message = pb.ReportTransferRequest(
        job_id=job_id,
        worker_id=noun.worker_id,
        version=noun.version,
        endpoint=noun.endpoint,
        event=noun.event,
        num_bytes=noun.num_bytes,
        wire_bytes=noun.wire_bytes,
        busy_s=noun.busy_s,
        latency_s=noun.latency_s,
        detail=noun.detail,
        num_ready=noun.num_ready,
        num_chunks=noun.num_chunks,
    )
    if noun.base_version >= 0:
        message.base_version = noun.base_version
    return message


def report_from(message: pb.ReportTransferRequest) -> TransferReport:
    """Report of a transfer from a message; raises `InvalidError` for an unknown event."""
    for event in EVENTS:
        if event == message.event:
            break
    else:
        raise InvalidError(f"event: {message.event!r}; allowed: {', '.join(EVENTS)}")
    return TransferReport(
        worker_id=message.worker_id,
        version=message.version,
        endpoint=message.endpoint,
        event=event,
        num_bytes=message.num_bytes,
        wire_bytes=message.wire_bytes,
        busy_s=message.busy_s,
        latency_s=message.latency_s,
        num_ready=message.num_ready,
        num_chunks=message.num_chunks,
        base_version=message.base_version if message.HasField("base_version") else -1,
        detail=message.detail,
    )


def holdings_to(noun: Holdings) -> pb.ListWeightsReply:
    """Holdings as a message."""
    return pb.ListWeightsReply(
        versions=map(_published_to, noun.versions), holders=map(_holder_to, noun.holders)
    )


def holdings_from(message: pb.ListWeightsReply) -> Holdings:
    """Holdings from a message."""
    return Holdings(
        versions=tuple(map(_published_from, message.versions)),
        holders=tuple(map(_holder_from, message.holders)),
    )


def _published_to(noun: Published) -> pb.WeightsVersion:
    return pb.WeightsVersion(
        version=wire.version_to(noun.version),
        chunk_bytes=noun.chunk_bytes,
        shape=noun.shape,
        predicted_s=noun.predicted_s,
        ratio=noun.ratio,
    )


def _published_from(message: pb.WeightsVersion) -> Published:
    return Published(
        version=wire.version_from(message.version),
        chunk_bytes=message.chunk_bytes,
        shape=message.shape,
        predicted_s=message.predicted_s,
        ratio=message.ratio,
    )


def _holder_to(noun: Holder) -> pb.WeightsHolder:
    return pb.WeightsHolder(
        worker_id=noun.worker_id,
        kind=noun.kind,
        site=noun.site,
        endpoint=noun.endpoint,
        active_version=noun.active_version,
        transfers=map(progress_to, noun.transfers),
        sources=map(source_to, noun.sources),
        bytes_per_s=noun.bytes_per_s,
        trouble=noun.trouble,
    )


def _holder_from(message: pb.WeightsHolder) -> Holder:
    return Holder(
        worker_id=message.worker_id,
        kind=message.kind,
        site=message.site,
        endpoint=message.endpoint,
        active_version=message.active_version,
        transfers=tuple(map(progress_from, message.transfers)),
        sources=tuple(map(source_from, message.sources)),
        bytes_per_s=message.bytes_per_s,
        trouble=message.trouble,
    )
