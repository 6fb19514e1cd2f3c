"""The documents of the REST API: gateway writes them, the client reads them.

One that stands for a message of its own names it; its fields are those of the message.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from paceline.api.tenants import TenantUsage
from paceline.config.quota import Quota
from paceline.enums import AuditOutcome, Purpose
from paceline.plugins import StrictModel
from paceline.progress import LedgerProgress
from paceline.transport.principal import Role
from paceline.types import JobStatus, Trajectory
from paceline.weights.placement import PublishedVersion, WeightHolder


class JobView(BaseModel):
    """A job: what was asked (`spec`, with all defaults) and how it stands."""

    message: ClassVar = "Job"
    status: JobStatus
    spec: dict[str, Any]
    artifacts: dict[str, str] = Field(default_factory=dict[str, str])
    """File name -> sha256."""


class ListedJob(BaseModel):
    """How a job stands; what was asked is with the job itself."""

    status: JobStatus


class JobPage(BaseModel):
    """Some jobs, newest first."""

    message: ClassVar = "ListJobsReply"
    jobs: list[ListedJob]
    next_page_token: str = ""
    """Empty: there are no more."""


class MetricRow(BaseModel):
    """What was measured at one step."""

    index: int
    step: int
    kind: Purpose
    values: dict[str, Any]


class MetricPage(BaseModel):
    """Rows in order; ask again with `after=next` for those that follow."""

    message: ClassVar = "ListMetricsReply"
    rows: list[MetricRow]
    next: int
    """0: no more at the moment."""


class JobEvent(BaseModel):
    """A change: the state, the rows since the last event, and the ledger at this moment."""

    message: ClassVar = "JobEvent"
    status: JobStatus
    metrics: list[MetricRow] = Field(default_factory=list[MetricRow])
    live: LedgerProgress | None = None
    """Null: the job has no open ledger."""


class TrajectoryPage(BaseModel):
    """Some trajectories, newest first: tokens with spans, text, scores, provenance."""

    message: ClassVar = "ListTrajectoriesReply"
    trajectories: list[Trajectory]
    next_page_token: str = ""
    """Empty: there are no more."""


class VerificationView(BaseModel):
    """Whether the ledger's identity holds."""

    message: ClassVar = "VerificationReport"
    job_id: str
    ok: bool
    counts: dict[str, int]
    """Episodes by state, and `admitted`."""
    dropped: dict[str, int]
    """Episodes by reason."""
    problems: list[str]


class WeightsView(BaseModel):
    """How the weights of a job spread."""

    message: ClassVar = "ListWeightsReply"
    versions: list[PublishedVersion]
    """Newest first."""
    holders: list[WeightHolder]
    """Seeds of the trainer, which have no `worker_id`, then rollout workers."""


class TokenRequest(StrictModel):
    """What a new token is to be."""

    message: ClassVar = "CreateTokenRequest"
    name: str
    """Whose it is, for people and for the audit log."""
    tenant: str = ""
    """`*`: all; empty: that of who asks."""
    role: Role = Role.SUBMIT
    expires_in_s: float | None = Field(default=None, gt=0)


class TokenView(BaseModel):
    """A token, without its secret; times are in seconds from now."""

    message: ClassVar = "Token"
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

    message: ClassVar = "CreateTokenReply"
    token: TokenView
    secret: str = Field(repr=False)
    """What goes into the authorization header. It is kept nowhere: this is the only time."""


class TokenPage(BaseModel):
    """Tokens, oldest first."""

    message: ClassVar = "ListTokensReply"
    tokens: list[TokenView]


class PrincipalView(BaseModel):
    """Who called."""

    token_id: str
    name: str
    """Name of the token or of the service; empty: a stranger."""
    tenant: str
    role: Role | None
    """Null: the caller has no token."""
    source: str
    """Host from which the gateway was called."""


class AuditEntryView(BaseModel):
    """Something that somebody did, or was refused."""

    id: str
    time: str
    """ISO 8601, UTC, by the clock of the store."""
    principal: PrincipalView
    action: str
    tenant: str
    """Whose matter it is; `*`: of nobody in particular."""
    target: str
    """Id of the job, of the token, ..."""
    outcome: AuditOutcome
    detail: str
    count: int
    """Equal refusals within some seconds are one entry."""


class AuditLogPage(BaseModel):
    """Entries, newest first."""

    message: ClassVar = "ListAuditReply"
    entries: list[AuditEntryView]
    next: str = ""
    """`before` of the next page; empty: there are no more."""


def _without_defaults(schema: dict[str, Any]) -> None:
    for field in schema["properties"].values():
        field.pop("default", None)


class QuotaBody(Quota):
    """The whole quota of a tenant.

    Of the limits on what there is at a time, one that is null or not named is none. A size or a
    weight that is not named is that of the installation.
    """

    message: ClassVar = "Quota"
    model_config = ConfigDict(json_schema_extra=_without_defaults)


class TenantView(BaseModel):
    """What a tenant may use, and what it uses."""

    message: ClassVar = "Tenant"
    name: str
    quota: Quota
    is_custom: bool
    """Set for this tenant; otherwise the default of the installation."""
    usage: TenantUsage


class TenantPage(BaseModel):
    """Tenants by name."""

    message: ClassVar = "ListTenantsReply"
    tenants: list[TenantView]


class ErrorDetail(BaseModel):
    """Class of the error tree, and what to do."""

    type: str
    message: str


class ErrorView(BaseModel):
    """Body of every answer that is not 2xx."""

    error: ErrorDetail


@cache
def document_of(message: str) -> type[BaseModel]:
    """The document that stands for a message, by its name.

    Raises:
        KeyError: there is none.
    """
    kinds = (BaseModel, StrictModel, Quota)
    every = {each for kind in kinds for each in kind.__subclasses__()}
    found = {getattr(each, "message", ""): each for each in every if each.__module__ == __name__}
    return found[message]
