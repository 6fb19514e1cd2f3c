"""`paceline tenants`: quotas of tenants, and what they use."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.cli.entry import Exit
from paceline.cli.remote import client_of
from paceline.config.load import validate
from paceline.config.quota import Quota
from paceline.errors import ConfigError
from paceline.rest import TenantView
from paceline.tenants import LIMITS


def show(arguments: Namespace) -> int:
    """`paceline tenants`."""
    with client_of(arguments) as client:
        _print(client.list_tenants(tenant=arguments.tenant).tenants)
    return Exit.OK


def change(arguments: Namespace) -> int:
    """`paceline tenants set NAME`: limits that are not named stay as they are."""
    with client_of(arguments) as client:
        found = client.list_tenants(tenant=arguments.tenant).tenants
        now = found[0].quota if found else Quota()
        changes = {name: getattr(arguments, name) for name in (*LIMITS, "weight")}
        wanted = {name: _value(text) for name, text in changes.items() if text is not None}
        if not wanted:
            raise ConfigError("nothing to set; name a limit, e.g. --jobs 4")
        quota = validate(Quota, now.model_dump() | wanted)
        _print([client.set_quota(arguments.tenant, quota)])
    return Exit.OK


def reset(arguments: Namespace) -> int:
    """`paceline tenants reset NAME`."""
    with client_of(arguments) as client:
        _print([client.set_quota(arguments.tenant, None)])
    return Exit.OK


def _value(text: str) -> Any:
    return None if text == "none" else text


def _print(tenants: list[TenantView]) -> None:
    table = Table("tenant", *(name.replace("_", " ") for name in LIMITS), "weight", "", box=None)
    for each in tenants:
        cells = [f"{getattr(each.use, name)} of {_limit(each.quota, name)}" for name in LIMITS]
        source = "" if each.own else "default"
        table.add_row(each.name, *cells, f"{each.quota.weight:g}", source)
    Console().print(table)


def _limit(quota: Quota, name: str) -> str:
    limit = getattr(quota, name)
    return "any" if limit is None else str(limit)
