"""Settings of one service process: written by whoever starts it, read once at start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from paceline.config.base import Closed
from paceline.config.limits import LimitSettings
from paceline.types import WorkerKind

Port = Annotated[int, Field(ge=0, le=65535)]


class TlsSettings(Closed):
    """Certificates of this process; TLS on every gRPC channel and weight stream if set."""

    certificate: Path
    key: Path
    authority: Path
    """Whose certificates are trusted: of servers, and of clients if `require_client`."""
    peer_name: str = Field(default="paceline.internal", pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    """The name in every certificate; that of a kind of service is `KIND.` before it. A server must
    carry the one of the kind that is called, and a caller one that `paceline.callers` allows."""
    require_client: bool = True
    """Callers need a certificate of the authority too; off where a token is enough (the gateway):
    everything else refuses them then."""
    reload_within_s: float = Field(default=3600.0, ge=0)
    """A process whose certificates change drains and ends within this time, to start with them."""


class LogSettings(Closed):
    """Where events go."""

    level: str = "INFO"
    path: Path | None = None
    """Rotated file; standard error if null."""
    max_bytes: int = 16 << 20
    backups: int = 3


class TracingSettings(Closed):
    """Where traces go; see docs/tracing.md."""

    endpoint: str = Field(pattern=r"^https?://[^/\s]+$")
    """OTLP over gRPC, e.g. `http://collector:4317`; https: TLS."""
    sample: float = Field(default=0.01, ge=0, le=1)
    """Share of groups of episodes whose traces are kept; the same for all services."""
    authority: Path | None = None
    """Whose certificates are trusted of the endpoint; those that the system trusts if null."""
    headers_file: Path | None = None
    """Lines `name: value` that are sent along, such as an API key."""
    queue: int = Field(default=8192, ge=1)
    """Spans that wait to be sent; what comes beyond is counted and lost."""
    batch: int = Field(default=512, ge=1)
    """Spans in a message."""
    every_s: float = Field(default=5.0, gt=0)
    """Between two messages, unless there are enough spans for one before."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Of sending a message, repetitions included."""


class HeartbeatSettings(Closed):
    """The file that a supervisor touches; a child whose supervisor stays away ends itself."""

    path: Path
    stale_s: float = 60.0


class ProbeSettings(Closed):
    """What `/livez` and `/readyz` on the metrics port answer."""

    stuck_s: float = Field(default=60.0, gt=0)
    """A process whose event loop has not turned for so long is not alive."""
    silent_s: float = Field(default=120.0, gt=0)
    """Work of its own that is pending, and of which nothing comes for so long: it is not ready."""
    dead_s: float = Field(default=600.0, gt=0)
    """The same, and it is not alive."""
    answer_s: float = Field(default=10.0, gt=0)
    """The store may be silent for so long before experience is not ready."""
    first_s: float = Field(default=3600.0, gt=0)
    """What a trainer does for the first time (a step that compiles, a checkpoint) may take so
    long."""
    slack: float = Field(default=10.0, ge=1)
    """And afterwards so many times the longest so far, if that is more than the limits above."""


