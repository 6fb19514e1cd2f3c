"""Settings of one service process: written by whatever starts it, read once at startup."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from paceline.config.lifecycle.webhooks import WebhookSettings
from paceline.config.limits import LimitSettings
from paceline.config.packages import PackageSettings
from paceline.config.plugins import PluginSettings
from paceline.config.precision import Dtype
from paceline.config.sections.endpoints import EndpointSettings
from paceline.config.sections.kubernetes import KubernetesOptions
from paceline.config.sections.model import ModelSettings
from paceline.config.sections.scaling import ScalingOptions
from paceline.config.tokenizers import TokenizerSettings
from paceline.config.uploads import DataFolder
from paceline.enums import WorkerKind
from paceline.plugins import StrictModel

Port = Annotated[int, Field(ge=0, le=65535)]


class TlsSettings(StrictModel):
    """Certificates of this process; enables TLS on every gRPC channel and weight stream."""

    certificate: Path
    key: Path
    authority: Path
    """CA whose certificates are trusted: of servers, and of clients if `require_client`."""
    peer_name: str = Field(default="paceline.internal", pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    """DNS name in every certificate; each kind of service also has `KIND.` before it. A server must
    present the name of the kind being called, a client one that the RPC allows."""
    require_client: bool = True
    """Clients must present a certificate of the authority too. Off only for the gateway, whose
    clients show a token; any other service without it refuses all calls."""
    reload_within_s: float = Field(default=3600.0, ge=0)
    """When its certificates change, a process drains and exits within this time to reload them."""


class LogSettings(StrictModel):
    """Destination and level of the log."""

    level: str = "INFO"
    path: Path | None = None
    """Rotated file; standard error if null."""
    max_bytes: int = 16 << 20
    backups: int = 3


class TracingSettings(StrictModel):
    """Export of traces; see docs/tracing.md."""

    endpoint: str = Field(pattern=r"^https?://[^/\s]+$")
    """OTLP over gRPC, e.g. `http://collector:4317`; https: TLS."""
    sample: float = Field(default=0.01, ge=0, le=1)
    """Share of groups whose traces are sampled; the same for all services."""
    authority: Path | None = None
    """CA that the endpoint's certificate must come from; the system's if null."""
    headers_file: Path | None = None
    """File of `name: value` lines to send as headers, such as an API key."""
    queue: int = Field(default=8192, ge=1)
    """Spans waiting to be sent; further ones are dropped and counted."""
    batch: int = Field(default=512, ge=1)
    """Spans per message."""
    every_s: float = Field(default=5.0, gt=0)
    """Interval between messages; a full batch is sent at once."""
    timeout_s: float = Field(default=5.0, gt=0)
    """For sending a message, retries included."""


class HeartbeatSettings(StrictModel):
    """File that a supervisor touches; a child exits when it goes stale."""

    path: Path
    stale_s: float = 60.0


class ProbeSettings(StrictModel):
    """Limits behind `/livez` and `/readyz` on the metrics port."""

    stuck_s: float = Field(default=60.0, gt=0)
    """A process whose event loop is blocked for this long is not alive."""
    silent_s: float = Field(default=120.0, gt=0)
    """A process whose own pending work makes no progress for this long is not ready."""
    dead_s: float = Field(default=600.0, gt=0)
    """Likewise, after which it is not alive."""
    answer_s: float = Field(default=10.0, gt=0)
    """Experience is not ready when the store has not answered for this long."""
    first_s: float = Field(default=3600.0, gt=0)
    """Limit for what a trainer does for the first time (a step that compiles, a checkpoint)."""
    slack: float = Field(default=10.0, ge=1)
    """Afterwards the limit is this multiple of the longest so far, if above the limits above."""


class ServiceSettings(StrictModel):
    """Settings common to all services; those of its kind are under `options`."""

    kind: WorkerKind
    worker_id: str
    host: str = "127.0.0.1"
    advertise: str = ""
    """host:port at which others reach this process; host and bound port if empty."""
    port: Port = 0
    """gRPC port; 0: any free one."""
    metrics_host: str = ""
    """Address to bind `metrics_port` to; `host` if empty."""
    metrics_port: Port = 0
    """HTTP port for /metrics, /livez and /readyz; 0: any free one."""
    site: str = "local"
    run_dir: Path = Path("runs/local")
    storage: str = ""
    """Folder or fsspec URL (`s3://bucket/prefix`) for checkpoints, below `jobs/<job id>`; `run_dir`
    if empty. The trainer's image and environment provide what a URL needs (`s3fs`, credentials)."""
    experience: str = ""
    """host:port of the experience service."""
    store_url: str = Field(default="", repr=False)
    """redis://, rediss:// (TLS) or unix:// URL, redis+cluster:// or rediss+cluster:// for a
    cluster; experience only."""
    job_id: str = ""
    """Job that the process works for; empty: a shared pool."""
    credential: Path | None = None
    """File with the credential of a trainer or rollout worker, from whatever starts it; null for
    all other services."""
    grace_s: float = 20.0
    token: str = Field(default="", repr=False)
    """Gateway and controller only: the bootstrap token of the installation, from which the
    controller derives its own. If empty, the gateway generates one in `run_dir`."""
    tls: TlsSettings | None = None
    service_keys: Path | None = None
    """File with what proves kinds of service where there are no certificates; see
    docs/security.md."""
    insecure: bool = False
    """Neither certificates nor keys: everybody who reaches the port may call every method. For
    tests."""
    limits: LimitSettings = LimitSettings()
    """Must be the same in all processes of an installation."""
    packages: PackageSettings = PackageSettings()
    """Settings of experience, environment and reward, which run the code of jobs."""
    plugins: PluginSettings = PluginSettings()
    """Settings of experience, gateway, reward and trainer, which check or call what jobs name."""
    models: ModelSettings = ModelSettings()
    """Settings of gateway and trainer, which fetch the models of jobs."""
    tokenizers: TokenizerSettings = TokenizerSettings()
    """Settings of environment, gateway and tracking, which use the tokenizers of all jobs."""
    probes: ProbeSettings = ProbeSettings()
    logs: LogSettings = LogSettings()
    tracing: TracingSettings | None = None
    """Off if null."""
    supervisor: HeartbeatSettings | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of this kind of service: one of the `...Options` below, validated by the service."""

    @field_validator("limits", "plugins", mode="before")
    @classmethod
    def _defaults_if_null(cls, value: Any) -> Any:
        return {} if value is None else value


class GatewayOptions(StrictModel):
    """Options of the gateway."""

    http_port: Port = 8300
    """Port of REST; 0: any free one."""
    https: bool = False
    """Serve REST with the certificate of `tls`; clients need none."""
    dtype: Dtype = "auto"
    """Meaning of `dtype: auto` in a job; `auto`: what the gateway's machine computes fast."""
    endpoints: tuple[str, ...] | None = None
    """Names that jobs may give as `model.endpoint.name`, those of the environment workers' option
    `endpoints`; null: other names are refused by these workers only."""
    probe_models: bool = False
    """Compute a few layers of what `config.json` describes, with random weights, before a job is
    accepted; needs torch."""


