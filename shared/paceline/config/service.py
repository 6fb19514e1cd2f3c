"""Settings of one service process: written by whoever starts it, read once at start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from paceline.config.base import Closed
from paceline.types import WorkerKind

Port = Annotated[int, Field(ge=0, le=65535)]


class TlsSettings(Closed):
    """Certificates of this process; mutual TLS on every channel if set."""

    certificate: Path
    key: Path
    authority: Path


class LogSettings(Closed):
    """Where events go."""

    level: str = "INFO"
    path: Path | None = None
    """Rotated file; standard error if null."""
    max_bytes: int = 16 << 20
    backups: int = 3


class HeartbeatSettings(Closed):
    """The file that a supervisor touches; a child whose supervisor stays away ends itself."""

    path: Path
    stale_s: float = 60.0


class ServiceSettings(Closed):
    """Everything a process needs to know; the section of its kind under `options`."""

    kind: WorkerKind
    worker_id: str
    host: str = "127.0.0.1"
    advertise: str = ""
    """host:port under which others reach it; host and bound port if empty."""
    port: Port = 0
    """gRPC; 0: any free one."""
    metrics_port: Port = 0
    """Prometheus; 0: any free one."""
    site: str = "local"
    run_dir: Path = Path("runs/local")
    experience: str = ""
    """host:port of the experience service."""
    store_url: str = ""
    """redis:// or rediss:// or unix:// URL; experience only."""
    job_id: str = ""
    """Empty: a shared pool."""
    grace_s: float = 20.0
    token: str = Field(default="", repr=False)
    """Bearer token that this process sends; off if empty."""
    tls: TlsSettings | None = None
    logs: LogSettings = LogSettings()
    supervisor: HeartbeatSettings | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    """Section of the kind: one of the `...Options` below, validated by the service itself."""


class GatewayOptions(Closed):
    """Section of the gateway."""

    http_port: Port = 8300
    """REST; 0: any free one."""


class ControllerOptions(Closed):
    """Section of the controller."""

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
    sweep_s: float = Field(default=0.5, gt=0)
    """How often leases, stragglers and evals are looked after."""


class EnvironmentOptions(Closed):
    """Section of an environment worker."""

    pool: str = ""
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
    prefix_worth: float = Field(default=16.0, ge=0)
    """Tokens in flight that a token of a prefix outweighs when a rollout worker is picked."""


class RewardOptions(Closed):
    """Section of a reward worker."""

    processes: int = Field(default=2, ge=1)
    """Children that run user code; a hung or crashed one is replaced."""


class RolloutOptions(Closed):
    """Section of a rollout worker."""

    weights_port: Port = 0


class TrainerOptions(Closed):
    """Section of a trainer; the same file for all ranks."""

    incarnation: int = Field(ge=0)
    weights_port: Port = 0