class ServiceSettings(Closed):
    """Everything a process needs to know; the section of its kind under `options`."""

    kind: WorkerKind
    worker_id: str
    host: str = "127.0.0.1"
    advertise: str = ""
    """host:port under which others reach it; host and bound port if empty."""
    port: Port = 0
    """gRPC; 0: any free one."""
    metrics_host: str = ""
    """Where `metrics_port` is bound; `host` if empty."""
    metrics_port: Port = 0
    """HTTP: /metrics, /livez, /readyz; 0: any free one."""
    site: str = "local"
    run_dir: Path = Path("runs/local")
    storage: str = ""
    """Folder or fsspec URL (`s3://bucket/prefix`) for checkpoints, below `jobs/<job id>`; `run_dir`
    if empty. What a URL needs (`s3fs`, credentials) is up to whoever runs the trainer."""
    experience: str = ""
    """host:port of the experience service."""
    store_url: str = Field(default="", repr=False)
    """redis://, rediss:// (TLS) or unix:// URL, redis+cluster:// or rediss+cluster:// for a
    cluster; experience only."""
    job_id: str = ""
    """Empty: a shared pool."""
    grace_s: float = 20.0
    token: str = Field(default="", repr=False)
    """Of gateway and controller: the bootstrap token of the installation, from which the controller
    makes its own. The gateway makes one in `run_dir` if empty."""
    tls: TlsSettings | None = None
    limits: LimitSettings = LimitSettings()
    """The same in all processes of an installation."""
    probes: ProbeSettings = ProbeSettings()
    logs: LogSettings = LogSettings()
    tracing: TracingSettings | None = None
    """Off if null."""
    supervisor: HeartbeatSettings | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    """Section of the kind: one of the `...Options` below, validated by the service itself."""

    @field_validator("limits", mode="before")
    @classmethod
    def _defaults_if_null(cls, value: Any) -> Any:
        return {} if value is None else value


class GatewayOptions(Closed):
    """Section of the gateway."""

    http_port: Port = 8300
    """REST; 0: any free one."""
    https: bool = False
    """REST with the certificate of `tls`; callers need none."""


class PoolOptions(Closed):
    """Rollout workers on one kind of machine."""

    cost: float = Field(default=1.0, gt=0)
    """Of a worker for an hour, in a unit that all pools share; the cheapest tokens come first."""
    speed: float = Field(default=1.0, gt=0)
    """Tokens per second of a worker, relative to the other pools."""
    max_replicas: int = Field(default=64, ge=0)
    """Over all jobs."""
    min_replicas: int = Field(default=0, ge=0)
    """Of each scaled job that may use the pool, whatever the others cost."""
    spot: bool = False
    """Its machines may be taken away at any time."""
    engines: dict[str, dict[str, Any]] = Field(default_factory=dict, repr=False)
    """Process runtime: that option of the rollout workers that it starts in this pool."""


class PoolsFile(Closed):
    """What `paceline up --pools` reads."""

    pools: dict[str, PoolOptions] = Field(min_length=1)


class LimitsFile(Closed):
    """What `paceline up --limits` reads."""

    limits: LimitSettings


class KubernetesOptions(Closed):
    """Where pods are made, and of what."""

    kubeconfig: Path | None = None
    """File that says how the API is reached; as pods reach it if null."""
    namespace: str = "default"
    release: str = "paceline"
    """Value of the label `app.kubernetes.io/instance` of everything in this installation."""
    identity: str = "paceline-controller-0"
    """Of this process among the candidates for leadership."""
    owner: str = "paceline-controller"
    """Deployment that owns what is made for jobs without a `TrainingJob` object."""
    lease: str = "paceline-controller"
    """Lease object that the leader holds."""
    lease_s: float = Field(default=15.0, gt=0)
    """How long it holds without being renewed; its holder stops acting after two thirds of it."""
    templates: Path = Path("/etc/paceline/templates")
    """Folder with `trainer.yaml` and `rollout-<pool>.yaml`: whole pod templates."""
    pools: dict[str, str] = Field(default_factory=dict)
    """Deployments of the shared pools, by kind of service."""
    ranks_per_pod: int = Field(default=8, ge=1)
    """Trainer ranks in one pod; a larger job has several pods."""
    jobset: bool = False
    training_jobs: bool = True
    """Whether `TrainingJob` objects are a door to jobs."""
    gateway: str = ""
    """host:port of the gateway's gRPC, where `TrainingJob` objects are submitted."""
    patience_s: float = Field(default=3600.0, gt=0)
    """How long pods may wait for machines or images before their job fails."""


class EnvironmentScaling(Closed):
    """How environment workers follow the episodes that want to run."""

    max_replicas: int = Field(default=16, ge=1)
    occupancy: float = Field(default=0.8, gt=0, le=1)
    """Share of a worker's slots, and of its one core, that is meant to be used."""