class PoolOptions(StrictModel):
    """A pool of rollout workers on one type of machine."""

    cost: float = Field(default=1.0, gt=0)
    """Cost of a worker per hour, in a unit common to all pools; cheapest tokens are used first."""
    speed: float = Field(default=1.0, gt=0)
    """Tokens per second of a worker, relative to the other pools."""
    max_replicas: int = Field(default=64, ge=0)
    """Maximum over all jobs."""
    min_replicas: int = Field(default=0, ge=0)
    """Minimum for each scaled job that may use the pool, whatever the other pools cost."""
    spot: bool = False
    """Its machines may be preempted at any time."""
    engines: dict[str, dict[str, Any]] = Field(default_factory=dict, repr=False)
    """Process runtime: `engines` of the rollout workers started in this pool."""


class PoolsFile(StrictModel):
    """The file of `paceline up --pools`."""

    pools: dict[str, PoolOptions] = Field(min_length=1)


class WorldsFile(StrictModel):
    """The file of `paceline up --worlds`."""

    worlds: dict[str, dict[str, Any]] = Field(min_length=1)


class ModelsFile(StrictModel):
    """The file of `paceline up --models`."""

    models: ModelSettings


class EndpointsFile(StrictModel):
    """The file of `paceline up --endpoints`."""

    endpoints: dict[str, EndpointSettings] = Field(min_length=1)


class LimitsFile(StrictModel):
    """The file of `paceline up --limits`."""

    limits: LimitSettings


