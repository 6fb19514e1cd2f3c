"""Usage of shared resources by tenant."""

from frame import Panels, Query, Size, board, graph, grid, heading
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.choices import TENANT, rate

OF_TENANT = '{tenant=~"$tenant"}'
LIMITS = (
    ("submitted", "Submitted jobs", "Unfinished jobs."),
    ("jobs", "Jobs", "Running jobs."),
    ("rollout_workers", "Rollout workers", "Over all jobs."),
    ("episodes", "Episodes in flight", "Over all jobs."),
)
SIZES = "(spec|model_files|code|uploaded|task|trajectory|metrics)_bytes"
FULL = ((None, "blue"), (0.8, "orange"), (1.0, "red"))


def tenants() -> Dashboard:
    """Usage and quota of each tenant."""
    return board(
        "tenants",
        "Tenants",
        "Usage and quotas of each tenant.",
        [*_use(), *_share()],
        variables=[TENANT],
    )


def _use() -> Panels:
    return [
        heading("Usage"),
        *(
            graph(
                title,
                about,
                Query(_of("usage", key), "{{tenant}}"),
                Query(_of("quota", key), "quota of {{tenant}}"),
                size=Size(6, 8),
            )
            for key, title, about in LIMITS
        ),
    ]


def _of(what: str, key: str) -> str:
    return f'max by (tenant) (paceline_tenant_{what}{{tenant=~"$tenant", resource="{key}"}})'


def _sizes() -> str:
    return f'{{tenant=~"$tenant", resource=~"{SIZES}"}}'


def _share() -> Panels:
    return [
        heading("Quotas"),
        graph(
            "Used share",
            "Usage divided by the limit, where there is one. At one, further work waits.",
            Query(
                f"max by (tenant, resource) (paceline_tenant_usage{OF_TENANT} / "
                f"on (tenant, resource) (paceline_tenant_quota{OF_TENANT} > 0))",
                "{{tenant}} {{resource}}",
            ),
            unit=units.PercentUnit,
            steps=FULL,
        ),
        graph(
            "Stored trajectories",
            "Trajectories of all live jobs. At the limit no episode is admitted.",
            Query(_of("usage", "stored_bytes"), "{{tenant}}"),
            Query(_of("quota", "stored_bytes"), "limit of {{tenant}}"),
            unit=units.BytesIEC,
        ),
        graph(
            "Largest item relative to its limit",
            "The largest item of each kind in the last hour or two, divided by its limit. Above "
            "one it was refused or dropped.",
            Query(
                f"max by (tenant, resource) (paceline_tenant_usage{_sizes()} / "
                f"on (tenant, resource) paceline_tenant_quota{_sizes()})",
                "{{tenant}} {{resource}}",
            ),
            unit=units.PercentUnit,
            steps=FULL,
        ),
        grid(
            "Quotas",
            "Limits of each tenant.",
            Query(f"max by (tenant, resource) (paceline_tenant_quota{OF_TENANT})"),
        ),
        graph(
            "Refused user calls",
            "Per second, all tenants: missing or invalid token, insufficient role, or a job of "
            "another tenant.",
            Query(f"sum by (reason) ({rate('paceline_access_refusals_total', '')})", "{{reason}}"),
            unit=units.CountsPerSecond,
        ),
    ]