class RewardScaling(Closed):
    """How reward workers follow the answers that wait for a score."""

    max_replicas: int = Field(default=16, ge=1)
    queue_s: float = Field(default=5.0, gt=0)
    """In which a queue is to be cleared."""
    occupancy: float = Field(default=0.8, gt=0, le=1)
    """Share of a worker's time that is meant to be used."""


class ScalingOptions(Closed):
    """How replicas follow demand; see docs/scaling.md."""

    executor: Literal["controller", "external"] = "controller"
    """`external`: another autoscaler sets replicas, by the metrics; the controller leaves them."""
    period_s: float = Field(default=5.0, gt=0)
    """Between decisions."""
    warm_s: float = Field(default=20.0, ge=0)
    """So long after it is ready a worker tells nothing about its speed."""
    smooth_s: float = Field(default=60.0, gt=0)
    """Time constant of moving averages; by steps of the trainer if those take longer."""
    smooth_steps: int = Field(default=32, ge=1)
    margin: float = Field(default=0.1, ge=0)
    """More rollout workers than the formula says, for what is dropped and for noise."""
    band: float = Field(default=0.1, ge=0, lt=1)
    """Share by which there must be too few before there are more; larger while figures
    are unclear."""
    slack: float = Field(default=0.1, ge=0, lt=1)
    """Share by which there must be too many before there are fewer; likewise."""
    starved: float = Field(default=0.05, gt=0, lt=1)
    """Share of its time that a trainer may wait before rollout workers are added."""
    sync_wait: float = Field(default=0.5, gt=0, lt=1)
    """The same where sampling and training cannot overlap (`max_staleness: 0`)."""
    first_step_s: float = Field(default=60.0, gt=0)
    """Taken for a step of a trainer until it has trained one; rollout workers are ordered so."""
    requests_each: float = Field(default=4.0, gt=0)
    """A rollout worker with fewer requests at once is one too many."""
    up_s: float = Field(default=15.0, ge=0)
    """Pause between increases."""
    down_s: float = Field(default=300.0, ge=0)
    """How long fewer must have been enough before some are given up."""
    most_up: float = Field(default=3.0, gt=1)
    """Largest factor of one increase."""
    most_down: float = Field(default=0.5, gt=0, lt=1)
    """Smallest factor of one decrease."""
    patience_s: float = Field(default=180.0, gt=0)
    """How long a pool may deliver nothing of what is asked of it before another one is asked."""
    retry_s: float = Field(default=900.0, gt=0)
    """After which it is asked again."""
    idle_s: float = Field(default=600.0, ge=0)
    """Without a job, until the shared pools that are scaled go to zero."""
    environment: EnvironmentScaling | None = None
    """`environment_replicas` for good if null, else at least so many while a job is live."""
    reward: RewardScaling | None = None
    """The same with `reward_replicas`."""


class ControllerOptions(Closed):
    """Section of the controller."""

    runtime: Literal["process", "kubernetes"] = "process"
    kubernetes: KubernetesOptions = KubernetesOptions()
    pools: dict[str, PoolOptions] = Field(
        default_factory=lambda: {"default": PoolOptions()}, min_length=1
    )
    """Pools of rollout workers that jobs may use, by name."""
    trainer_cost: float = Field(default=1.0, gt=0)
    """Of a trainer rank for an hour, in the unit of the pools' `cost`; for the metrics."""
    weights_mbit_per_s: float | None = Field(default=None, gt=0)
    """Process runtime: that option of the rollout workers and trainers that it starts."""
    scaling: ScalingOptions = ScalingOptions()
    patience_s: float = Field(default=600.0, ge=0)
    """So long a queued job lets smaller ones pass; then what becomes free is kept for it."""
    environment_replicas: int = Field(default=1, ge=1)
    reward_replicas: int = Field(default=1, ge=1)
    period_s: float = Field(default=0.5, gt=0)
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Until a started process answers its health check."""
    restart_most_s: float = Field(default=15.0, gt=0)
    """Longest pause of the exponential restart back-off."""
    give_up_after: int = Field(default=10, ge=1)
    """Starts of a job's process without progress before the job fails."""