class ControllerOptions(StrictModel):
    """Options of the controller."""

    runtime: Literal["process", "kubernetes"] = "process"
    kubernetes: KubernetesOptions = KubernetesOptions()
    pools: dict[str, PoolOptions] = Field(
        default_factory=lambda: {"default": PoolOptions()}, min_length=1
    )
    """Pools of rollout workers that jobs may use, by name."""
    trainer_cost: float = Field(default=1.0, gt=0)
    """Cost of a trainer rank per hour, in the unit of the pools' `cost`; for the metrics."""
    weights_mbit_per_s: float | None = Field(default=None, gt=0)
    """Process runtime: `weights_mbit_per_s` of the rollout workers and trainers it starts."""
    weights_transport: str = "auto"
    """Process runtime: `weights_transport` of these."""
    worlds: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Process runtime: `worlds` of the environment workers it starts."""
    endpoints: dict[str, EndpointSettings] = Field(default_factory=dict)
    """Process runtime: `endpoints` of the reward and environment workers it starts."""
    scaling: ScalingOptions = ScalingOptions()
    backfill_after_s: float = Field(default=600.0, ge=0)
    """How long smaller jobs may overtake a queued one; then freed capacity is kept for it."""
    environment_replicas: int = Field(default=1, ge=1)
    reward_replicas: int = Field(default=1, ge=1)
    period_s: float = Field(default=0.5, gt=0)
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Time for a started process to answer its liveness probe, and later its health check."""
    load_timeout_s: float = Field(default=3600.0, gt=0)
    """Process runtime: time for a process that is alive to get ready, as one that loads a model."""
    max_restart_backoff_s: float = Field(default=15.0, gt=0)
    """Upper bound of the exponential restart backoff."""
    give_up_after: int = Field(default=10, ge=1)
    """Starts of a job's process without progress until the job fails."""


SandboxLevel = Annotated[int, Field(ge=2, le=3)]


class ExperienceOptions(StrictModel):
    """Options of the experience service."""

    compress_over_bytes: int = Field(default=1024, ge=0)
    """Payloads above this size are compressed."""
    member_lease_s: float = Field(default=6.0, gt=0)
    """A worker without a heartbeat for this long is removed from the roster."""
    store_wait_s: float = Field(default=60.0, ge=0)
    """How long to wait for the store at startup; then the process exits."""
    max_audit_entries: int = Field(default=100_000, ge=1000)
    """Approximate number of audit entries in the store; files and logs have all of them."""
    lease_return_s: float = Field(default=1.0, gt=0)
    """How long a worker whose lease stream broke may take to reconnect; then its episodes are
    leased again."""
    sweep_s: float = Field(default=0.5, gt=0)
    """Interval between checks of leases, stragglers and evals."""
    verify_interval_s: float = Field(default=60.0, gt=0)
    """Interval between verifications of every live ledger, for the metrics."""
    plugins_s: float = Field(default=30.0, gt=0)
    """Timeout for building the samplers, task sources, filters and advantages of a job."""
    sandbox_level: SandboxLevel = 2
    """Code that came with a job runs only where the sandbox has at least this level (`paceline
    doctor` says which it has): 2, or 3 with namespaces."""
    code_memory_bytes: int = Field(default=2 << 30, ge=1 << 28)
    """Address space of a process that lists tasks, or runs replays, filters and advantages, of
    code that came with a job."""
    code_call_s: float = Field(default=30.0, gt=0)
    """Timeout of a call of a replay, a filter or an advantage of code that came with a job."""
    max_code_processes: int = Field(default=16, ge=1)
    """Processes with filters and advantages, over all jobs that bring some; one for each."""
    data_folders: tuple[DataFolder, ...] = ()
    """Folders and prefixes of URLs (`/data`, `s3://bucket/team/`) below which jobs may read data
    (docs/data.md); data that come with a job need none. All tenants may read them, but for run
    directories and caches of Paceline in them."""
    data_s: float = Field(default=600.0, gt=0)
    """Timeout of reading and checking all rows of a source, when a job is submitted."""
    data_bytes: int = Field(default=8 << 30, ge=1 << 20)
    """Temporary disk space for indexes of data, and for rows that cannot be read in place."""
    data_memory_bytes: int = Field(default=2 << 30, ge=1 << 28)
    """Address space of the process that reads a source."""
    plugins_bytes: int = Field(default=2 << 30, ge=1 << 20)
    """Memory limit of the separate process that tries them before a job is accepted."""
    webhooks: WebhookSettings = WebhookSettings()
    read_only: bool = False
    """Only reads the store, as commands on a run directory need it in which nothing runs: no job
    goes on, ends or is deleted, and no webhook is sent."""


