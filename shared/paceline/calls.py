"""Calls of the REST API, independent of who sends them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from paceline.config import JobSpec
from paceline.config.quota import Quota
from paceline.rest import (
    AuditLogPage,
    AuditView,
    JobPage,
    JobView,
    MetricPage,
    TenantPage,
    TenantView,
    TokenMade,
    TokenPage,
    TokenView,
    TrajectoryPage,
    WeightsView,
)

View = TypeVar("View", bound=BaseModel)
Spec = JobSpec | Mapping[str, Any] | Path | str


@dataclass(frozen=True, slots=True)
class Request(Generic[View]):
    """One call, independent of who sends it."""

    method: str
    path: str
    view: type[View]
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    headers: dict[str, str] = field(default_factory=dict[str, str])
    content: str | None = None


def submit(spec: Spec, *, request_id: str = "") -> Request[JobView]:
    """Submit a `JobSpec`, a mapping, or a YAML file by its path."""
    media = "application/json"
    if isinstance(spec, (str, Path)):
        content, media = Path(spec).read_text(), "application/yaml"
    elif isinstance(spec, JobSpec):
        content = spec.model_dump_json()
    else:
        content = json.dumps(dict(spec))
    key = request_id or uuid.uuid4().hex
    headers = {"content-type": media, "idempotency-key": key}
    return Request("POST", "/v1/jobs", JobView, headers=headers, content=content)


def get(job_id: str) -> Request[JobView]:
    """One job."""
    return Request("GET", f"/v1/jobs/{job_id}", JobView)


def list_jobs(**params: Any) -> Request[JobPage]:
    """A page of jobs; `tenant`, `state`, `page_size`, `page_token`."""
    return Request("GET", "/v1/jobs", JobPage, params=params)


def cancel(job_id: str, reason: str) -> Request[JobView]:
    """Ask a job to end."""
    return Request("POST", f"/v1/jobs/{job_id}/cancel", JobView, params={"reason": reason})


def metrics(job_id: str, **params: Any) -> Request[MetricPage]:
    """Metric rows; `after`, `page_size`."""
    return Request("GET", f"/v1/jobs/{job_id}/metrics", MetricPage, params=params)


def trajectories(job_id: str, **params: Any) -> Request[TrajectoryPage]:
    """A page of trajectories; `page_size`, `page_token`, `purpose`."""
    return Request("GET", f"/v1/jobs/{job_id}/trajectories", TrajectoryPage, params=params)


def audit(job_id: str) -> Request[AuditView]:
    """Check the ledger's identity."""
    return Request("GET", f"/v1/jobs/{job_id}/audit", AuditView)


def weights(job_id: str) -> Request[WeightsView]:
    """Who has which weights, and from whom."""
    return Request("GET", f"/v1/jobs/{job_id}/weights", WeightsView)


def list_tenants(tenant: str) -> Request[TenantPage]:
    """Quotas and use."""
    return Request("GET", "/v1/tenants", TenantPage, params={"tenant": tenant})


def set_quota(tenant: str, quota: Quota) -> Request[TenantView]:
    """The whole quota of a tenant."""
    headers = {"content-type": "application/json"}
    content = quota.model_dump_json()
    path = f"/v1/tenants/{tenant}/quota"
    return Request("PUT", path, TenantView, headers=headers, content=content)


def reset_quota(tenant: str) -> Request[TenantView]:
    """The default of the installation again."""
    return Request("DELETE", f"/v1/tenants/{tenant}/quota", TenantView)


def create_token(
    name: str, role: str, tenant: str, expires_in_s: float | None
) -> Request[TokenMade]:
    """A new token."""
    wanted = {"name": name, "role": role, "tenant": tenant, "expires_in_s": expires_in_s}
    headers = {"content-type": "application/json"}
    return Request("POST", "/v1/tokens", TokenMade, headers=headers, content=json.dumps(wanted))


def list_tokens(tenant: str) -> Request[TokenPage]:
    """Tokens, without their secrets."""
    return Request("GET", "/v1/tokens", TokenPage, params={"tenant": tenant})


def revoke_token(token_id: str) -> Request[TokenView]:
    """A token that opens nothing any more."""
    return Request("DELETE", f"/v1/tokens/{token_id}", TokenView)


def audit_log(**params: Any) -> Request[AuditLogPage]:
    """A page of the audit log; `before`, `page_size`, `tenant`, `action`."""
    return Request("GET", "/v1/audit-log", AuditLogPage, params=params)
