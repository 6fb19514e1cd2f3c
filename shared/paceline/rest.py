"""The documents of the REST API: gateway writes them, the client reads them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from paceline.access import Role
from paceline.config.base import Closed
from paceline.config.quota import Quota
from paceline.tenants import Use
from paceline.types import JobStatus, Trajectory
from paceline.weights.holdings import Holder, Published


class JobView(BaseModel):
    """A job: what was asked (`spec`, with all defaults) and how it stands."""

    status: JobStatus
    spec: dict[str, Any]
    artefacts: dict[str, str] = Field(default_factory=dict[str, str])
    """File name -> sha256."""


class ListedJob(BaseModel):
    """How a job stands; what was asked is with the job itself."""

    status: JobStatus


class JobPage(BaseModel):
    """Some jobs, newest first."""

    jobs: list[ListedJob]
    next_page_token: str = ""
    """Empty: there are no more."""


class MetricRow(BaseModel):
    """What was measured at one step."""

    index: int
    step: int
    kind: str
    """train | eval"""
    values: dict[str, Any]


class MetricPage(BaseModel):
    """Rows in order; ask again with `after=next` for those that follow."""

    rows: list[MetricRow]
    next: int
    """0: no more at the moment."""


class JobEvent(BaseModel):
    """A change: the state, the rows since the last event, and the ledger at this moment."""

    status: JobStatus
    metrics: list[MetricRow] = Field(default_factory=list[MetricRow])
    live: dict[str, Any] = Field(default_factory=dict[str, Any])


class TrajectoryPage(BaseModel):
    """Some trajectories, newest first: tokens with spans, text, scores, provenance."""

    trajectories: list[Trajectory]
    next_page_token: str = ""
    """Empty: there are no more."""


class AuditView(BaseModel):
    """Whether the ledger's identity holds."""

    job_id: str
    ok: bool
    counts: dict[str, int]
    """Episodes by state, and `admitted`."""
    dropped: dict[str, int]
    """Episodes by reason."""
    problems: list[str]


class WeightsView(BaseModel):
    """How the weights of a job spread."""

    versions: list[Published]
    """Newest first."""
    holders: list[Holder]
    """Seeds of the trainer, which have no `worker_id`, then rollout workers."""


class TokenRequest(Closed):
    """What a new token is to be."""

    name: str
    """Whose it is, for people and for the audit log."""
    tenant: str = ""
    """`*`: all; empty: that of who asks."""
    role: Role = Role.SUBMIT
    expires_in_s: float | None = Field(default=None, gt=0)


class TokenView(BaseModel):
    """A token, without its secret; times are in seconds from now."""

    token_id: str
    name: str
    tenant: str
    """`*`: all."""
    role: Role
    age_s: float
    expires_in_s: float | None
    """Negative: it has expired; null: it never does."""
    used_s: float | None
    """Since it was last used; null: never."""
    revoked: bool
    created_by: str


class TokenMade(BaseModel):
    """A new token."""

    token: TokenView
    secret: str = Field(repr=False)
    """What goes into the authorization header. It is kept nowhere: this is the only time."""


class TokenPage(BaseModel):
    """Tokens, oldest first."""

    tokens: list[TokenView]


class AuditEntryView(BaseModel):
    """Something that somebody did, or was refused."""

    id: str
    time: str
    """ISO 8601, UTC, by the clock of the store."""
    who: str
    """Name of the token or of the service; empty: a stranger."""
    token_id: str
    tenant_of_caller: str
    role: str
    source: str
    """Host from which the gateway was called."""
    action: str
    tenant: str
    """Whose matter it is; `*`: of nobody in particular."""
    target: str
    """Id of the job, of the token, ..."""
    outcome: str
    """ok | refused | failed"""
    detail: str
    count: int
    """Equal refusals within some seconds are one entry."""


class AuditLogPage(BaseModel):
    """Entries, newest first."""

    entries: list[AuditEntryView]
    next: str = ""
    """`before` of the next page; empty: there are no more."""


class TenantView(BaseModel):
    """What a tenant may use, and what it uses."""

    name: str
    quota: Quota
    own: bool
    """Set for this tenant; otherwise the default of the installation."""
    use: Use


class TenantPage(BaseModel):
    """Tenants by name."""

    tenants: list[TenantView]


class ErrorDetail(BaseModel):
    """Class of the error tree, and what to do."""

    type: str
    message: str


class ErrorView(BaseModel):
    """Body of every answer that is not 2xx."""

    error: ErrorDetail