class EnvironmentOptions(StrictModel):
    """Options of an environment worker."""

    environments: tuple[str, ...] = ()
    """Names of the environments that this worker can run; any if empty."""
    slots: int = Field(default=1024, ge=1)
    """Concurrent training episodes."""
    eval_slots: int = Field(default=1024, ge=1)
    """Concurrent eval episodes, in addition."""
    flush_s: float = Field(default=1.0, gt=0)
    """Sampled tokens are saved this long after they arrive, or eight times as long after if they
    took less time than this to sample, unless their episode has ended."""
    flush_tokens: int = Field(default=256, ge=1)
    score_timeout_s: float = Field(default=60.0, gt=0)
    """Timeout of a call to a reward worker, plus the longest `timeout_s` of the job's parts."""
    sandbox_level: SandboxLevel = 2
    """Code that came with a job runs only where the sandbox has at least this level (`paceline
    doctor` says which it has): 2, or 3 with namespaces."""
    code_memory_bytes: int = Field(default=1 << 30, ge=1 << 28)
    """Address space of a sealed process with worlds."""
    max_code_processes: int = Field(default=128, ge=1)
    """Number of these processes over all jobs, which share them evenly."""
    worlds: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """The installation's settings of environments, by name: which servers and packages jobs may
    use. See docs/environment-adapters.md; the job's options are in its `tasks.options`."""
    endpoints: dict[str, EndpointSettings] = Field(default_factory=dict)
    """Servers whose models jobs may measure, by the name that job files give
    (`model.endpoint.name`). See docs/evaluate-and-collect.md."""
    prefix_worth: float = Field(default=16.0, ge=0)
    """Tokens in flight that one cached prefix token outweighs when a rollout worker is chosen."""


class RewardOptions(StrictModel):
    """Options of a reward worker."""

    processes: int = Field(default=2, ge=1)
    """Child processes that run user code; a hung or crashed one is replaced. As many again for
    each job that brings code."""
    sandbox_level: SandboxLevel = 2
    """Code that came with a job runs only where the sandbox has at least this level (`paceline
    doctor` says which it has): 2, or 3 with namespaces."""
    code_memory_bytes: int = Field(default=2 << 30, ge=1 << 28)
    """Address space of a process with functions that came with a job."""
    max_code_processes: int = Field(default=64, ge=1)
    """Number of these processes over all jobs, which share them evenly."""
    endpoints: dict[str, EndpointSettings] = Field(default_factory=dict)
    """Servers that rewards of jobs may ask, by the name that job files give. See
    docs/rewards.md."""


class TrackingOptions(StrictModel):
    """Options of the tracking service."""

    poll_s: float = Field(default=2.0, gt=0)
    """Interval between polls of the jobs and of their histories."""
    retry_most_s: float = Field(default=60.0, gt=0)
    """Upper bound of the backoff before a failed tracker is restarted."""
    give_up_s: float = Field(default=86400.0, gt=0)
    """How long a failing tracker of a finished job is retried."""


class WeightsOptions(StrictModel):
    """Options for the broadcast of weights."""

    weights_port: Port = 0
    weights_mbit_per_s: float | None = Field(default=None, gt=0)
    """Bandwidth cap for sending weights, and another for receiving them; none if null."""
    weights_transport: str = "http"
    """How weights travel: `http`, `shared_memory` (HTTP to processes of other machines and users),
    `auto` (the same if the system can, else `http`), or another installed transport."""

    @property
    def weights_bytes_per_s(self) -> float:
        """The cap in bytes; 0: none."""
        return (self.weights_mbit_per_s or 0.0) * 1e6 / 8


class RolloutOptions(WeightsOptions):
    """Options of a rollout worker."""

    pool: str = ""
    """Pool in which it runs; the job's first one if empty."""
    engines: dict[str, dict[str, Any]] = Field(default_factory=dict, repr=False)
    """The installation's settings of engines, by kind: interpreters, arguments, addresses. See
    docs/engines.md; the job's options are in its `rollout.engine`."""
    memory_share: float | None = Field(default=None, gt=0, lt=1)
    """Share of its GPU's memory for an engine that otherwise takes all it finds."""
    max_refusals: int = Field(default=3, ge=1)
    """Loads of one version whose canary disagrees, until the worker refuses it for good."""


class TrainerOptions(WeightsOptions):
    """Options of a trainer; all ranks read the same file."""

    incarnation: int = Field(ge=0)
