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
SIZES = "(spec|model_files|task|trajectory|metrics)_bytes"
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


def _sizes() -> str:
    return f'{{tenant=~"$tenant", of=~"{SIZES}"}}'


def _share() -> Panels:
    return [
        heading("Quotas"),
        graph(
            "Used share",
            "Use by limit; what nothing limits is not shown. At one, what is more waits.",
            Query(
                f"max by (tenant, of) (paceline_tenant_use{OF_TENANT} / "
                f"on (tenant, of) (paceline_tenant_quota{OF_TENANT} > 0))",
                "{{tenant}} {{of}}",
            ),
            unit=units.PercentUnit,
            steps=FULL,
        ),
        graph(
            "Stored trajectories",
            "Of all live jobs. At the limit no episode is admitted.",
            Query(_of("use", "stored_bytes"), "{{tenant}}"),
            Query(_of("quota", "stored_bytes"), "limit of {{tenant}}"),
            unit=units.BytesIEC,
        ),
        graph(
            "Largest by limit",
            "The largest of each kind of the last hour or two, by its limit. What is above one "
            "was refused or dropped.",
            Query(
                f"max by (tenant, of) (paceline_tenant_use{_sizes()} / "
                f"on (tenant, of) paceline_tenant_quota{_sizes()})",
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
