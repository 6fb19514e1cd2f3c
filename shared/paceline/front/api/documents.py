"""The documents of the REST API, written by the gateway and read by the client.

A document that mirrors a protobuf message names it in `message` and has the same fields.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from paceline.config.quota import Quota
from paceline.enums import AuditOutcome, Purpose
from paceline.front.api.activity import JobActivity, ProcessActivity
from paceline.front.api.episodes import ListedEpisode
from paceline.front.api.notebook import Tabular, facts_html, flattened
from paceline.front.api.tenants import TenantUsage
from paceline.platform.progress import LedgerProgress
from paceline.platform.transport.principal import Role
from paceline.plugins import StrictModel
from paceline.types import JobStatus, Trajectory
from paceline.weights.placement import PublishedVersion, WeightHolder


class JobView(BaseModel):
    """A job: its spec, with all defaults filled in, and its status."""

    message: ClassVar = "Job"
    status: JobStatus
    spec: dict[str, Any]
    artifacts: dict[str, str] = Field(default_factory=dict[str, str])
    """File name -> sha256."""

    def _repr_html_(self) -> str:
        return status_html(self.status)


class CodeView(BaseModel):
    """Uploaded code, for `code.digest` of a job."""

    message: ClassVar = "Code"
    digest: str
    num_files: int


class JobDeletion(BaseModel):
    """How far the deletion of a job has come."""

    message: ClassVar = "DeleteJobReply"
    job_id: str
    deleted: bool
    """Nothing of it is left; if not, the deletion goes on as soon as the job is over."""


class ListedJob(BaseModel):
    """A job in a list: its status without its spec."""

    status: JobStatus

    def _repr_html_(self) -> str:
        return status_html(self.status)


class JobPage(BaseModel, Tabular):
    """A page of jobs, newest first."""

    message: ClassVar = "ListJobsReply"
    jobs: list[ListedJob]
    next_page_token: str = ""
    """Empty: this is the last page."""

    def records(self) -> list[dict[str, Any]]:
        """The status of each job, without its summary and trackers."""
        return [_shown(job.status) for job in self.jobs]


class MetricRow(BaseModel):
    """The metrics of one step."""

    index: int
    step: int
    kind: Purpose
    values: dict[str, Any]


class MetricPage(BaseModel, Tabular):
    """Rows in order; pass `after=next` to get the rows that follow."""

    message: ClassVar = "ListMetricsReply"
    rows: list[MetricRow]
    next: int
    """0: no more rows yet."""

    def records(self) -> list[dict[str, Any]]:
        """A row of the history per row; what is nested is `outer.inner`."""
        return [
            {"index": row.index, "step": row.step, "kind": row.kind.value, **flattened(row.values)}
            for row in self.rows
        ]


class JobEvent(BaseModel):
    """A change of a job: status, rows since the last event, and a snapshot of the ledger."""

    message: ClassVar = "JobEvent"
    status: JobStatus
    metrics: list[MetricRow] = Field(default_factory=list[MetricRow])
    live: LedgerProgress | None = None
    """Null: the job has no open ledger."""


class TrajectoryPage(BaseModel, Tabular):
    """A page of trajectories, newest first: tokens with spans, text, scores, provenance."""

    message: ClassVar = "ListTrajectoriesReply"
    trajectories: list[Trajectory]
    next_page_token: str = ""
    """Empty: this is the last page."""

    def records(self) -> list[dict[str, Any]]:
        """Scores and sizes of each, without its tokens."""
        return [
            {
                "group_id": trajectory.group_id,
                "index": trajectory.index,
                "task_id": trajectory.task_id,
                "reward": trajectory.score.reward,
                **flattened(trajectory.score.parts, prefix="parts."),
                "status": trajectory.score.status.value,
                "truncated": trajectory.truncated,
                "policy_tokens": trajectory.num_policy_tokens,
                "text": trajectory.response_text,
            }
            for trajectory in self.trajectories
        ]


class EpisodePage(BaseModel, Tabular):
    """A page of stored episodes, newest first. It may be empty though others follow."""

    message: ClassVar = "ListEpisodesReply"
    episodes: list[ListedEpisode]
    next_page_token: str = ""
    """Empty: this is the last page."""

    def records(self) -> list[dict[str, Any]]:
        """All fields of each but its trajectory; parts of the reward are `parts.NAME`."""
        return [flattened(asdict(replace(episode, trajectory=None))) for episode in self.episodes]


class ModelFile(BaseModel):
    """A small file of a job's model."""

    message: ClassVar = "ModelFile"
    name: str
    digest: str
    """sha256 in hex."""
    text: str


class ActivityView(BaseModel):
    """Jobs and processes; seconds are cumulative."""

    message: ClassVar = "Activity"
    clock_s: float
    jobs: list[JobActivity]
    """Unfinished ones, newest first."""
    processes: list[ProcessActivity]
    """By kind, then by id."""
    more_jobs: bool = False
    processes_left_out: int = 0


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


