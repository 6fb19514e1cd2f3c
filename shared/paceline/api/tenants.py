"""Tenants: who they are, what they may use, what they use; and the same on the wire."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline import wire
from paceline.config.load import validate
from paceline.config.quota import Quota
from paceline.v1 import tenants_pb2 as pb

COUNTS = ("submitted", "jobs", "rollout_workers", "episodes", "stored_bytes")
"""Limits on what a tenant has at a moment; none where null."""
SIZES = ("spec_bytes", "model_files_bytes", "task_bytes", "trajectory_bytes", "metrics_bytes")
"""Limits on each single thing."""
LIMITS = COUNTS + SIZES


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What a tenant has at this moment, in the units of its quota.

    Of `SIZES` the largest of the last hour or two.
    """

    submitted: int = 0
    jobs: int = 0
    rollout_workers: int = 0
    episodes: int = 0
    stored_bytes: int = 0
    spec_bytes: int = 0
    model_files_bytes: int = 0
    task_bytes: int = 0
    trajectory_bytes: int = 0
    metrics_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant; `is_custom` if its quota is not the default of the installation."""

    name: str
    quota: Quota = field(default_factory=Quota)
    is_custom: bool = False
    usage: TenantUsage = TenantUsage()


def room(limit: int | None, used: int) -> int | None:
    """How much more a limit allows; None: as much as one likes."""
    return None if limit is None else max(0, limit - used)


def quota_to(quota: Quota) -> pb.Quota:
    """A message."""
    limits = {name: getattr(quota, name) for name in LIMITS}
    return pb.Quota(weight=quota.weight, **limits)


def quota_from(message: pb.Quota, default: Quota | None = None) -> Quota:
    """From a message; a weight or a size of 0 is one that was not sent, and that of `default`.

    Raises:
        ConfigError: a limit or the weight is out of bounds.
    """
    counts = {n: getattr(message, n) if message.HasField(n) else None for n in COUNTS}
    other = default or Quota()
    rest = {n: getattr(message, n) or getattr(other, n) for n in (*SIZES, "weight")}
    return validate(Quota, counts | rest)


def tenant_to(tenant: Tenant) -> pb.Tenant:
    """A message."""
    usage = wire.to_proto(tenant.usage, pb.TenantUsage)
    quota = quota_to(tenant.quota)
    return pb.Tenant(name=tenant.name, quota=quota, is_custom=tenant.is_custom, usage=usage)


def tenant_from(message: pb.Tenant) -> Tenant:
    """From a message."""
    usage = wire.from_proto(message.usage, TenantUsage)
    return Tenant(message.name, quota_from(message.quota), message.is_custom, usage)
