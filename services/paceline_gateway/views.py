"""Messages as REST documents."""

from __future__ import annotations

import json
from typing import Any, cast

from paceline import tenants, wire
from paceline.access import Role
from paceline.rest import (
    AuditEntryView,
    AuditLogPage,
    AuditView,
    JobEvent,
    JobPage,
    JobView,
    ListedJob,
    MetricPage,
    MetricRow,
    TenantPage,
    TenantView,
    TokenMade,
    TokenPage,
    TokenView,
    TrajectoryPage,
    WeightsView,
)
from paceline.v1 import access_pb2, tenants_pb2, types_pb2
from paceline.v1 import jobs_pb2 as pb
from paceline.v1.roster_pb2 import ListWeightsReply
from paceline.weights.wire import holdings_from


def job_view(message: types_pb2.Job) -> JobView:
    """A job."""
    noun = wire.job_from(message)
    return JobView(status=noun.status, spec=_object(noun.spec), artefacts=noun.artefacts)


def _object(text: str) -> dict[str, Any]:
    """Empty if a damaged record holds none: jobs are listed all the same."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def job_page(message: pb.ListJobsReply) -> JobPage:
    """A page of jobs."""
    jobs = [ListedJob(status=wire.status_from(job.status)) for job in message.jobs]
    return JobPage(jobs=jobs, next_page_token=message.next_page_token)


def event_view(message: pb.JobEvent) -> JobEvent:
    """One event of a job."""
    return JobEvent(
        status=wire.status_from(message.status),
        metrics=[_row(row) for row in message.metrics],
        live=json.loads(message.live_json or "{}"),
    )


def metric_page(message: pb.ListMetricsReply) -> MetricPage:
    """Metric rows."""
    return MetricPage(rows=[_row(row) for row in message.rows], next=message.next)


def trajectory_page(message: pb.ListTrajectoriesReply) -> TrajectoryPage:
    """A page of trajectories."""
    return TrajectoryPage.model_construct(
        trajectories=[wire.trajectory_from(each) for each in message.trajectories],
        next_page_token=message.next_page_token,
    )


def audit_view(message: pb.AuditReport) -> AuditView:
    """An audit."""
    return AuditView(
        job_id=message.job_id,
        ok=message.ok,
        counts=dict(message.counts),
        dropped=dict(message.dropped),
        problems=list(message.problems),
    )


def weights_view(message: ListWeightsReply) -> WeightsView:
    """Who has which weights."""
    found = holdings_from(message)
    return WeightsView(versions=list(found.versions), holders=list(found.holders))


def token_view(message: access_pb2.Token) -> TokenView:
    """A token, without its secret."""
    return TokenView(
        token_id=message.token_id,
        name=message.name,
        tenant=message.tenant,
        role=Role(message.role),
        age_s=message.age_s,
        expires_in_s=message.expires_in_s if message.HasField("expires_in_s") else None,
        used_s=message.used_s if message.HasField("used_s") else None,
        revoked=message.revoked,
        created_by=message.created_by,
    )


def token_made(message: access_pb2.CreateTokenReply) -> TokenMade:
    """A new token with its secret."""
    return TokenMade(token=token_view(message.token), secret=message.secret)


def token_page(message: access_pb2.ListTokensReply) -> TokenPage:
    """Tokens."""
    return TokenPage(tokens=list(map(token_view, message.tokens)))


def audit_log_page(message: access_pb2.ListAuditReply) -> AuditLogPage:
    """A page of the audit log."""
    entries = [_entry(each) for each in message.entries]
    return AuditLogPage(entries=entries, next=message.next)


def tenant_view(message: tenants_pb2.Tenant) -> TenantView:
    """A tenant."""
    found = tenants.tenant_from(message)
    return TenantView(name=found.name, quota=found.quota, own=found.own, use=found.use)


def tenant_page(message: tenants_pb2.ListTenantsReply) -> TenantPage:
    """Tenants."""
    return TenantPage(tenants=list(map(tenant_view, message.tenants)))


def _entry(message: access_pb2.AuditEntry) -> AuditEntryView:
    who = message.principal
    return AuditEntryView(
        id=message.id,
        time=message.time,
        who=who.name,
        token_id=who.token_id,
        tenant_of_caller=who.tenant,
        role=who.role,
        source=who.source,
        action=message.action,
        tenant=message.tenant,
        target=message.target,
        outcome=message.outcome,
        detail=message.detail,
        count=message.count,
    )


def _row(message: pb.MetricRow) -> MetricRow:
    return MetricRow(
        index=message.index,
        step=message.step,
        kind=message.kind,
        values=json.loads(message.values_json or "{}"),
    )
