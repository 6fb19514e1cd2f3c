"""Tenants with their quotas and usage, and conversions to and from protobuf."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.config.load import validate
from paceline.config.quota import Quota
from paceline.platform import wire
from paceline.v1 import tenants_pb2 as pb

COUNTS = ("submitted", "jobs", "rollout_workers", "episodes", "stored_bytes")
"""Limits on what a tenant has at a time; null: unlimited."""
SIZES = (
    "spec_bytes",
    "model_files_bytes",
    "code_bytes",
    "uploaded_bytes",
    "task_bytes",
    "trajectory_bytes",
    "metrics_bytes",
)
"""Limits on the size of a single item."""
LIMITS = COUNTS + SIZES


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """The current usage of a tenant, in the units of its quota.

    For `SIZES`, the largest item of the last hour or two.
    """

    submitted: int = 0
    jobs: int = 0
    rollout_workers: int = 0
    episodes: int = 0
    stored_bytes: int = 0
    spec_bytes: int = 0
    model_files_bytes: int = 0
    code_bytes: int = 0
    uploaded_bytes: int = 0
    task_bytes: int = 0
    trajectory_bytes: int = 0
    metrics_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant; `is_custom` unless its quota is the installation's default."""

    name: str
    quota: Quota = field(default_factory=Quota)
    is_custom: bool = False
    usage: TenantUsage = TenantUsage()


def room(limit: int | None, used: int) -> int | None:
    """How much more a limit allows; None: unlimited."""
    return None if limit is None else max(0, limit - used)


def quota_to(quota: Quota) -> pb.Quota:
    """The quota as a message."""
    limits = {name: getattr(quota, name) for name in LIMITS}
    return pb.Quota(weight=quota.weight, **limits)


def quota_from(message: pb.Quota, default: Quota | None = None) -> Quota:
    """The quota in a message; a weight or size of 0 was not sent and is taken from `default`.

    Raises:
        ConfigError: a limit or the weight is out of bounds.
    """
    counts = {n: getattr(message, n) if message.HasField(n) else None for n in COUNTS}
    other = default or Quota()
    rest = {n: getattr(message, n) or getattr(other, n) for n in (*SIZES, "weight")}
    return validate(Quota, counts | rest)


def tenant_to(tenant: Tenant) -> pb.Tenant:
    """The tenant as a message."""
    usage = wire.to_proto(tenant.usage, pb.TenantUsage)
    quota = quota_to(tenant.quota)
    return pb.Tenant(name=tenant.name, quota=quota, is_custom=tenant.is_custom, usage=usage)


def tenant_from(message: pb.Tenant) -> Tenant:
    """The tenant in a message."""
    usage = wire.from_proto(message.usage, TenantUsage)
    return Tenant(message.name, quota_from(message.quota), message.is_custom, usage)
