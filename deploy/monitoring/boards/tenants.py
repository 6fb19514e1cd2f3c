"""Who uses how much of what is shared."""

from frame import Panels, Query, Size, board, graph, grid, heading
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.choices import TENANT, rate

OF_TENANT = '{tenant=~"$tenant"}'
LIMITS = (
    ("submitted", "Submitted jobs", "That are not over."),
    ("jobs", "Jobs", "That run."),
    ("rollout_workers", "Rollout workers", "Over all jobs."),
    ("episodes", "Episodes in flight", "Over all jobs."),
)
FULL = ((None, "blue"), (0.8, "orange"), (1.0, "red"))


def tenants() -> Dashboard:
    """Use and quota of each."""
    return board(
        "tenants",
        "Tenants",
        "What each tenant uses of what it may use.",
        [*_use(), *_share()],
        variables=[TENANT],
    )


def _use() -> Panels:
    return [
        heading("Use"),
        *(
            graph(
                title,
                about,
                Query(_of("use", key), "{{tenant}}"),
                Query(_of("quota", key), "quota of {{tenant}}"),
                size=Size(6, 8),
            )
            for key, title, about in LIMITS
        ),
    ]


def _of(what: str, key: str) -> str:
    return f'max by (tenant) (paceline_tenant_{what}{{tenant=~"$tenant", of="{key}"}})'


def _share() -> Panels:
    return [
        heading("Quotas"),
        graph(
            "Used share",
            "Use by quota; tenants without a quota are not shown. At one, what is more waits.",
            Query(
                f"max by (tenant, of) (paceline_tenant_use{OF_TENANT} / "
                f"on (tenant, of) (paceline_tenant_quota{OF_TENANT} > 0))",
                "{{tenant}} {{of}}",
            ),
            unit=units.PercentUnit,
            steps=FULL,
        ),
        grid(
            "Quotas",
            "What each tenant may use at once.",
            Query(f"max by (tenant, of) (paceline_tenant_quota{OF_TENANT})"),
        ),
        graph(
            "Refused calls of users",
            "Per second, all tenants: no token, one that opens nothing, too small a role, "
            "another tenant's job.",
            Query(f"sum by (reason) ({rate('paceline_access_refusals_total', '')})", "{{reason}}"),
            unit=units.CountsPerSecond,
        ),
    ]