class ImportRequest(StrictModel):
    """Trajectories that were collected elsewhere."""

    message: ClassVar = "ImportEpisodesRequest"
    lines: str
    """JSON lines, at most 1,024 of them and 1 MiB as a request."""


class ImportView(BaseModel):
    """Result of an import of trajectories."""

    message: ClassVar = "ImportEpisodesReply"
    num_stored: int
    """Number of these lines in the pool now; a full pool keeps the newest."""
    num_refused: int
    problems: list[str]
    """Problems of the first 20 lines that were refused."""


class WeightsView(BaseModel):
    """The broadcast of a job's weights."""

    message: ClassVar = "ListWeightsReply"
    versions: list[PublishedVersion]
    """Newest first."""
    holders: list[WeightHolder]
    """The trainer's seeds, which have no `worker_id`, then rollout workers."""


class TokenRequest(StrictModel):
    """The properties of a new token."""

    message: ClassVar = "CreateTokenRequest"
    name: str
    """Owner, as shown in lists and the audit log."""
    tenant: str = ""
    """`*`: all tenants; empty: the caller's own."""
    role: Role = Role.SUBMIT
    expires_in_s: float | None = Field(default=None, gt=0)
    no_code: bool = False
    """Jobs that it submits may bring no code of their own."""


class TokenView(BaseModel):
    """A token without its secret; times are relative to now."""

    message: ClassVar = "Token"
    token_id: str
    name: str
    tenant: str
    """`*`: all tenants."""
    role: Role
    age_s: float
    expires_in_s: float | None
    """Negative: expired; null: never expires."""
    used_s: float | None
    """Seconds since its last use; null: never used."""
    revoked: bool
    created_by: str
    no_code: bool = False
    """Jobs that it submits may bring no code of their own."""


class TokenMade(BaseModel):
    """A new token."""

    message: ClassVar = "CreateTokenReply"
    token: TokenView
    secret: str = Field(repr=False)
    """The bearer token. It is not stored, so only this reply contains it."""


class TokenPage(BaseModel):
    """A list of tokens, oldest first."""

    message: ClassVar = "ListTokensReply"
    tokens: list[TokenView]


class PrincipalView(BaseModel):
    """The caller of an operation."""

    token_id: str
    name: str
    """Name of the token or of the service; empty: unauthenticated."""
    tenant: str
    role: Role | None
    """Null: the caller presented no token."""
    source: str
    """Host from which the gateway was called."""


class AuditEntryView(BaseModel):
    """An action that a caller took, or was refused."""

    id: str
    time: str
    """ISO 8601, UTC, by the clock of the store."""
    principal: PrincipalView
    action: str
    tenant: str
    """Tenant that the action concerns; `*`: no particular one."""
    target: str
    """Id of the job, token, ..."""
    outcome: AuditOutcome
    detail: str
    count: int
    """Identical refusals within some seconds are counted in one entry."""


class AuditLogPage(BaseModel):
    """A page of entries, newest first."""

    message: ClassVar = "ListAuditReply"
    entries: list[AuditEntryView]
    next: str = ""
    """`before` of the next page; empty: this is the last page."""


def status_html(status: JobStatus) -> str:
    """The status of a job for a notebook."""
    facts = [(name, value) for name, value in _shown(status).items() if name != "job_id"]
    return facts_html(f"Job {status.job_id}", facts)


def _shown(status: JobStatus) -> dict[str, Any]:
    names = (
        *("job_id", "name", "tenant", "state", "reason", "step", "version"),
        *("eval_reward", "eval_step", "age_s", "runtime_s", "created_at", "finished_at"),
    )
    return {name: getattr(status, name) for name in names}


def _without_defaults(schema: dict[str, Any]) -> None:
    for field in schema["properties"].values():
        field.pop("default", None)


class QuotaBody(Quota):
    """The whole quota of a tenant.

    A count that is null or omitted is unlimited. A size or weight that is omitted takes the
    installation's value.
    """

    message: ClassVar = "Quota"
    model_config = ConfigDict(json_schema_extra=_without_defaults)


class TenantView(BaseModel):
    """Quota and usage of a tenant."""

    message: ClassVar = "Tenant"
    name: str
    quota: Quota
    is_custom: bool
    """Whether the quota was set for this tenant; if not, it is the installation's default."""
    usage: TenantUsage


class TenantPage(BaseModel):
    """A list of tenants, by name."""

    message: ClassVar = "ListTenantsReply"
    tenants: list[TenantView]


class ErrorDetail(BaseModel):
    """The error class and message."""

    type: str
    message: str


class ErrorView(BaseModel):
    """The body of every response other than 2xx."""

    error: ErrorDetail


@cache
def document_of(message: str) -> type[BaseModel]:
    """The document that mirrors the message of this name.

    Raises:
        KeyError: no document mirrors it.
    """
    kinds = (BaseModel, StrictModel, Quota)
    every = {document for kind in kinds for document in kind.__subclasses__()}
    documents = {
        getattr(document, "message", ""): document
        for document in every
        if document.__module__ == __name__
    }
    return documents[message]