class ExperienceOptions(Closed):
    """Section of the experience service."""

    compress_over_bytes: int = Field(default=1024, ge=0)
    """Payloads above this are compressed."""
    member_lease_s: float = Field(default=6.0, gt=0)
    """A worker that does not beat for so long leaves the roster."""
    store_wait_s: float = Field(default=60.0, ge=0)
    """How long to wait at the start for a store that does not answer; then the process ends."""
    audit_entries: int = Field(default=100_000, ge=1000)
    """Of the audit log that the store keeps, about; files and logs have all of them."""
    lease_return_s: float = Field(default=1.0, gt=0)
    """A worker whose lease stream has broken may come back for so long; then its episodes are
    handed out again."""
    sweep_s: float = Field(default=0.5, gt=0)
    """How often leases, stragglers and evals are looked after."""
    audit_s: float = Field(default=60.0, gt=0)
    """How often every live ledger is counted again, for the metrics."""
    plugins_s: float = Field(default=30.0, gt=0)
    """In which the samplers, task sources, filters and advantages of a job have to be built."""
    plugins_bytes: int = Field(default=2 << 30, ge=1 << 20)
    """Memory that they may take, tried in a process of their own before a job is accepted."""


class EnvironmentOptions(Closed):
    """Section of an environment worker."""

    environments: tuple[str, ...] = ()
    """Names of environments that can run here; any if empty."""
    slots: int = Field(default=1024, ge=1)
    """Training episodes at once."""
    eval_slots: int = Field(default=1024, ge=1)
    """Eval episodes at once, beside them."""
    flush_s: float = Field(default=1.0, gt=0)
    """How often progress is told."""
    flush_tokens: int = Field(default=256, ge=1)
    score_timeout_s: float = Field(default=60.0, gt=0)
    """Of an answer of a reward worker, beside the longest `timeout_s` of the job's parts."""
    prefix_worth: float = Field(default=16.0, ge=0)
    """Tokens in flight that a token of a prefix outweighs when a rollout worker is picked."""


class RewardOptions(Closed):
    """Section of a reward worker."""

    processes: int = Field(default=2, ge=1)
    """Children that run user code; a hung or crashed one is replaced."""


class TrackingOptions(Closed):
    """Section of the tracking service."""

    poll_s: float = Field(default=2.0, gt=0)
    """Between two looks at the jobs and at the history of each."""
    retry_most_s: float = Field(default=60.0, gt=0)
    """Longest pause before a tracker that failed is begun again."""
    give_up_s: float = Field(default=86400.0, gt=0)
    """How long a job that is over waits for a tracker that fails."""


class WeightsOptions(Closed):
    """How a process takes part in the broadcast of weights."""

    weights_port: Port = 0
    weights_mbit_per_s: float | None = Field(default=None, gt=0)
    """Cap on what it sends of weights, and likewise on what it receives; none if null."""

    @property
    def weights_bytes_per_s(self) -> float:
        """The cap in bytes; 0: none."""
        return (self.weights_mbit_per_s or 0.0) * 1e6 / 8


class RolloutOptions(WeightsOptions):
    """Section of a rollout worker."""

    pool: str = ""
    """In which it runs; the job's first one if empty."""
    engines: dict[str, dict[str, Any]] = Field(default_factory=dict, repr=False)
    """What the installation says of engines, by kind: interpreters, arguments, addresses. See
    docs/engines.md; what a job says is in its `rollout.engine`."""


class TrainerOptions(WeightsOptions):
    """Section of a trainer; the same file for all ranks."""

    incarnation: int = Field(ge=0)
