"""`paceline tenants`: quotas and usage of tenants."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from paceline.config.load import validate
from paceline.config.quota import Quota
from paceline.errors import ConfigError
from paceline.front.api.documents import TenantView
from paceline.front.api.tenants import COUNTS, LIMITS, SIZES
from paceline.front.cli.entry import Exit
from paceline.front.cli.target.clients import client_of, reader_of
from paceline.front.cli.terminal.console import SafeConsole
from paceline.front.cli.terminal.printing import say
from paceline.front.cli.terminal.tables import Column, FittingTable
from paceline.platform.text import human_bytes


def show(arguments: Namespace) -> int:
    """`paceline tenants`."""
    with reader_of(arguments) as client:
        _print(client.list_tenants(tenant=arguments.tenant).tenants)
    return Exit.OK


def change(arguments: Namespace) -> int:
    """`paceline tenants set NAME`: limits that are not named stay unchanged."""
    with client_of(arguments) as client:
        tenants = client.list_tenants(tenant=arguments.tenant).tenants
        now = tenants[0].quota if tenants else Quota()
        changes = {name: getattr(arguments, name) for name in (*LIMITS, "weight")}
        wanted = {name: _value(text) for name, text in changes.items() if text is not None}
        if not wanted:
            raise ConfigError("nothing to set; name a limit, e.g. --jobs 4")
        quota = validate(Quota, now.model_dump() | wanted)
        _print([client.set_quota(arguments.tenant, quota=quota)])
    return Exit.OK


def reset(arguments: Namespace) -> int:
    """`paceline tenants reset NAME`."""
    with client_of(arguments) as client:
        _print([client.set_quota(arguments.tenant)])
    return Exit.OK


def _value(text: str) -> Any:
    return None if text == "none" else text


def _print(tenants: list[TenantView]) -> None:
    if tenants:
        SafeConsole().print(count_table(tenants), "", size_table(tenants), sep="\n")
    else:
        say("no tenant has unfinished jobs or its own quota")


def count_table(tenants: list[TenantView]) -> FittingTable:
    """A row for each tenant: what it uses, and its quota."""
    counts = [Column(_title(name), rank) for rank, name in enumerate(COUNTS)]
    quota = (Column("weight", len(COUNTS)), Column("quota", len(COUNTS) + 1))
    table = FittingTable("tenant", *counts, *quota)
    for tenant in tenants:
        cells = [_cell(tenant, name) for name in COUNTS]
        source = "its own" if tenant.is_custom else "default"
        table.add_row(tenant.name, *cells, f"{tenant.quota.weight:g}", source)
    return table


def size_table(tenants: list[TenantView]) -> FittingTable:
    """One row for each size that is limited: as columns, they would not fit."""
    table = FittingTable("tenant", "size of", "recent maximum")
    for tenant in tenants:
        for name in SIZES:
            table.add_row(tenant.name, _title(name), _cell(tenant, name))
    return table


def _title(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _cell(tenant: TenantView, name: str) -> str:
    shown = human_bytes if name.endswith("_bytes") else str
    limit: int | None = getattr(tenant.quota, name)
    return f"{shown(getattr(tenant.usage, name))} of {'any' if limit is None else shown(limit)}"
