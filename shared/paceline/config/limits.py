"""Input limits of an installation: the section `limits` of all its processes."""

from __future__ import annotations

from pydantic import Field

from paceline.config.quota import KIB, MIB, Quota
from paceline.plugins import StrictModel


class AccessLimits(StrictModel):
    """How often a gateway lets tokens be tried and used; each one counts for itself."""

    failed_per_s: float = Field(default=10.0, gt=0, le=1e6)
    """Calls without a valid token that an address may make in a second, in the long run. An IPv6
    address counts with its /64 network."""
    failed_burst: int = Field(default=100, ge=1, le=1_000_000)
    """How many of these may come at once."""
    all_failed_per_s: float = Field(default=200.0, gt=0, le=1e6)
    """The same of all addresses together; beyond it, only addresses that have failed lately are
    refused."""
    all_failed_burst: int = Field(default=2000, ge=1, le=1_000_000)
    """How many of these may come at once."""
    calls_per_s: float = Field(default=10_000.0, gt=0, le=1e6)
    """Calls of one token in a second, in the long run; the installation's own tokens have no
    limit."""
    calls_burst: int = Field(default=20_000, ge=1, le=1_000_000)
    """How many of these may come at once."""


class LimitSettings(StrictModel):
    """Must be the same in all processes of an installation. See docs/limits.md."""

    tenant: Quota = Quota()
    """Quota of every tenant that has no quota of its own."""
    prompt_bytes: int = Field(default=MIB, ge=1, le=64 * MIB)
    """Text of one observation of an environment, before rendering."""
    reason_bytes: int = Field(default=4 * KIB, ge=64, le=64 * KIB)
    """Reason of a job's state or of a returned episode; longer texts are truncated."""
    page_bytes: int = Field(default=4 * MIB, ge=64 * KIB, le=8 * MIB)
    """Approximate size of a list page or an event: a page ends with the item that exceeds it.

    Including that item, of 32 MiB at most, it still fits into a message.
    """
    eval_window: int = Field(default=2048, ge=1, le=65536)
    """Episodes of an evaluation in the store at once."""
    eval_episodes: int = Field(default=65536, ge=1, le=1 << 20)
    """Episodes of all evaluations of a job, each run once: tasks times samples. While they run,
    their version of the weights is kept."""
    access: AccessLimits = AccessLimits()
    """Limits of the gateway on how often tokens may be tried and used."""
